"""Answers in words: what is the same noun or property, and what is another."""

import pytest

from verification.math.answer import compare, compare_quickly


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\text{the red ball}", "red ball"), ("an ellipse", "\\text{ellipse}"),
        ("\\text{triangle}", "Triangles"), ("it is even", "\\text{even}"), ("is even", "Even"),
        ("\\text{the left of the line}", "left of line"), ("they are parallel", "parallel"),
        ("parallel lines", "\\text{parallel line}"), ("a parabola", "the parabola"),
    ],
)  # fmt: skip
def test_articles_openings_and_plurals_do_not_matter(first: str, second: str) -> None:
    for pair in ((first, second), (second, first)):
        verdict = compare_quickly(*pair)
        assert verdict is not None
        assert verdict.is_correct


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\text{the red ball}", "the blue ball"), ("\\text{even}", "is not even"),
        ("\\text{Plane A}", "Plane"), ("\\text{Team A}", "Team B"), ("circle", "circular"),
        ("\\text{yes}", "no"), ("red ball", "ball red cube"), ("\\text{even}", "never even"),
        ("\\text{true}", "untrue"), ("the", "a"), ("\\text{increasing}", "non-increasing"),
    ],
)  # fmt: skip
def test_other_words_are_another_answer(first: str, second: str) -> None:
    for pair in ((first, second), (second, first)):
        verdict = compare_quickly(*pair)
        assert verdict is None or not verdict.is_correct


def test_a_sign_before_a_word_is_not_dropped() -> None:
    assert not compare("-five", "5").is_correct
    assert not compare("-even", "\\text{even}").is_correct
    assert compare("twenty-five", "25").is_correct


@pytest.mark.parametrize("text", ["1011_{26}", "1011_{x2}", "1011_2+1_{20}", "(101)_{17}"])
def test_numerals_in_unknown_bases_are_not_read_as_decimal_ones(text: str) -> None:
    digits = text.replace("_{26}", "").replace("_{x2}", "").replace("_2+1_{20}", "+1")
    assert not compare(text, digits.replace("_{17}", "")).is_correct
