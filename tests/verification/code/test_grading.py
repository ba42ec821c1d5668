import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.types import Prompt
from tests.verification.code import human_eval_tasks
from tests.verification.code.cpp_problems import PROBLEMS
from verification.code.grading import Case, CodeLimits, CodeTests, draw_cases, grade, prepare
from verification.code.languages import LANGUAGES, find_language
from verification.code.problem import parse_tests
from verification.code.setup import longest_item_s, with_own_limits
from verification.settings import check_prompts
from verification.verdict import GradingError

ADD = "print(sum(map(int, input().split())))"
HEAD = "#include <bits/stdc++.h>\n"
ADD_CPP = HEAD + "int main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
ADD_TESTS = CodeTests(cases=[Case("3 4\n", "7\n"), Case("-5 6\n", "1\n")])


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> CodeLimits:
    # The headers must be open to the user that tests run as; pytest's own folder is not.
    return prepare(CodeLimits(test_s=2.0))


def _reason(source: str, tests: CodeTests, limits: CodeLimits, tag: str = "python") -> str:
    return grade(source, tag, tests, seed=0, limits=limits).reason


def test_draw_is_the_same_for_a_seed_and_differs_between_seeds() -> None:
    tests = CodeTests(cases=[Case(str(i), str(i)) for i in range(100)])
    first, second = draw_cases(tests, seed=7), draw_cases(tests, seed=7)
    assert first == second
    assert len(set(first)) == 20
    assert [int(case.stdin) for case in first] == sorted(int(case.stdin) for case in first)
    assert draw_cases(tests, seed=8) != first
    drawn = {case for seed in range(60) for case in draw_cases(tests, seed=seed)}
    assert drawn == set(tests.cases)


def test_few_cases_are_all_drawn() -> None:
    assert draw_cases(ADD_TESTS, seed=3) == ADD_TESTS.cases


def test_tests_are_parsed_from_json() -> None:
    entry = json.dumps({"language": "C++", "cases": [{"stdin": "1", "stdout": "2"}]})
    assert parse_tests(entry) == CodeTests(language="C++", cases=[Case("1", "2")])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "neither cases nor unit_tests"),
        ({"cases": [], "language": "python"}, "neither cases nor unit_tests"),
        ({"case": []}, "unknown field"),
        ({"cases": [{"stdin": "1"}]}, "stdout"),
        ({"cases": [{"stdin": "", "stdout": ""}], "comparison": "fuzzy"}, "'fuzzy', expected one"),
        ({"cases": [{"stdin": "", "stdout": ""}], "comparison": "checker"}, "belong together"),
        ({"cases": [{"stdin": "", "stdout": ""}], "checker": "exit(0)"}, "belong together"),
        ({"cases": [{"stdin": "", "stdout": ""}], "language": "cobol"}, "'cobol', expected one"),
        ({"unit_tests": "assert f()"}, "without the entry_point"),
        ({"unit_tests": "x", "entry_point": "f", "language": "cpp"}, "unit_tests are Python"),
        ({"cases": [{"stdin": "", "stdout": ""}], "tolerance": -1}, "tolerance = -1"),
        ({"cases": [{"stdin": "", "stdout": ""}], "time_s": 61}, "time_s = 61.0, expected seconds"),
        ({"cases": [{"stdin": "", "stdout": ""}], "time_s": 0}, "time_s = 0.0, expected seconds"),
        ({"cases": [{"stdin": "", "stdout": ""}], "memory_bytes": 64}, "memory_bytes = 64, expect"),
        (
            {"cases": [{"stdin": "1", "stdout": "1"}], "entry_point": "a b"},
            "'a b', expected a name",
        ),
        ({"cases": [{"stdin": "[" * 9999, "stdout": "1"}], "entry_point": "f"}, "too deeply"),
        ({"cases": [{"stdin": "9" * 100_001, "stdout": "1"}], "entry_point": "f"}, "100,001 digi"),
    ],
)
def test_unusable_tests_are_refused_with_the_reason(fields: dict, complaint: str) -> None:
    with pytest.raises(GradingError, match="code prompt") as error:
        parse_tests(json.dumps(fields))
    assert complaint in str(error.value)


