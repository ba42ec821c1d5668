"""Which texts choose a letter, and which say more or less than that."""

import pytest

from verification.math.answer import compare
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
