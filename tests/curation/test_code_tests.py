"""Tests of programs against what solutions print: by hand, then by programs in the sandbox."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.curation.code_tests import (
    CodeTestOptions,
    Judged,
    OpenCase,
    Tests,
    check_sandbox,
    check_tests,
    judge_test,
    run_all,
    run_on_tests,
)
from megatron_rl.curation.rows import Row, read_rows
from megatron_rl.curation.samples import Solution, Solutions, read_solutions
from verification.code.outputs import Job, Printed
from verification.code.problem import parse_tests
from verification.code.setup import CodeLimits

OPTIONS = CodeTestOptions()
OTHER = {"question": "another?"}


def said(*outputs: str | None) -> list[Printed]:
    """None: the program failed."""
    return [
        Printed(failure="runtime_error") if text is None else Printed(text.encode())
        for text in outputs
    ]


@pytest.mark.parametrize(
    ("expected", "outputs", "verdict", "stdout"),
    [
        ("7", ["7", "7\n", "8", None], "kept", "7"),
        # Somebody passes: the test stays, though most print something else.
        ("8", ["7", "7", "7", "8"], "kept", "8"),
        ("7", ["7", "8", "9", None], "low_agreement", None),
        ("5", ["7", "7", "7", "8"], "relabelled", "7"),
        ("5", ["7", "7", "8", "9"], "no_solution_passes", None),
        (None, ["7", "7", "7", "7 "], "generated", "7"),
        (None, ["7", "7", "8", None], "no_agreed_output", None),
        (None, [None, None, None], "low_agreement", None),
    ],
)  # fmt: skip
def test_each_test_is_judged_by_agreement(
    expected: str | None, outputs: list[str | None], verdict: str, stdout: str | None
) -> None:
    case = OpenCase("1", expected)
    judged = judge_test(case, said(*outputs), Tests(cases=[case]), OPTIONS)
    assert judged == Judged(verdict, None if stdout is None else OpenCase("1", stdout))


def test_outputs_are_compared_as_the_tests_say() -> None:
    case = OpenCase("1")
    close = said("0.3333333", "0.33333331", "0.33333334")
    tests = Tests(cases=[case], comparison="float")
    assert judge_test(case, close, tests, OPTIONS).verdict == "generated"
    assert judge_test(case, close, Tests(cases=[case]), OPTIONS).verdict == "low_agreement"
    binary = [Printed(b"\xff")] * 3
    assert judge_test(case, binary, tests, OPTIONS).verdict == "output_is_no_text"


def rows(tmp_path: Path, *lines: dict[str, Any]) -> list[Row]:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(
            json.dumps({"task": "code", "answer": "", "question": f"q{i}?", "id": f"p{i}"} | line)
            + "\n"
            for i, line in enumerate(lines)
        )
    )
    return read_rows(path)


def entry(*cases: dict[str, str], **more: Any) -> str:
    return json.dumps({"cases": list(cases), **more})


def test_problems_are_kept_in_each_language_with_the_tests_that_are_left(tmp_path: Path) -> None:
    found = rows(
        tmp_path,
        {"entry": entry({"stdin": "1", "stdout": "2"}, {"stdin": "2"}, packages=["numpy"])},
        {"entry": entry({"stdin": "1", "stdout": "2"}, language="cpp")},
        {"entry": entry({"stdin": "1", "stdout": "2"})},
        {"entry": entry({"stdin": "1", "stdout": "2"})},
        {"entry": json.dumps({"unit_tests": "assert f()", "entry_point": "f"})},
        {"task": "math", "answer": "7"},
    )
    alike = [said("2", "3")] * 3
    printed = {
        "p0": [*alike, said(None, None)],
        "p1": [said("2")] * 3,
        "p2": [said("2"), said("2"), said(None)],
        "p3": [said("1"), said("2"), said("3")],
    }
    outcome = check_tests(found, printed, options=OPTIONS)
    assert [row.prompt.id for row in outcome.rows] == ["p0/python", "p0/cpp", "p1", "p4", "p5"]
    assert outcome.report.dropped == {"too_few_solutions": 1, "too_few_tests": 1}
    assert outcome.report.added == {"language_version": 1}
    assert outcome.report.figures["not_examined"] == 2
    assert outcome.report.figures["tests"] == {"kept": 2, "generated": 1, "low_agreement": 1}
    cpp = outcome.rows[1].prompt
    tests = parse_tests(cpp.entry)
    assert (tests.language, tests.packages) == ("cpp", ["numpy"])
    assert [(case.stdin, case.stdout) for case in tests.cases] == [("1", "2"), ("2", "3")]
    assert cpp.question == "q0?\n\nWrite the program in C++20."


def test_bad_entries_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="p.jsonl:1: the entry is not the JSON of tests"):
        check_tests(rows(tmp_path, {"entry": "no"}), {}, options=OPTIONS)
    # A mathematical problem that has no task is read as one of code.
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n')
    words = r"p\.jsonl:1: there is no entry; .* has no task and is taken as 'code' \(--task\)"
    with pytest.raises(InputError, match=words):
        check_tests(read_rows(path, task="code"), {}, options=OPTIONS)
    with pytest.raises(InputError, match="there is no entry; .* only where it is known$"):
        check_tests(rows(tmp_path, {"task": "code"}), {}, options=OPTIONS)
    with pytest.raises(InputError, match="--languages"):
        CodeTestOptions(languages=["ada"])
    with pytest.raises(InputError, match="--relabel-agreement"):
        CodeTestOptions(agreement=0.8, relabel_agreement=0.7)


RECORD = {
    "group": 0, "task": "code", "language": "", "answer": "", "reward": 1.0, "parts": {},
    "reason": "correct", "tokens": 9, "versions": [0], "finish_reason": "stop", "seed": 0,
    "prompt_tail": "",
}  # fmt: skip


def test_an_id_of_a_line_number_counts_only_with_the_same_question(tmp_path: Path) -> None:
    """The file loses its first line after the run, so that each number is another problem's."""
    path, solutions = tmp_path / "p.jsonl", tmp_path / "s.jsonl"
    lines = [
        {"task": "code", "question": f"q{n}?", "entry": entry({"stdin": "1"})} for n in range(3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [row.prompt for row in read_rows(path)]
    names = [prompt.id for prompt in asked]
    text = "<think></think>```python\nprint(9)\n```"
    records = [
        RECORD | {"prompt_id": prompt.id, "index": 0, "problem": prompt.question, "text": text}
        for prompt in asked
    ]
    solutions.write_text("".join(json.dumps(record) + "\n" for record in records))
    of_run = read_solutions(solutions, RewardConfig())
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[1:], lines[2] | OTHER]))
    shifted = read_rows(path)
    assert [row.prompt.id for row in shifted] == names
    assert [of_run.id_for(row) for row in shifted] == [names[1], names[2], None]
    # A stated id is the problem's, also where its question is written otherwise.
    path.write_text(json.dumps(lines[0] | OTHER | {"id": names[1]}))
    assert [of_run.id_for(row) for row in read_rows(path)] == [names[1]]
    # Lines without a question have nothing but the id.
    plain = [{"id": name, "source": "print(9)"} for name in names]
    solutions.write_text("".join(json.dumps(line) + "\n" for line in plain))
    by_id = read_solutions(solutions, RewardConfig())
    assert [by_id.id_for(row) for row in shifted] == names


