import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.types import ChatMessage, Prompt, Score, ScoreFailed
from tests.verification.requests import boxed
from verification.audit import (
    Disagreement,
    Record,
    beside_bare,
    changes,
    disagreements,
    read_records,
    reason_rows,
)
from verification.library import Sample


def _write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _score(reason: str, **parts: float) -> Score:
    return Score(sum(parts.values()), parts, reason)


def test_records_of_a_run_find_their_tests_by_prompt(tmp_path: Path) -> None:
    prompt = Prompt("code:3", "code", [ChatMessage("user", "?")], "", entry='{"cases": []}')
    record = {
        "prompt_id": "code:3", "group": 4, "index": 0, "task": "code", "problem": "?",
        "language": "", "text": "x", "answer": "", "reward": 0.0, "parts": {}, "tokens": 9,
        "reason": "unfinished", "versions": [0], "finish_reason": "length", "seed": 5,
        "prompt_tail": "<think>",
    }  # fmt: skip
    (found,) = read_records(_write(tmp_path / "r.jsonl", record), {prompt.id: prompt})
    assert found == Record(
        Sample(
            text="x", task="code", entry=prompt.entry, problem="?", tokens=9, is_finished=False,
            seed=5, prompt_tail="<think>",
        ),
        "unfinished",
        line=1,
    )  # fmt: skip


def test_of_a_conversation_the_text_that_was_graded_is_graded_again(tmp_path: Path) -> None:
    graded = {"text": "a<eos>tool<eos>b", "to_grade": "b", "reason": "correct"}
    outcome = {"text": "x", "is_outcome": True, "reason": "out_of_turns"}
    path = _write(tmp_path / "r.jsonl", graded, outcome, {"text": "plain"})
    found = read_records(path, {})
    assert [record.sample.text for record in found] == ["b", "plain"]
    with pytest.raises(InputError, match="environments decided all rewards"):
        read_records(_write(tmp_path / "only.jsonl", outcome), {})


@pytest.mark.parametrize("text", ['{"answer": "7"}', "[]", '{"text": 7}', "no json"])
def test_bad_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "a"}\n\n' + text + "\n")
    with pytest.raises(InputError, match=r"r\.jsonl:3: .*expected"):
        read_records(path, {})


def test_reasons_are_counted_most_frequent_first() -> None:
    records = [Record(Sample(text=f"t{i}", answer=f"a{i}"), "") for i in range(4)]
    scores = [
        _score("wrong_answer", format=0.1),
        _score("correct", format=0.1, correct=0.9, says_text=-1.0),
        ScoreFailed(2, "the pool broke"),
        _score("correct", format=0.1, correct=0.9, length=-0.1),
    ]
    rows = reason_rows(records, scores)
    assert [(row.reason, row.count, row.answer) for row in rows] == [
        ("correct", 2, "t1"), ("wrong_answer", 1, "t0"), ("grading failed", 1, "the pool broke"),
    ]  # fmt: skip
    # Opinions of parsers are no reward: (1.0 + 0.9) / 2.
    assert rows[0].reward == pytest.approx(0.95)


def test_changed_verdicts_are_counted() -> None:
    recorded = ["correct", "wrong_answer", "wrong_answer", ""]
    records = [Record(Sample(text="t"), reason) for reason in recorded]
    scores = [_score("correct"), _score("correct"), _score("correct"), _score("no_boxed")]
    assert changes(records, scores) == {("wrong_answer", "correct"): 2}


def test_parsers_disagree_where_one_says_right_and_one_wrong() -> None:
    records = [Record(Sample(text="t", answer="a"), "")] * 2 + [Record(Sample(text="u"), "")]
    says = {"says_text": -1.0, "says_number": -1.0, "says_structure": 1.0}
    scores = [
        _score("correct", correct=0.9, **says, says_math_verify=0.0, says_bare=0.0),
        _score("correct", correct=0.9, **says, says_math_verify=0.0, says_bare=0.0),
        _score("correct", correct=0.9, **says, says_math_verify=1.0, says_bare=1.0),
    ]
    said = {"text": None, "number": None, "structure": True, "math_verify": False, "bare": False}
    assert disagreements(records, scores) == [Disagreement("t", "a", said, "correct")]
    assert beside_bare(scores) == {(True, False): 2, (True, True): 1}