def test_entry_that_is_no_json_is_refused() -> None:
    with pytest.raises(GradingError, match="not the JSON of its tests"):
        parse_tests("print(1)")


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("py", "python"),
        ("Python3", "python"),
        (" c++ ", "cpp"),
        ("cpp20", "cpp"),
        ("rust", None),
        ("python2", None),
        ("python2.7", None),
        ("py2", None),
        ("c++18", None),
        ("pyx", None),
        ("c", None),
        ("c#", None),
        ("cs", None),
        ("{r}", None),
        ("", None),
        ("{}", None),
        ("3", None),
        ("c++17", "cpp"),
        ("{.python", "python"),
        ("python3.11", "python"),
    ],
)
def test_languages_by_tag(tag: str, name: str | None) -> None:
    assert find_language(tag) == name


def test_no_tag_means_two_languages() -> None:
    tags = [tag for language in LANGUAGES.values() for tag in language.tags]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ADD, "correct"),
        ("print(7)", "wrong_output"),
        ("def f(:", "compile_error"),
        ("print(7)\nexit(1)", "runtime_error"),
        ("import os\nprint(7, flush=True)\nos.abort()", "runtime_error"),
        ("x = bytearray(1 << 30)", "test_memory"),
        ("while True: pass", "test_timeout"),
        ("while True: print('7' * 1000)", "output_limit"),
        ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", "correct"),
        ("def main():\n    " + ADD + "\nif __name__ == '__main__': main()", "correct"),
        ("import threading\nthreading.Thread(target=lambda: " + ADD + ").start()", "correct"),
        ("import atexit\natexit.register(lambda: " + ADD + ")", "correct"),
        ("open('x', 'w').write('1')\nassert open('x').read() == '1'\n" + ADD, "correct"),
        ("import sys\nsys.setrecursionlimit(10**6)\n"
         "def f(n): return n and 1 + f(n - 1)\nf(10**5)\n" + ADD, "correct"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n" + ADD, "correct"),
        ("import asyncio\nasync def main():\n    " + ADD + "\nasyncio.run(main())", "correct"),
        (ADD + "\nexit()", "correct"),
        (ADD + "\nexit(0)", "correct"),
        ("assert len(str(int(str(10**9999)))) == 10000\n" + ADD, "correct"),
    ],
)  # fmt: skip
def test_python_programs(source: str, reason: str, limits: CodeLimits) -> None:
    assert _reason(source, ADD_TESTS, limits) == reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ADD_CPP, "correct"),
        (ADD_CPP.replace("a + b", "a - b"), "wrong_output"),
        (ADD_CPP.replace("int main", "int maim"), "compile_error"),
        (ADD_CPP.replace("std::cout << a + b", "abort()"), "runtime_error"),
        ("#include <iostream>\n#include <ranges>\nint main() { int s = 0, x; while (std::cin >> x) "
         "s += x; for (int i : std::views::iota(0, 1)) std::cout << s + i; }", "correct"),
        ("#include <bits/stdc++.h>\nint main() { std::vector<int> v(1 << 28); }", "test_memory"),
        ("int main() { while (true) { asm volatile(\"\"); } }", "test_timeout"),
        ("#include <stdio.h>\nint main() { while (true) puts(\"7\"); }", "output_limit"),
        ("#include <bits/stdc++.h>\nint s;\nvoid f(int n) { volatile int x = n; if (n) f(n - 1); "
         "s += x > 0; }\nint main() { f(1000000); int a, b; std::cin >> a >> b; "
         "std::cout << a + b; return s != 1000000; }", "correct"),
        ("#include <bits/stdc++.h>\nint main() { int a, b; std::cin >> a >> b; std::thread t([&] { "
         "std::cout << a + b; }); t.join(); }", "correct"),
    ],
)  # fmt: skip
def test_cpp_programs(source: str, reason: str, limits: CodeLimits) -> None:
    assert _reason(source, ADD_TESTS, limits, "cpp") == reason


def test_language_is_checked_before_anything_runs(limits: CodeLimits) -> None:
    tests = msgspec.structs.replace(ADD_TESTS, language="c++")
    assert _reason(ADD, tests, limits, "py") == "wrong_language"
    assert _reason(ADD, tests, limits, "brainfuck") == "unknown_language"
    units = CodeTests(unit_tests="assert f()", entry_point="f")
    assert _reason(ADD_CPP, units, limits, "cpp") == "wrong_language"


def test_one_failing_case_fails_all(limits: CodeLimits) -> None:
    cases = [Case(f"{i} 1", str(i + 1)) for i in range(19)]
    assert _reason(ADD, CodeTests(cases=cases), limits) == "correct"
    assert _reason(ADD, CodeTests(cases=[*cases, Case("1 1", "3")]), limits) == "wrong_output"


