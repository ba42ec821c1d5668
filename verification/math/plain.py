"""Answers that plain text decides: numbers with units, times, ratios, choices, words.

Pure string code; runs in the verifier and its grading processes. Comparison of readings is
symmetric: swapping answer and reference never changes a verdict.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from verification.math.choices import Choice, Choices, are_joined, hedges_in, read_choice
from verification.math.number_words import read_number_words
from verification.math.numbers import (
    ClockTime,
    Ratio,
    parse_colon,
    parse_hour,
    parse_number,
    same_time,
)
from verification.math.text import normalise
from verification.math.unit_table import Unit, read_unit, singular
from verification.math.units import is_unit_mismatch, same_quantity, settle_units, split_unit
from verification.verdict import CORRECT, WRONG, Verdict

WRONG_UNIT = Verdict(False, "wrong_unit")
EMPTY_SET = "\\emptyset"
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_PROSE = re.compile(r"\\text\{[^{}]*[A-Za-z]{2}|(?<![A-Za-z\\])[A-Za-z']{2,} ?[(A-Za-z]")
_CAPITALS = re.compile(r"[A-Z]{3,}")
_SHORT_WORDS = frozenset(
    "yes no true false even odd east west up down left both red blue mon tue wed thu fri sat sun "
    "one two six ten zero four five nine prime dog cat".split()
)
_CONNECTIVES = frozenset({"and", "or"})
_OPENINGS = frozenset("a an the it it's this that they is are on".split())
_PROPERTIES = frozenset(
    "odd even rational irrational prime composite isoscele equilateral scalene infinite".split()
)
_BEARERS = frozenset("number integer triangle solution function".split())
_NAMED = frozenset("limit slope function".split())
_SUBJECTS = frozenset("series sequence".split())
_SYNONYMS = {
    "convergent": "converge", "converges": "converge", "divergent": "diverge",
    "diverges": "diverge",
}  # fmt: skip
_AGREEMENT = {"true": "yes", "false": "no"}
MIN_BARE_WORD_CHARS = 5
_FOUR_LETTERS = re.compile(r"(?=[a-z]*[aeiou])[a-z]{4}")


class Number(NamedTuple):
    """An exact number and its unit."""

    value: Fraction
    unit: Unit | None


class Words(NamedTuple):
    """An answer in words, in lower case."""

    text: str


Plain = Number | ClockTime | Ratio | Choice | Choices | Words


@functools.lru_cache(maxsize=1024)
def read_plain(text: str) -> Plain | None:
    """Plain reading of a normalised text; None when it needs a parser."""
    if not text:
        return None
    if text == EMPTY_SET:
        return Words(EMPTY_SET)
    rest, unit = split_unit(text)
    value = parse_number(rest)
    if value is not None:
        return Number(value, unit)
    # x cm is a length, not two words.
    is_quantity = unit is not None and unit.dimension[:1] != "~" and len(rest) == 1
    words = None if is_quantity else _read_words(text)
    return parse_colon(text) or read_choice(text) or _read_number_words(text) or words


def compare_plain(first: str, second: str, *, accept_missing_unit: bool) -> Verdict | None:
    """Verdict on two normalised texts when plain readings of both decide; else None."""
    pair = settle_choices(first, second)
    if isinstance(pair, Verdict):
        return pair
    if pair != (first, second):
        first, second = (normalise(text) for text in pair)
        if first == second:
            return CORRECT
    if hedges_in(first) != hedges_in(second):
        return WRONG
    if _CAPITALS.fullmatch(first) and _CAPITALS.fullmatch(second):
        # An order of letters, a triangle or a plane; not a product.
        return CORRECT if first == second else WRONG
    if _are_anagrams(first, second):
        return WRONG
    first, second = settle_units(first, second)
    plain, other = _read_pair(first, second)
    if plain is None or other is None:
        known, text = (plain, second) if plain is not None else (other, first)
        if isinstance(known, Choices) and are_joined(text, first if text is second else second):
            return CORRECT
        is_choice = isinstance(known, Choice | Choices)
        # A sentence about a letter that is not plainly the choice of it is no choice.
        return WRONG if is_choice and (_is_prose(first) or _is_prose(second)) else None
    if isinstance(plain, Number) and isinstance(other, Number):
        if same_quantity(plain, other, accept_missing_unit=accept_missing_unit):
            return CORRECT
        is_mismatch = plain.value == other.value and is_unit_mismatch(plain.unit, other.unit)
        return WRONG_UNIT if is_mismatch else WRONG
    if isinstance(plain, ClockTime) and isinstance(other, ClockTime):
        is_same = same_time(plain, other, accept_missing_unit=accept_missing_unit)
        return CORRECT if is_same else WRONG
    if isinstance(plain, Choices) != isinstance(other, Choices) and (
        are_joined(first, second) or are_joined(second, first)
    ):
        return CORRECT
    if isinstance(plain, Words | Choices) and isinstance(other, Words | Choices):
        return CORRECT if _same_words(plain, other) else WRONG
    ratio, other_ratio = _as_ratio(plain, other), _as_ratio(other, plain)
    return CORRECT if ratio is not None and ratio == other_ratio else WRONG


def _read_pair(first: str, second: str) -> tuple[Plain | None, Plain | None]:
    """Plain readings of both texts. `5 PM` is a time only where the other text is one too."""
    plain, other = read_plain(first), read_plain(second)
    hour, other_hour = parse_hour(first), parse_hour(second)
    if hour is not None and (other_hour is not None or isinstance(other, ClockTime)):
        return hour, other_hour or other
    if other_hour is not None and isinstance(plain, ClockTime):
        return plain, other_hour
    return plain, other


def settle_choices(first: str, second: str) -> Verdict | tuple[str, str]:
    """Verdict by the letters of lettered choices, or the two texts that remain to compare.

    `(B) 7` equals `B` by its letter and `7` by its text; where both have letter and text, both
    must agree.
    """
    choice, other = read_plain(first), read_plain(second)
    if isinstance(choice, Choice) and isinstance(other, Choice):
        if choice.letter != other.letter:
            return WRONG
        return (choice.text, other.text) if choice.text and other.text else CORRECT
    if isinstance(choice, Choice) and choice.text:
        return choice.text, second
    if isinstance(other, Choice) and other.text:
        return first, other.text
    return first, second


def _same_words(first: Words | Choices, second: Words | Choices) -> bool:
    """Equality without articles, `it is` before a property, and the plural of nouns."""
    if isinstance(first, Words) and isinstance(second, Words):
        one, two = sorted((_core_words(first.text), _core_words(second.text)), key=len)
        # odd and an odd number
        if one == ["neither"] and two[:1] == one and "nor" in two:
            return True
        is_property = len(one) == 1 and one[0] in _PROPERTIES and two[:1] == one
        return one == two or (is_property and len(two) == 2 and two[1] in _BEARERS)
    return first == second


def _core_words(text: str) -> list[str]:
    words = text.split()
    while len(words) > 1 and (
        words[0] in _OPENINGS or (words[0] in _NAMED and words[1] in ("is", "does"))
    ):
        words = words[1:]
    if words[0] in _SUBJECTS and words[1:] and words[-1] in _SYNONYMS:
        words = words[1:] if words[1] != "is" else words[2:]
    if words[:2] == ["infinitely", "many"]:
        words = ["infinite", *words[2:]]
    words = [_SYNONYMS.get(word, word) for word in words]
    if len(words) == 1:
        words = [_AGREEMENT.get(words[0], words[0])]
    # A the end of a name, as in plane A, is no article.
    words = [word for word, _ in zip(words, words[1:], strict=False) if word != "the"] + words[-1:]
    return [singular(word) for word in words]


def _is_prose(text: str) -> bool:
    return "=" not in text and _PROSE.search(text) is not None


def words_of(text: str) -> str:
    """The words of a normalised text in lower case; empty when it holds more than words."""
    bare = text.replace("\\text{", " ").replace("}", " ")
    # A sign before a word changes it; between words it joins them.
    bare = bare.strip() if bare.lstrip().startswith("-") else bare.replace("-", " ")
    words = " ".join(bare.replace(".", " ").split())
    return words.lower() if _WORDS.fullmatch(words) else ""


def _as_ratio(plain: Plain, other: Plain) -> Fraction | None:
    """Value in a comparison of a ratio with something else; None when they do not compare."""
    if isinstance(plain, Ratio):
        return plain.value
    if isinstance(plain, Number) and isinstance(other, Ratio) and plain.unit is None:
        return plain.value
    # 10:20 is a time unless it meets 1:2, which is none.
    is_bare_time = isinstance(plain, ClockTime) and not plain.half and not plain.seconds
    if is_bare_time and isinstance(other, Ratio) and plain.minutes:
        return Fraction(plain.hours, plain.minutes)
    return None


def _read_number_words(text: str) -> Number | None:
    words = words_of(text).split()
    if not words:
        return None
    number = read_number_words(words)
    if number is None:
        return None
    value, place = number
    if place == len(words):
        return Number(value, None)
    unit = read_unit(f"\\text{{{' '.join(words[place:])}}}")
    return None if unit is None else Number(value, unit)


def _read_words(text: str) -> Words | None:
    words = words_of(text)
    if not words or _CONNECTIVES & set(words.split()):
        return None
    is_marked = (
        ("\\text{" in text and len(words) > 1)
        or len(words) >= MIN_BARE_WORD_CHARS
        or words in _SHORT_WORDS
    )
    return Words(words) if is_marked else None


def _are_anagrams(first: str, second: str) -> bool:
    """Whether two texts are different words of the same four letters: `live`, `evil`.

    Letters without a vowel, or next to each other in the alphabet as in `abcd`, are a product.
    """
    word, other = words_of(first), words_of(second)
    if word == other or sorted(word) != sorted(other) or not _FOUR_LETTERS.fullmatch(word):
        return False
    return ord(max(word)) - ord(min(word)) != 3
