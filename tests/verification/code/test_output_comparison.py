"""Printed output, and results of calls, beside the expected ones."""

import time

import msgspec
import pytest

from verification.code.grading import Case, CodeLimits, CodeTests, grade, prepare
from verification.code.output_comparison import OUTPUT_COMPARISONS
from verification.code.problem import parse_tests


@pytest.mark.parametrize(
    ("mode", "output", "expected", "is_same"),
    [
        ("exact", "7\n", "7\n", True),
        ("exact", "7", "7\n", False),
        ("exact", "7 \n", "7\n", False),
        ("whitespace", "7", "7\n", True),
        ("whitespace", "1  2\n\n3", "1 2 3", True),
        ("whitespace", "12 3", "1 23", False),
        ("whitespace", "7.0", "7", False),
        ("whitespace", "Yes", "yes", False),
        ("whitespace", "", " \n", True),
        ("float", "0.3333333", "0.33333333", True),
        ("float", "0.33333", "0.33334", False),
        ("float", "1000000.5", "1000000.0", True),
        ("float", "1000002", "1000000", False),
        ("float", "7", "7.0000000", True),
        ("float", "1e3", "1000", True),
        ("float", "-0.0", "0", True),
        ("float", "nan", "0.5", False),
        ("float", "nan", "nan", True),
        ("float", "inf", "1e308", False),
        ("float", "1e999", "1e998", False),
        ("float", "1_0", "10", False),
        ("float", "0x10", "16", False),
        ("float", "area 2.5000001", "area 2.5", True),
        ("float", "1 2 3", "1 2", False),
        ("float", "", "0", False),
        ("float", "0.30000000000000004", "0.3", True),
        ("float", "1000001", "1000000", False),
        ("float", "+007", "7", True),
        ("float", "9" * 5000, "9" * 4999 + "8", False),
        ("float", "9" * 5000, "9" * 5000 + ".0", False),
        ("number", "0.50", "0.5", True),
        ("number", "5e-1 -0", "0.5 0", True),
        ("number", "0.30000000000000004", "0.3", False),
        ("number", "50000000000000000", "50000000000000001", False),
        ("number", "0" + "9" * 5000, "9" * 5000 + ".0", True),
        ("number", "1e999999", "10e999998", True),
        ("number", "nan", "NaN", False),
        ("distance", "YES 0.1", "yes 0.100009", True),
        ("distance", "0.1", "0.10002", False),
        ("distance", "1000000.5", "1000000", False),
        ("distance", "no", "yes", False),
    ],
)
def test_comparison_modes(mode: str, output: str, expected: str, is_same: bool) -> None:
    tolerance = 1e-5 if mode == "distance" else 1e-6
    is_found = OUTPUT_COMPARISONS[mode](output.encode(), expected.encode(), tolerance)
    assert is_found is is_same


@pytest.mark.parametrize("mode", ["number", "float", "distance"])
def test_a_hostile_word_is_compared_in_linear_time(mode: str) -> None:
    start_s = time.process_time()
    for word in (b"1" * 10**6 + b"x", b"1" * 10**6, b"." * 10**6, b"1" * 10**6 + b"e1234567"):
        OUTPUT_COMPARISONS[mode](word, b"2", 1e-6)
    assert time.process_time() - start_s < 30.0


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("body", "expected", "own", "reason"),
    [
        ("return 10**5000 - 1", LONG, {}, "correct"),
        ("return 10**5000 - 2", LONG, {}, "wrong_output"),
        ("return 10**5000 - x", LONG, {"stdin": "1" + "0" * 4999 + "1"}, "wrong_output"),
        ("return [5]", "[5]", {}, "correct"),
        ("return 5", "[5]", {}, "wrong_output"),
        ("return 5", "[5]", {"may_be_wrapped": True}, "correct"),
        ("return [5]", "[5]", {"may_be_wrapped": True}, "correct"),
        ("return [[5]]", "[5]", {"may_be_wrapped": True}, "wrong_output"),
        ("return 1", "[1, 2]", {"may_be_wrapped": True}, "wrong_output"),
        ("return 0.1 + 0.2", "0.3", {}, "wrong_output"),
        ("return 0.1 + 0.2", "0.3", {"comparison": "float"}, "correct"),
        ("return 1000001", "1000000", {"comparison": "float", "tolerance": 1e-5}, "wrong_output"),
        ("return 1e308", "Infinity", {"comparison": "float"}, "wrong_output"),
        ("return float('inf')", "Infinity", {"comparison": "float"}, "correct"),
        ("return float('inf')", "-Infinity", {"comparison": "float"}, "wrong_output"),
        ("return float('inf')", "1e308", {"comparison": "float"}, "wrong_output"),
        ("return float('nan')", "NaN", {"comparison": "float"}, "correct"),
        ("return float('nan')", "0.5", {"comparison": "float"}, "wrong_output"),
        ("return 0.5", "NaN", {"comparison": "float"}, "wrong_output"),
        ("return [0.1 + 0.2, -0.0]", "[0.3, 0]", {"comparison": "float"}, "correct"),
        ("import numpy\n    return numpy.array([[1, 2]]) + x", "[[2, 3]]",
         {"packages": ["numpy"]}, "correct"),
        ("import numpy\n    return numpy.int64(2)", "2", {"packages": ["numpy"]}, "correct"),
        ("import numpy\n    return numpy.float64(2.5)", "2", {"packages": ["numpy"]},
         "wrong_output"),
        ("import numpy\n    return numpy.int64(2)", "2", {}, "runtime_error"),
    ],
)  # fmt: skip
def test_results_of_calls(body: str, expected: str, own: dict, reason: str) -> None:
    own = dict(own)
    case = Case(own.pop("stdin", "1"), expected)
    tests = CodeTests(cases=[case], entry_point="f", **own)
    source = f"def f(x):\n    {body}"
    limits = prepare(CodeLimits(test_s=2.0))
    assert grade(source, "python", tests, seed=0, limits=limits).reason == reason
    assert parse_tests(msgspec.json.encode(tests).decode()) == tests
