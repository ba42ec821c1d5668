"""Which texts choose a letter, and which say more or less than that."""

import pytest

from verification.math.answer import compare, compare_quickly
from verification.math.choices import Choice, Choices, read_choice
from verification.math.text import normalise


@pytest.mark.parametrize(
    "text",
    ["C", "(C)", "\\text{(C)}", "C.", "C)", "Option C", "choice (C)", "The answer is (C).",
     "\\text{Answer: C}", "(C) is correct", "C is the right answer", "C\\text{ is correct}", "(c)"],
)  # fmt: skip
def test_one_letter_is_chosen(text: str) -> None:
    assert read_choice(normalise(text)) == Choice("C", "")


@pytest.mark.parametrize(
    ("text", "written"),
    [("(C) 12", "12"), ("C. \\frac12", "\\frac{1}{2}"), ("(C) x=5 or x=6", "x=5 or x=6"),
     ("\\text{(C) none of the above}", "\\text{none of the above}"),
     ("(C)\\text{ not enough information}", "\\text{not enough information}")],
)  # fmt: skip
def test_text_behind_the_letter_is_kept(text: str, written: str) -> None:
    assert read_choice(normalise(text)) == Choice("C", written)


@pytest.mark.parametrize(
    "text",
    [
        "(C) or (D)", "(C) or D", "(C) is wrong", "(C) is not the answer", "not C", "C or B", "C/B",
        "(C) (B)", "The answer is not (C)", "(C) maybe", "(C)?", "(C), (D)", "C and D", "(C) isn't",
        "(C) cannot be the answer", "(C) \\text{ or } (D)", "C: wrong", "C. D", "(C) no, (D)",
        "option C or option D", "(C) if x>0", "C but not D", "neither", "all of the above",
        "all but C", "(C) and not (D)", "(C) 5 or (D) 6", "C is the wrong answer", "C, not D",
        "\\text{C or maybe D}", "(C) then (D)", "the answer isn't C", "C D", "(C)(D)",
    ],
)  # fmt: skip
def test_doubt_denial_and_several_letters_are_not_the_letter(text: str) -> None:
    assert not isinstance(read_choice(normalise(text)), Choice)
    assert not compare(text, "C").is_correct
    assert not compare("\\text{(C)}", text).is_correct


def test_several_choices_are_a_set_of_letters() -> None:
    for text in ("C and D", "D, C", "(C) and (D)", "\\text{C and D}", "C \\& D"):
        assert read_choice(normalise(text)) == Choices(frozenset("CD"))
    assert compare("(D), (C)", "C and D").is_correct
    assert not compare("C, D, E", "C and D").is_correct
    assert not compare("C or D", "C and D").is_correct


AMC = (
    "What is $3+4$? $\\textbf{(A)}\\ 6\\qquad\\textbf{(B)}\\ 7\\qquad\\textbf{(C)}\\ \\frac{1}{2}$"
)
LINES = "What is the length?\nA. 6 cm\nB. 7 cm\nC. none of these"
INLINE = "Choose: (A) 1, (B) 2, (C) 3."


@pytest.mark.parametrize(
    ("problem", "letter", "text", "is_right"),
    [
        (AMC, "B", "7", True), (AMC, "(B)", "7", True), (AMC, "C", "0.5", True),
        (AMC, "A", "7", False), (AMC, "B", "6", False), (AMC, "D", "7", False),
        (AMC, "C", "2", False), (LINES, "B", "7 cm", True), (LINES, "B", "70 mm", True),
        (LINES, "B", "7 m", False), (LINES, "B", "6 cm", False), (INLINE, "C", "3", True),
        (LINES, "C", "\\text{none of these}", True), (INLINE, "B", "3", False),
        # Letters that are no list of choices.
        ("Find B.", "B", "7", False), ("Let (A) be 1, (A) be 2 and (B) 7.", "B", "7", False),
        ("(B) 7 and (A) 6", "B", "7", False), ("", "B", "7", False),
    ],
)  # fmt: skip
def test_a_choice_is_the_text_that_the_problem_lists_for_it(
    problem: str, letter: str, text: str, *, is_right: bool
) -> None:
    for answer, reference in ((letter, text), (text, letter)):
        verdict = compare_quickly(answer, reference, problem=problem)
        assert (verdict is not None and verdict.is_correct) == is_right
