"""What a verdict says of the test that a program failed."""

import pytest

from verification.code.grading import (
    SHOWN_CHARS,
    Case,
    CodeLimits,
    CodeTests,
    grade,
    prepare,
    quoted,
)

TESTS = CodeTests(cases=[Case("3 4\n", "7\n"), Case("-5 6\n", "1\n")])


@pytest.fixture(scope="module")
def limits() -> CodeLimits:
    return prepare(CodeLimits(test_s=5.0))


def detail(source: str, limits: CodeLimits, tests: CodeTests = TESTS, tag: str = "python") -> str:
    return grade(source, tag, tests, seed=0, limits=limits).detail


def test_the_first_failed_test_is_told(limits: CodeLimits) -> None:
    found = detail("a, b = map(int, input().split())\nprint(abs(a) + b)", limits)
    assert found == r"test 2: input '-5 6\n', expected '1\n', printed '11\n'"
    found = detail("x = input()\nprint('half')\n1 / 0", limits)
    assert found.startswith(r"test 1: input '3 4\n', expected '7\n', printed 'half\n', error ")
    assert found.endswith("'ZeroDivisionError: division by zero'")
    assert detail("print(sum(map(int, input().split())))", limits) == ""


def test_an_assertion_and_a_compiler_are_told(limits: CodeLimits) -> None:
    tests = CodeTests(unit_tests="def check(f):\n    assert f(2) == 4\n", entry_point="f")
    found = detail("def f(x):\n    return x", limits, tests)
    assert found.startswith("unit tests after 0: assertion")
    found = detail("int main() { return missing; }", limits, tag="cpp")
    assert found.startswith("compiler: ") and "missing" in found


def test_a_missing_function_is_named(limits: CodeLimits) -> None:
    unit_tests = CodeTests(unit_tests="def check(f):\n    assert f(2) == 2\n", entry_point="double")
    calls = CodeTests(cases=[Case("2", "2")], entry_point="double")
    for tests in (unit_tests, calls):
        graded = grade("def twice(x):\n    return x", "python", tests, seed=0, limits=limits)
        assert graded.reason == "no_entry_point"
        assert graded.detail == "the program defines no 'double'"


def test_what_a_program_prints_can_do_nothing_to_a_terminal(limits: CodeLimits) -> None:
    hostile = "\\x1b[2J\\u202e\\r\\n" + "x" * 5000
    found = detail(f"import sys\nprint('{hostile}')\nsys.exit('{hostile}')", limits)
    assert found.isprintable() and len(found) < 4 * SHOWN_CHARS
    assert r"\x1b[2J\u202e" in found


def test_the_middle_of_a_long_text_is_left_out() -> None:
    text = "a" * 150 + "b" * 150
    assert quoted(text) == f"'{'a' * 100}'...'{'b' * 100}'"
    assert quoted("é\n") == r"'é\n'"
    assert quoted("\udc80") == r"'\udc80'"
