"""Numbers in words, each against the number that a reader takes it for."""

from fractions import Fraction

import pytest

from verification.math.answer import compare
from verification.math.choices import hedges_in
from verification.math.number_words import read_number_words
from verification.math.text import normalise


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("seven", 7), ("twenty one", 21), ("one hundred and five", 105), ("eleven hundred", 1100),
        ("one thousand two hundred thirty four", 1234), ("two million three", 2_000_003),
        ("a dozen", 12), ("two dozen", 24), ("a half", Fraction(1, 2)), ("half", Fraction(1, 2)),
        ("three quarters", Fraction(3, 4)), ("two and a half", Fraction(5, 2)),
        ("minus one third", Fraction(-1, 3)), ("two point five", Fraction(5, 2)),
        ("five hundredths", Fraction(1, 20)), ("one hundred thousand", 100_000), ("zero", 0),
    ],
)  # fmt: skip
def test_words_have_their_numbers(words: str, value: Fraction | int) -> None:
    assert read_number_words(words.split()) == (value, len(words.split()))


@pytest.mark.parametrize("words", ["", "seventh", "a", "and", "no one", "quarters", "million"])
def test_other_words_are_no_numbers(words: str) -> None:
    assert read_number_words(words.split()) is None


@pytest.mark.parametrize("words", ["one two", "nineteen eighty", "five squared", "twenty twelve"])
def test_a_number_ends_where_it_stops_making_sense(words: str) -> None:
    assert read_number_words(words.split()) == (read_number_words(words.split()[:1])[0], 1)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("5\\text{ million}", "5000000"), ("2.5 thousand", "2500"), ("\\$2.5k", "\\$2500"),
        ("5\\text{ hundred thousand people}", "500000\\text{people}"),
        ("0.00125\\text{ million}", "1250"), ("5\\text{ thousandths}", "\\frac{5}{1000}"),
        ("1{,}500\\text{ million}", "1500000000"), ("3 dozen eggs", "36 eggs"),
        ("2\\text{ and a half}", "2\\frac{1}{2}"), ("1.2345678\\text{ million}", "1234567.8"),
    ],
)  # fmt: skip
def test_number_words_behind_numbers_are_factors(text: str, spelling: str) -> None:
    assert normalise(text) == spelling
    assert normalise(spelling) == spelling


@pytest.mark.parametrize(
    "text",
    ["1011_2", "1011_{2}", "1011_{\\text{two}}", "1011_{(2)}", "(1011)_2", "1011_{\\mathrm{two}}",
     "1011\\text{ (base 2)}", "1011\\text{ base two}", "1011_{\\text{base }2}", "1011 in base 2"],
)  # fmt: skip
def test_a_base_is_a_subscript_in_digits(text: str) -> None:
    assert normalise(text) == "1011_2"
    assert compare(text, "11").is_correct
    assert not compare(text, "1011").is_correct


@pytest.mark.parametrize("text", ["x_{10}", "a_2+1", "\\log_2 8", "5\\text{bases}", "a_{12}b"])
def test_other_subscripts_stay(text: str) -> None:
    assert normalise(text) == text


@pytest.mark.parametrize(
    "word",
    ["million", "dozen", "squared", "more", "pairs", "or so", "base",
     "Million", "MILLION", "thou", "ten-thousands", "max", "upward"],
)  # fmt: skip
def test_words_that_change_a_number_are_no_units(word: str) -> None:
    for answer in (f"5\\text{{ {word}}}", f"5 {word}", f"\\text{{5 {word}}}", f"five {word}"):
        assert not compare(answer, "5").is_correct
        assert not compare("5", answer).is_correct


def test_doubt_denial_and_estimates_are_found_in_any_spelling() -> None:
    assert hedges_in("\\text{At least }5") == {"at least"}
    assert hedges_in("it isn't 5, maybe 6") == hedges_in("maybe 6, it isn't 5") != set()
    assert hedges_in("5\\text{more}") == {"more"}
    assert hedges_in("\\text{the least value}=5") == set()
    assert hedges_in("\\notin\\text{morel}") == set()
