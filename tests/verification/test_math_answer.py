import pytest

from verification.math_answer import compare, compare_quickly
from verification.verdict import CORRECT, WRONG

RIGHT = [
    ("7", "7"),
    ("007", "7"),
    ("+7", "7"),
    ("$7$", "7"),
    ("7.", "7"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    ("0.5", "1/2"),
    ("0.5", "\\frac{1}{2}"),
    ("\\frac12", "1/2"),
    ("\\dfrac{2}{4}", "\\frac{1}{2}"),
    ("1+x^2", "x^2+1"),
    ("x^2+2x+1", "(x+1)^2"),
    ("b+a", "a+b"),
    ("x/y", "\\frac{x}{y}"),
    ("\\sqrt{18}", "3\\sqrt{2}"),
    ("1024", "2^{10}"),
    ("0.001", "10^{-3}"),
    ("3.0", "3"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("(1, 2)", "(1,2)"),
    ("\\{2,1\\}", "\\{1,2\\}"),
    ("(2,3]", "(2,3]"),
    ("\\text{B}", "B"),
    ("\\text{yes}", "yes"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1&2 \\\\ 3&4 \\end{pmatrix}"),
]
UNEQUAL = [
    ("8", "7"),
    ("-7", "7"),
    ("70", "7"),
    ("3.14159", "\\pi"),
    ("1/3", "0.333"),
    ("a-b", "a+b"),
    ("x^2", "x^3"),
    ("(2,3)", "(2,3]"),
    ("(2,1)", "(1,2)"),
    ("1, 4", "4"),
    ("C", "B"),
    ("\\frac{2}{1}", "\\frac{1}{2}"),
    ("no", "yes"),
]


@pytest.mark.parametrize(("answer", "reference"), RIGHT)
def test_equal_answers_are_correct(answer: str, reference: str) -> None:
    assert compare(answer, reference) == CORRECT


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_unequal_answers_are_wrong(answer: str, reference: str) -> None:
    assert compare(answer, reference) == WRONG


def test_plain_integers_need_no_library() -> None:
    assert compare_quickly("12", "12") == CORRECT
    assert compare_quickly("-012", "-12") == CORRECT
    assert compare_quickly("12", "13") == WRONG
    assert compare_quickly("1/2", "0.5") is None
    # Arabic-Indic digits are digits to Python's \d, but no plain integer here.
    assert compare_quickly("١٢", "12") is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("x+" * 600 + "1", "answer_too_long"),
        ("9" * 400, "too_many_digits"),
        ("(" * 31 + "x" + ")" * 31, "answer_too_deep"),
        ("9^{9^{9^9}}", "explosive_answer"),
        ("9**9**9", "explosive_answer"),
        ("2^{100000}", "explosive_answer"),
        ("100000!", "explosive_answer"),
        ("9!!", "explosive_answer"),
    ],
)
def test_hopeless_answer_is_refused_before_parsing(answer: str, reason: str) -> None:
    verdict = compare_quickly(answer, "7")
    assert verdict is not None
    assert (verdict.is_correct, verdict.reason) == (False, reason)


@pytest.mark.parametrize("answer", ["x^2+y^2+z^2", "2^{10}", "5!", "x^{n^2}", "10^{-12}"])
def test_ordinary_powers_are_not_refused(answer: str) -> None:
    assert compare_quickly(answer, "7") is None


def test_explosive_answer_is_compared_when_the_reference_is_like_it() -> None:
    assert compare_quickly("2^{100000}+1", "1+2^{100000}") is None
