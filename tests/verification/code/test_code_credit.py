"""Programs that are paid for the share of the tests that they pass, in the real sandbox."""

import json

import pytest

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import Score
from verification.code.grading import Case, CodeLimits, CodeTests, grade, prepare
from verification.library import Grading, Sample

SUMS = CodeTests(cases=[Case(f"{a} {a + 1}\n", f"{2 * a + 1}\n") for a in range(6)])
READ = "a, b = map(int, input().split())\n"
ADD_CPP = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << (%s); }"
CALLS = CodeTests(cases=[Case(f"{a}\n{a}", f"{2 * a}") for a in range(5)], entry_point="add")


@pytest.fixture(scope="module")
def limits() -> CodeLimits:
    return prepare(CodeLimits(test_s=0.5))


def graded(
    source: str, tests: CodeTests, limits: CodeLimits, tag: str = "python"
) -> tuple[str, tuple[int, int]]:
    """(reason, tests), after a look that stopping at the first failure gives the same verdict."""
    counted = grade(source, tag, tests, seed=0, limits=limits, counts_all=True)
    stopped = grade(source, tag, tests, seed=0, limits=limits)
    assert stopped == counted._replace(tests=(0, 0))
    return counted.reason, counted.tests


@pytest.mark.parametrize(
    ("source", "reason", "passed"),
    [
        (READ + "print(a + b)", "correct", 6),
        (READ + "print(a + b if a % 2 else 0)", "wrong_output", 3),
        (READ + "print(0)", "wrong_output", 0),
        # The reason is that of the first failure, and what comes after is run all the same.
        (READ + "if a == 1: exit(3)\nprint(a + b if a < 4 else 0)", "runtime_error", 3),
        (READ + "while a == 2: pass\nprint(a + b)", "test_timeout", 5),
        (READ + "x = bytearray(1 << 40) if a == 0 else 0\nprint(a + b)", "test_memory", 5),
        (READ + "while a == 3: print('x' * 10000)\nprint(a + b)", "output_limit", 5),
        ("def f(:", "compile_error", 0),
    ],
)
def test_each_case_counts_whatever_happens_in_the_others(
    source: str, reason: str, passed: int, limits: CodeLimits
) -> None:
    assert graded(source, SUMS, limits) == (reason, (passed, 6))


@pytest.mark.parametrize(
    ("expression", "reason", "passed"),
    [
        ("a + b", "correct", 6),
        ("a < 2 ? a + b : 0", "wrong_output", 2),
        ("a +", "compile_error", 0),
    ],
)
def test_compiled_programs_count_too(
    expression: str, reason: str, passed: int, limits: CodeLimits
) -> None:
    assert graded(ADD_CPP % expression, SUMS, limits, "cpp") == (reason, (passed, 6))


@pytest.mark.parametrize(
    ("body", "reason", "passed"),
    [
        ("return x + y", "correct", 5),
        ("return x + y if x != 2 else 0", "wrong_output", 4),
        ("while x == 0: pass\n    return x + y", "test_timeout", 4),
        ("if x > 1: raise ValueError\n    return x + y", "runtime_error", 2),
        # Right each time that it is called first: never all of them.
        ("SEEN.append(1)\n    return x + y if len(SEEN) == 1 else 0", "wrong_output", 4),
    ],
)
def test_calls_are_counted_one_by_one(
    body: str, reason: str, passed: int, limits: CodeLimits
) -> None:
    source = f"SEEN = []\ndef add(x, y):\n    {body}\n"
    assert graded(source, CALLS, limits) == (reason, (passed, 5))


def test_unit_tests_count_as_one_beside_cases(limits: CodeLimits) -> None:
    tests = CodeTests(
        cases=[Case("1\n", "2\n"), Case("2\n", "3\n")],
        unit_tests="assert add(1) == 2\nassert add(5) == 6",
        entry_point="add",
    )
    source = "def add(x):\n    return x + %s\n%s"
    main = "if __name__ == '__main__': print(add(int(input())))"
    assert graded(source % (1, main), tests, limits) == ("correct", (3, 3))
    assert graded(source % ("(1 if x < 3 else 0)", main), tests, limits) == ("wrong_output", (2, 3))
    assert graded(source % (1, "print(2)"), tests, limits) == ("wrong_output", (2, 3))


def test_no_answer_in_a_known_language_passes_nothing(limits: CodeLimits) -> None:
    verdict = grade("x", "cobol", SUMS, seed=0, limits=limits, counts_all=True)
    assert (verdict.reason, verdict.tests) == ("unknown_language", (0, 0))


def rewards(**reward: object) -> list[Score]:
    """Of programs that pass 6, 3 and 0 of 6 tests, one without a tag, and of right mathematics."""
    entry = json.dumps({"cases": [{"stdin": c.stdin, "stdout": c.stdout} for c in SUMS.cases]})
    bodies = ["print(a + b)", "print(a + b if a % 2 else 0)", "print(0)"]
    texts = [f"<think>a</think>\n```python\n{READ}{body}\n```" for body in bodies]
    texts.append(f"<think>a</think>\n```\n{READ}print(a + b)\n```")
    samples = [Sample(text=text, task="code", entry=entry) for text in texts]
    samples.append(Sample(text="<think>a</think>\\boxed{7}", answer="7"))
    with Grading(RewardConfig(test_s=1.0, **reward)) as grading:
        found = grading.score(samples)
    assert all(isinstance(score, Score) for score in found), found
    return found


def test_a_program_earns_the_share_of_its_tests_and_is_right_only_with_all() -> None:
    found = rewards(code_credit="proportional")
    # Magistral's ablation: 0.1 for the format, and 0.9 times the share.
    assert [score.reward for score in found] == pytest.approx([1.0, 0.55, 0.1, 0.0, 1.0])
    assert [score.is_correct for score in found] == [True, False, False, False, True]
    assert [score.tests for score in found] == [(6, 6), (3, 6), (0, 6), (0, 0), (0, 0)]
    assert found[1].parts == pytest.approx({"format": 0.1, "correct": 0.45, "length": 0.0})


def test_by_default_all_tests_or_nothing() -> None:
    found = rewards()
    assert [score.reward for score in found] == pytest.approx([1.0, 0.1, 0.1, 0.0, 1.0])
    assert {score.tests for score in found} == {(0, 0)}


def test_the_share_survives_the_steps_that_follow_the_verdict() -> None:
    found = rewards(code_credit="proportional", language=0.1)
    assert [score.tests for score in found[:3]] == [(6, 6), (3, 6), (0, 6)]


def test_time_for_one_more_test_is_asked_for_where_tests_are_counted() -> None:
    # 5 s, and twice 10 s of the compiler and 4 s of each of 20 tests, or 21.
    assert RewardConfig().longest_program_s == 5 + 2 * (10 + 80)
    assert RewardConfig(code_credit="proportional").longest_program_s == 5 + 2 * (10 + 84)
    assert Config().verifier.code.timeout_s >= 5 + 2 * (10 + 84)
    pool = {"timeout_s": 190.0, "max_elapsed_s": 400.0}
    given = {"reward": {"code_credit": "proportional"}, "verifier": {"code": pool}}
    with pytest.raises(
        ValueError, match="expert.verifier.code.timeout_s=190 is less than the 193 s"
    ):
        Config.model_validate(given)