def test_solutions_of_an_evaluation_set_are_found_by_the_question(tmp_path: Path) -> None:
    text = "<think></think>```python\nprint(9)\n```"
    lines = [
        RECORD | {"prompt_id": "graded/a", "index": 0, "problem": "Q0?", "text": text},
        RECORD | {"prompt_id": "graded/a", "index": 1, "problem": "Q0?", "text": "none"},
        RECORD | {"prompt_id": "graded/b", "index": 0, "problem": "Another?", "text": text},
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_solutions(path, RewardConfig())
    [row] = rows(tmp_path, {"entry": entry({"stdin": "3", "stdout": "9"})})
    assert row.prompt.question == "q0?"
    limits = check_sandbox(CodeLimits())
    printed, counts = run_on_tests([row], found, limits, workers=1)
    assert printed == {"p0": [[Printed(b"9\n")]]}
    busy = "import time, numpy\nwhile time.process_time() < 1: pass"
    again = Solutions({"p0": [Solution(busy, "py")]}, 0)
    [row] = rows(tmp_path, {"entry": entry({"stdin": "3"}, time_s=0.5, packages=["numpy"])})
    assert run_on_tests([row], again, limits, workers=1)[0] == {
        "p0": [[Printed(failure="test_timeout")]]
    }
    assert counts == {
        "solutions_run": 1, "solutions_not_run": 0, "solutions_without_program": 1,
        "solutions_of_no_problem": 1,
    }  # fmt: skip


def test_a_solution_that_takes_too_long_altogether_is_killed_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = check_sandbox(CodeLimits(test_s=1.0))
    sleeper = Job("import time\nwhile True: time.sleep(1)", "python", ["1"], limits)
    [late] = run_all([sleeper], workers=1)
    assert late == [Printed(failure="test_timeout")]
    # Less than the process needs to begin: it cannot answer that it got too little of a core.
    monkeypatch.setattr("megatron_rl.curation.code_tests.START_S", 0.05)
    hurried = msgspec.structs.replace(limits, host_patience=0.0)
    [killed] = run_all([msgspec.structs.replace(sleeper, limits=hurried)], workers=1)
    assert killed == "no answer within 0 s"


@pytest.mark.slow(20)
def test_the_command_runs_solutions_in_the_sandbox(tmp_path: Path) -> None:
    cases = [{"stdin": "3", "stdout": "9"}, {"stdin": "4", "stdout": "15"}, {"stdin": "5"}]
    rows(tmp_path, {"entry": entry(*cases)})
    square = "n = int(input())\nprint(n * n)"
    programs = [
        ("python", square),
        ("python", "print(int(input()) ** 2)"),
        ("cpp", "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * n; }"),
        ("python", "while True: pass"),
        ("python", "import os\nos.kill(os.getppid(), 9)"),
        ("python", "print(open('/etc/passwd').read().count('root') * 0 + 9)\nundefined"),
    ]
    solutions = tmp_path / "s.jsonl"
    solutions.write_text(
        "".join(
            json.dumps({"id": "p0", "language": tag, "source": source}) + "\n"
            for tag, source in programs
        )
    )
    out = tmp_path / "out.jsonl"
    command = ["data", "code-tests", str(tmp_path / "p.jsonl"), "--solutions", str(solutions)]
    config = tmp_path / "c.toml"
    config.write_text("[reward]\ntest_s = 1.0\n")
    assert main([*command, "--out", str(out), "--config", str(config), "--workers", "2"]) == 0
    written = read_rows(out)
    assert [row.prompt.id for row in written] == ["p0/python", "p0/cpp"]
    tests = parse_tests(written[0].prompt.entry)
    assert [case.stdout.strip() for case in tests.cases] == ["9", "16", "25"]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["figures"]["tests"] == {"kept": 1, "relabelled": 1, "generated": 1}
    assert report["figures"]["solutions_not_run"] == 0