CHECKER = """
import json, sys
data = json.load(sys.stdin)
total, parts = int(data["stdin"]), [int(word) for word in data["output"].split()]
sys.exit(0 if sum(parts) == total and len(parts) == int(data["expected"]) else 1)
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(3, 7)", "correct"),
        ("print(9, 1)", "correct"),
        ("print(9, 2)", "wrong_output"),
        ("print(10)", "wrong_output"),
        ("print('many')", "wrong_output"),
        ("raise ValueError", "runtime_error"),
    ],
)
def test_custom_checker(source: str, reason: str, limits: CodeLimits) -> None:
    tests = CodeTests(cases=[Case("10", "2")], comparison="checker", checker=CHECKER)
    assert _reason(source, tests, limits) == reason


def test_checker_that_is_no_python_is_our_fault(limits: CodeLimits) -> None:
    tests = CodeTests(cases=[Case("1", "1")], comparison="checker", checker="exit(")
    with pytest.raises(GradingError, match="checker of a code prompt is no Python"):
        _reason("print(1)", tests, limits)


def test_checker_that_hangs_gives_no_reward(limits: CodeLimits) -> None:
    tests = CodeTests(cases=[Case("1", "1")], comparison="checker", checker="while True: pass")
    assert _reason("print(1)", tests, limits) == "checker_limit"


@pytest.mark.parametrize(
    ("solution", "unit_tests", "reason"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", "correct"),
        ("def f(x): return x + 1", "def check(c):\n    assert c(1) == 3", "wrong_output"),
        ("def f(*a, **k): return a, k", "assert f(1, b={2}) == ((1,), {'b': {2}})", "correct"),
        ("def f(x): return x", "x = [1.5, None, (2, 'a\\ud800'), {3: b'b'}, 2**70, 1j]\n"
         "assert f(x) == x and [*map(type, f(x))] == [*map(type, x)]", "correct"),
        ("def f(x): x.append(1)", "x = [0]\nf(x)\nassert x == [0, 1]", "correct"),
        ("def f(x): x[1] = 2", "x = {}\nf(x)\nassert x == {1: 2}", "correct"),
        ("def f(x): raise KeyError(x)", "try: f(1)\nexcept KeyError: pass\nelse: assert 0",
         "correct"),
        ("def f(x): yield from range(x)", "assert list(f(3)) == [0, 1, 2] and f(3) != [0, 1, 2]",
         "correct"),
        ("def f(x): return None", "assert f(2) + 1 == 3", "runtime_error"),
        ("def f(x): return float('nan')", "assert f(1) == f(1)", "wrong_output"),
        ("def g(x): return 1", "assert f(1)", "no_entry_point"),
        ("def f(x): return 1\nraise ValueError", "assert f(1)", "runtime_error"),
        ("if __name__ == '__main__': raise ValueError\nf = abs", "assert f(-1) == 1", "correct"),
        ("def f(x): print('noise'); return x", "assert f(4) == 4", "correct"),
    ],
)  # fmt: skip
def test_unit_tests(solution: str, unit_tests: str, reason: str, limits: CodeLimits) -> None:
    tests = CodeTests(unit_tests=unit_tests, entry_point="f")
    assert _reason(solution, tests, limits) == reason


@pytest.mark.parametrize("unit_tests", ["assert g(1)", "import nothing_like_this", "assert ("])
def test_broken_unit_tests_are_our_fault(unit_tests: str, limits: CodeLimits) -> None:
    with pytest.raises(GradingError, match="unit tests of a code prompt are broken"):
        _reason("def f(x): return 1", CodeTests(unit_tests=unit_tests, entry_point="f"), limits)


def test_c_is_added_by_one_line(limits: CodeLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    line = LANGUAGES["cpp"]._replace(
        tags=("c",), source_name="a.c", compiler=("gcc", "-o", "a", "a.c"), program="a", header=""
    )
    monkeypatch.setitem(LANGUAGES, "c", line)
    source = '#include <stdio.h>\nint main() { int a, b; scanf("%d%d", &a, &b); '
    source += 'printf("%d", a + b); }'
    assert _reason(source, ADD_TESTS, limits, "c") == "correct"


def test_missing_compiler_is_named_with_the_fix(
    limits: CodeLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LANGUAGES["cpp"]._replace(tags=("d",), compiler=("no-such-compiler",), header="")
    monkeypatch.setitem(LANGUAGES, "d", line)
    with pytest.raises(GradingError, match="no no-such-compiler to compile .* install it"):
        _reason(ADD_CPP, ADD_TESTS, limits, "d")


def test_unknown_isolation_is_refused() -> None:
    with pytest.raises(GradingError, match="'jail': expected 'auto' or one of"):
        prepare(CodeLimits(isolation="jail"))


def test_header_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(GradingError, match="nobody else may write to it"):
        prepare(CodeLimits(cache_folder=str(tmp_path)))


def test_rlimits_alone_are_announced_as_unsafe(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        limits = prepare(CodeLimits(isolation="rlimits", wall_factor=1.9))
    assert "UNSAFE" in caplog.text
    assert _reason(ADD, ADD_TESTS, limits) == "correct"


BUSY = "import time\nwhile time.process_time() < 0.4: pass\nprint(len(bytearray(100 << 20)) >> 20)"


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({}, "correct"),
        ({"time_s": 0.2}, "test_timeout"),
        ({"memory_bytes": 64 << 20}, "test_memory"),
        ({"memory_bytes": 300 << 20, "time_s": 3.0}, "correct"),
    ],
)
def test_the_limits_of_a_problem_hold_for_its_tests(
    own: dict, reason: str, limits: CodeLimits
) -> None:
    tests = CodeTests(cases=[Case("", "100")], **own)
    assert _reason(BUSY, tests, limits) == reason
    tight = msgspec.structs.replace(limits, test_s=0.2, test_memory_bytes=50 << 20)
    tight = msgspec.structs.replace(tight, cases=100)
    assert _reason(BUSY, tests, tight) == (reason if len(own) == 2 else "test_timeout")


@pytest.mark.parametrize(
    ("time_s", "cases", "calls"),
    [(None, 20, 20), (1, 20, 20), (4, 20, 19), (10, 8, 7), (40, 2, 1), (41, 1, 1), (60, 1, 1)],
)
def test_a_longer_limit_draws_fewer_tests(time_s: float | None, cases: int, calls: int) -> None:
    """All tests take at most 20 x 4 s of CPU time; several calls run once more together."""
    many = [Case(str(number), str(number)) for number in range(50)]
    tests = CodeTests(cases=many, time_s=time_s)
    found = with_own_limits(CodeLimits(), tests)
    assert (found.cases, found.test_s) == (cases, time_s or 4.0)
    called = msgspec.structs.replace(tests, entry_point="f")
    assert with_own_limits(CodeLimits(), called).cases == calls
    drawn = draw_cases(tests, seed=5, most=found.cases)
    assert len(drawn) == cases
    assert set(drawn) <= set(draw_cases(tests, seed=5))


def test_unit_tests_alone_may_take_all_the_time_and_leave_none_for_a_case() -> None:
    tests = CodeTests(unit_tests="assert f(1) == 2", entry_point="f", time_s=60)
    assert with_own_limits(CodeLimits(), tests).test_s == 60
    both = msgspec.structs.replace(tests, cases=[Case("1", "2")])
    with pytest.raises(GradingError, match="60 s by its problem; its unit tests and a case are"):
        with_own_limits(CodeLimits(), both)
    both = msgspec.structs.replace(both, time_s=40)
    assert with_own_limits(CodeLimits(), both).cases == 1


def test_a_limit_that_no_test_fits_is_refused_by_name() -> None:
    entry = json.dumps({"cases": [{"stdin": "", "stdout": ""}], "time_s": 50})
    prompt = Prompt("p", "code", [], "", entry=entry)
    check_prompts([prompt], RewardConfig())
    with pytest.raises(InputError, match="50 s by its problem.* 40 s: raise reward.tests_per_prob"):
        check_prompts([prompt], RewardConfig(tests_per_problem=10))


def test_longest_item_by_hand() -> None:
    assert longest_item_s(CodeLimits(), 20) == 5 + 2 * (10 + 20 * 4)


def human_eval() -> Iterator[object]:
    for problem in human_eval_tasks.problems():
        yield pytest.param(problem, id=problem.name)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("problem", human_eval())
def test_human_eval(problem: human_eval_tasks.Problem, limits: CodeLimits) -> None:
    assert _reason(problem.right, problem.tests, limits) == "correct"
    assert not grade(problem.wrong, "python", problem.tests, seed=0, limits=limits).is_correct


def test_human_eval_is_complete() -> None:
    assert sum(1 for _ in human_eval_tasks.problems()) == 164


@pytest.mark.sampled(2)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_cpp_problem(problem: object, limits: CodeLimits) -> None:
    tests = problem.tests()
    assert len(tests.cases) == 20
    assert _reason(problem.right, tests, limits, "cpp") == "correct"
    assert _reason(problem.wrong, tests, limits, "cpp") == "wrong_output"
