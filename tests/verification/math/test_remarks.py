"""Verdicts that need the problem, and words with marks around an answer."""

import pytest

from verification.math.answer import compare, compare_quickly, prepare

ALL_FUNCTIONS = "Find all functions $f:\\mathbb{R}\\to\\mathbb{R}$ such that $f(x+y)=f(x)+f(y)$."
CHOICES = "What is $2+2$? (A) 3 (B) 4 (C) 5"


def is_right(answer: str, reference: str, problem: str) -> bool:
    quick = compare_quickly(answer, reference, problem=problem)
    return compare(answer, reference).is_correct if quick is None else quick.is_correct


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (
            "f(x)=cx",
            ["ax", "f(x)=kx", "f(x)=ax, a \\in \\mathbb{R}", "y=cx",
             "f(x)=ax \\text{ for some constant } a", "f(x)=ax where a is any real number"],
            ["f(x)=x", "f(x)=cx+d", "f(x)=x^2", "f(x)=a", "f(x)=ax, x \\in \\mathbb{R}, a > 0",
             "f(x)=yx", "f(y)=cx"],
        ),
        (
            "f(x)=ax+b",
            ["cx+d", "f(x)=mx+c", "f(x)=Ax+B", "f(x)=cx+d, c,d\\in\\mathbb{R}"],
            ["f(x)=ax", "f(x)=ax+a", "f(x)=ax+x", "f(x)=ax-b^2"],
        ),
    ],
)  # fmt: skip
def test_constants_of_all_functions_may_have_any_name(
    reference: str, right: list[str], wrong: list[str]
) -> None:
    prepare()
    paid = [answer for answer in (*right, *wrong) if is_right(answer, reference, ALL_FUNCTIONS)]
    assert paid == right


@pytest.mark.parametrize(
    ("answer", "problem", "verdict"),
    [
        ("b", CHOICES, True),
        ("a", CHOICES, False),
        # Without choices b and B are two names.
        ("b", "Which is larger?", False),
        ("b", "", False),
    ],
)
def test_a_small_letter_is_a_choice_where_the_problem_has_choices(
    answer: str, problem: str, verdict: bool
) -> None:
    assert is_right(answer, "B", problem) is verdict


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("2b_{16}", "2B_{16}", True), ("2c_{16}", "2B_{16}", False), ("2B", "2B_{16}", True),
        ("1232_\\text{five}", "1232_5", True), ("1232_\\text{six}", "1232_5", False),
    ],
)  # fmt: skip
def test_numerals_with_small_letters_or_a_named_base(
    answer: str, reference: str, verdict: bool
) -> None:
    problem = "Write it in base 16." if "16" in reference else ""
    assert is_right(answer, reference, problem) is verdict


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("Yes!", "Yes", True), ("No!", "Yes", False), ("Yes!", "True", True),
        ("5!", "5", False), ("5!", "120", True), ("n!", "n", False),
    ],
)  # fmt: skip
def test_an_exclamation_mark_is_a_factorial_of_numbers_only(
    answer: str, reference: str, verdict: bool
) -> None:
    assert compare(answer, reference).is_correct is verdict


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        # A number beside one in brackets is another form only if it is the same number.
        ("0.5 (1/2)", "0.5"), ("2 (4)", "8"), ("2(4)", "8"), ("2^4 or 16", "16"),
        ("\\frac{1}{\\sqrt2} \\text{ or } \\frac{\\sqrt2}{2}", "\\frac{\\sqrt2}{2}"),
        ("60^\\circ \\text{ or } \\frac{\\pi}{3}", "60^\\circ"),
    ],
)  # fmt: skip
def test_a_second_form_of_the_same_number_is_no_second_answer(answer: str, reference: str) -> None:
    assert compare(answer, reference).is_correct
    assert not compare(answer.replace("2", "3", 1).replace("60", "61"), reference).is_correct


def test_commands_whose_backslash_json_swallowed_are_read() -> None:
    for answer in ("\x0crac{3}{4}", "rac{3}{4}", "\\\\\\\\frac{3}{4}"):
        assert compare(answer, "\\frac{3}{4}").is_correct
    assert compare("2 \times 3", "6").is_correct
    assert not compare("\x0crac{4}{3}", "\\frac{3}{4}").is_correct