def test_command_prints_reasons_changes_and_disagreements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = _write(
        tmp_path / "answers.jsonl",
        {"text": boxed("[0,1)"), "answer": "0 \\le x < 1", "reason": "wrong_answer"},
        {"text": boxed("8"), "answer": "7", "reason": "wrong_answer"},
        {"text": boxed("(1,2,3)"), "answer": "\\{1,2,3\\}"},
        {"text": "7", "answer": "7"},
        {"text": "a</think>\\boxed{7}", "answer": "7", "prompt_tail": "<think>\n"},
    )
    assert main(["verify", str(path), "--disagree"]) == 0
    printed = capsys.readouterr().out
    for reason in ("correct", "wrong_answer", "no_think_start"):
        assert reason in printed
    # math-verify takes an interval and an inequality for different things.
    row = next(line for line in printed.splitlines() if "[0,1)" in line and "wrong" in line)
    assert row.split().count("right") == 2 and row.split().count("wrong") == 1
    # By itself it knows both, and takes a triple for the set of its items.
    table = printed[printed.index("beside bare") :].splitlines()
    counts = [[int(word) for word in line.split() if word.isdigit()] for line in table]
    assert [row for row in counts if row] == [[2, 0], [1, 1]]


def test_command_tells_each_line_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "<think>a</think>\n```python\nprint(8)\n```"
    entry = json.dumps({"cases": [{"stdin": "", "stdout": "7"}]})
    path = _write(
        tmp_path / "answers.jsonl",
        {"text": boxed("7"), "answer": 7},
        {"text": boxed("8"), "answer": ["7", "7.5"]},
        {"text": program, "task": "code", "entry": entry},
    )
    path.write_text("\n" + path.read_text())
    assert main(["verify", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lines = told["lines"]
    assert told["completions"] == 3
    assert told["reasons"] == {"correct": 1, "wrong_answer": 1, "wrong_output": 1}
    assert [(line["line"], line["is_correct"], line["reason"]) for line in lines] == [
        (2, True, "correct"), (3, False, "wrong_answer"), (4, False, "wrong_output"),
    ]  # fmt: skip
    assert [line["reward"] for line in lines] == pytest.approx([1.0, 0.1, 0.1])
    assert lines[2]["detail"].startswith("test 1: input ''")


def test_a_narrow_table_holds_reasons_and_answers_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "".join(chr(ord("a") + n % 26) for n in range(45))
    path = _write(
        tmp_path / "answers.jsonl",
        {"text": f"<think>\\boxed{{{long}}}</think>7", "answer": long},
        {"text": boxed("8"), "answer": "7", "reason": "box_before_think_end"},
    )
    assert main(["verify", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("box_before_think_end") == 2 and printed.count("wrong_answer") == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"text": "a", "answr": "7"}, "unknown key 'answr'; did you mean 'answer'?"),
        ({"text": "a", "answer": "7", "promblem": "?"}, "did you mean 'problem'?"),
        ({"text": "a"}, "there is no answer; expected"),
        ({"text": "a", "answers": ["7"]}, "there is no answer; expected"),
        ({"text": "a", "answer": ""}, "the answer is empty ('')"),
        ({"text": "a", "answer": []}, "the answer is empty ([])"),
        ({"text": "a", "task": "exact"}, "there is no answer; expected"),
        ({"text": "a", "answer": list(range(65))}, "there are 65 accepted answers"),
    ],
)
def test_command_refuses_a_line_without_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: dict, told: str
) -> None:
    path = _write(tmp_path / "answers.jsonl", {"text": "a", "answer": "7"}, line)
    assert main(["verify", str(path)]) == 2
    assert f"{path}:2: " in caplog.text and told in caplog.text


def test_command_escapes_what_the_terminal_cannot_show(tmp_path: Path) -> None:
    path = _write(tmp_path / "answers.jsonl", {"text": boxed("\u2264"), "answer": "7"})
    command = [sys.executable, "-m", "megatron_rl.cli.main", "verify", str(path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2264" in done.stdout


def test_command_fails_when_grading_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = _write(tmp_path / "answers.jsonl", {"text": boxed("7"), "task": "no_such_task"})
    assert main(["verify", str(path)]) == 1
    assert "grading failed" in capsys.readouterr().out


def test_a_record_is_graded_again_by_the_length_rule_of_its_stage(tmp_path: Path) -> None:
    lines = [{"text": "a", "tokens": 9}, {"text": "a", "stage": 1}, {"text": "a", "stage": 2}]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rules = [LengthRule(10, 2, 0.1), LengthRule(20, 4, 0.1)]
    found = [record.sample.length_rule for record in read_records(path, {}, rules)]
    assert found == [*rules, None]
    assert [record.sample.length_rule for record in read_records(path, {})] == [None] * 3


def test_a_line_may_have_a_number_or_several_accepted_answers(tmp_path: Path) -> None:
    lines = [{"text": "a", "answer": answer} for answer in (5, 3.5, "5", ["7/2", 3.5], [])]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [record.sample for record in read_records(path, {})]
    found = [[sample.answer, *sample.other_answers] for sample in samples]
    assert found == [["5"], ["3.5"], ["5"], ["7/2", "3.5"], [""]]
