"""Units of measure at the end of an answer, and whether two quantities are equal.

Pure string code; runs in the verifier and its grading processes. Letters without a mark may be a
unit or factors. A text alone holds a unit only where that is plain: `5 m`, `6\\pi cm`, but not
`\\pi r^2 h`, `2mg` or `5m`. `settle_units` reads two texts together: `5m` is a length where the
other text is `5\\text{ m}`, and `5 m` is a product where it is `m+4m`.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from verification.math.numbers import parse_number
from verification.math.trees import Tree, num
from verification.math.unit_table import (
    GENERIC,
    MAX_UNIT_CHARS,
    NOTHING,
    Unit,
    read_opaque_unit,
    read_unit,
)  # fmt: skip

MAX_PARTS = 4
ANGLE = "deg^1"
_RADIAN = "rad^1"
_STERLING = "gbp^1"
_POUNDS = re.compile(r"\\text\{pounds?\}$| pounds?$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
# Where a unit may begin: a sign, marked text, or bare letters; never within another command.
_START = re.compile(
    r"%|\\deg|[€£¥₹]|\\text\{|\\frac\{\\text|(?<=[0-9A-Za-z)}\]])(?:\\\$|\\cent(?![a-z]))"
    r"|(?P<other>\\[A-Za-z]+)|(?<=[0-9A-Za-z)}\]])(?: (?=[A-Za-z])|(?=[A-Za-z]))"
)
_MARKED = ("%", "\\", "€", "£", "¥", "₹")
_BARE_WORDS = re.compile(r" [A-Za-z]{3,}(?: [A-Za-z]{3,})?")
_WORD = re.compile(r"[A-Za-z]+")
_NOT_SYMBOLS = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+")
# Short words that are as likely products of variables.
_PRODUCT_LIKE = frozenset("nm mg ms mi ha dm ml pa in kn kw kv mj kj cc".split())
_PREFIX = re.compile(
    r"(-?) ?(\\\$|[€£¥₹]|\\text\{(?:Rs|USD|US|EUR|GBP)\.?\}|Rs\.?|USD|EUR|GBP)(?=[ 0-9.(\\-])"
)
_RATE = re.compile(r"(?:/|\\text\{ ?(?:/|per |an? )| per | an? )[^0-9]*$")


_MARKS = re.compile(r"\\text\{|\}")
_BLANKS = re.compile(r" {2,}")
_FIRST_PART = re.compile(r"-?(?:\\text\{ ?)?[0-9.]+ ?(?:\\text\{|\\deg|[A-Za-z'])")
_PART = re.compile(
    r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?P<unit>\\deg|''|'|[A-Za-z]{1,12}\.?)"
    r"(?: ?,)?(?: ?and(?![a-z]))? ?"
)
# Unit of the first part -> what other spellings mean behind it: `5 h 3 m` holds minutes.
_BESIDE = {
    "s": {"m": "minute"},
    "m": {"'": "foot", "''": "inch"},
    "deg": {"'": "arcminute", "''": "arcsecond", "minute": "arcminute", "second": "arcsecond",
            "min": "arcminute", "sec": "arcsecond", "minutes": "arcminute",
            "seconds": "arcsecond"},
}  # fmt: skip


class _Split(NamedTuple):
    """A text, cut before its unit."""

    rest: str
    tail: str
    unit: Unit | None
    """None when there is none."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """A normalised text without its unit, and the unit; the whole text and None without one.

    A unit is a per cent or degree sign, a currency, text in `\\text{}`, or a known unit's name
    behind a number: a letter glued to a number, as in `5m`, is a factor.
    """
    split = _split(text)
    return split.rest, None if split.unit is None or split.unit.dimension == "unit" else split.unit


@functools.lru_cache(maxsize=1024)
def settle_units(first: str, second: str) -> tuple[str, str]:
    """Both normalised texts, with letters that may be a unit or factors disambiguated.

    They are factors where the other text holds them as symbols, and a unit where the other text
    holds a unit of that dimension: `\\text{m}` then, and `5*m` before.
    """
    settled = _without_symbols(first, second), _without_symbols(second, first)
    splits = [_split(text) for text in settled]
    dimensions = {split.unit.dimension for split in splits if split.unit is not None}
    if dimensions == {ANGLE, _RADIAN}:
        return tuple(map(_in_radians, splits))
    if dimensions == {_STERLING, "g^1"}:
        # A pound is money where the other text is £5.
        settled = _POUNDS.sub("\\\\text{gbp}", settled[0]), _POUNDS.sub("\\\\text{gbp}", settled[1])
    are_generic = [
        split.unit is not None and split.unit.dimension.startswith(f"{GENERIC}^")
        for split in splits
    ]
    if are_generic[0] != are_generic[1] and f"{NOTHING}^1" not in dimensions:
        # "units" says nothing where the other text has a known unit, or none.
        generic = 0 if are_generic[0] else 1
        rest = splits[generic].rest.strip()
        settled = (rest, settled[1]) if generic == 0 else (settled[0], rest)
        return settled
    if (splits[0].unit is None) == (splits[1].unit is None):
        return settled
    bare = 0 if splits[0].unit is None else 1
    known = splits[1 - bare].unit
    assert known is not None
    guess = _split(settled[bare], is_liberal=True)
    if guess.unit is None or guess.unit.dimension != known.dimension:
        return settled
    tail = guess.tail.strip().replace("{", "").replace("}", "")
    marked = f"{guess.rest}\\text{{{tail}}}"
    return (marked, settled[1]) if bare == 0 else (settled[0], marked)


def _in_radians(split: _Split) -> str:
    """An angle as a number, in radians."""
    assert split.unit is not None
    if split.unit.dimension == _RADIAN:
        return split.rest.strip()
    factor = split.unit.factor / 180
    return f"({split.rest.strip()})*\\frac{{{factor.numerator}\\pi}}{{{factor.denominator}}}"


def _without_symbols(text: str, other: str) -> str:
    """The text, its bare unit spelled as a product where the other text has its letters."""
    split = _split(text)
    if split.unit is None or split.tail.startswith(_MARKED):
        return text
    other_split = _split(other)
    is_unit_there = other_split.unit is not None
    symbols = _symbols_in(other_split.rest if is_unit_there else other)
    is_symbol = set("".join(_WORD.findall(split.tail))) <= symbols
    return f"{split.rest}*{split.tail.strip()}" if is_symbol else text


def _symbols_in(text: str) -> set[str]:
    return set("".join(_WORD.findall(_NOT_SYMBOLS.sub(" ", text))))


@functools.lru_cache(maxsize=1024)
def _split(text: str, *, is_liberal: bool = False) -> _Split:
    match = _PREFIX.match(text)
    if match:
        return _split_currency(text, match)
    compound = read_compound(text)
    if compound is not None:
        return _Split(compound[0], "\\text", compound[1])
    # A unit is at the end, so a bounded tail holds it; no search starts within a command.
    start = max(0, len(text) - MAX_UNIT_CHARS)
    command = text.rfind("\\", max(0, start - 20), start)
    start = command if command >= 0 else start
    for match in _START.finditer(text, start):
        before, tail = text[: match.start()], text[match.start() :]
        if match["other"] or not before or before[-1] in "+-*/^=<>,;_({" or not _is_balanced(tail):
            continue
        unit = read_unit(tail)
        if unit is None and before[-1].isdecimal() and _BARE_WORDS.fullmatch(tail):
            unit = read_opaque_unit(f"\\text{{{tail}}}")
        if unit is None or (unit.dimension == ANGLE and _TRIGONOMETRY.search(before)):
            continue
        if tail.startswith(_MARKED) or is_liberal or _is_plainly_unit(before, tail):
            return _Split(before, tail, unit)
    return _Split(text, "", None)


def _split_currency(text: str, match: re.Match[str]) -> _Split:
    rest = match[1] + text[match.end() :].strip()
    name = match[2].removeprefix("\\text{").rstrip("}").rstrip(".").lower()
    known = "\\$" if name in ("us", "usd") else name
    rate = _RATE.search(rest)
    if rate and rate.start():
        unit = read_unit(f"{known} {rate.group()}")
        return _Split(rest[: rate.start()], match[2], unit) if unit else _Split(text, "", None)
    # A currency before and another unit behind is neither.
    is_more = _PREFIX.match(rest) or _split(rest).unit is not None
    unit = read_unit(known) or Unit(f"~{name}", Fraction(1))
    return _Split(text, "", None) if is_more else _Split(rest, match[2], unit)


def _is_balanced(tail: str) -> bool:
    return tail.count("{") == tail.count("}") and tail.count("(") == tail.count(")")


def _is_plainly_unit(before: str, tail: str) -> bool:
    """Whether bare letters behind a text are a unit for any other text."""
    words = _WORD.findall(tail)
    is_long = len(words[0]) > 1
    is_like_product = not is_long or words[0] in _PRODUCT_LIKE
    if parse_number(before) is not None:
        letters = sum(len(word) == 1 for word in words)
        is_product = letters == len(words) > 1 and "/" not in tail and "^-" not in tail
        # One letter is a unit only behind a space: 5 m is a length, 5m a product.
        return (tail[0] == " " and not is_product and "^{-" not in tail) or not is_like_product
    if _symbols_in(before):
        return len(words[0]) > 2
    return not is_like_product


def same_quantity(
    first: tuple[Fraction, Unit | None],
    second: tuple[Fraction, Unit | None],
    *,
    accept_missing_unit: bool,
) -> bool:
    """Whether two numbers with units are equal; see `is_unit_mismatch` for why not.

    Per cent is a factor: 50% = 0.5, and may lack where `may_lack` says so. Known units convert:
    100 cm = 1 m.
    """
    (value, unit), (other_value, other_unit) = first, second
    if unit is None and other_unit is None:
        return value == other_value
    if unit is None or other_unit is None:
        known = unit or other_unit
        if accept_missing_unit and value == other_value and may_lack(known, value):
            return True
        if known is None or known.dimension:
            return False
    factor = unit.factor if unit else Fraction(1)
    other_factor = other_unit.factor if other_unit else Fraction(1)
    return not is_unit_mismatch(unit, other_unit) and value * factor == other_value * other_factor


def may_lack(unit: Unit | None, value: float | Fraction | None) -> bool:
    """Whether the other side may write the value without the unit.

    Without its sign a percentage above 1 is still one: 25 of 25%. Up to 1 it is a share, and 0.5%
    is not 0.5; nor is x% x. value: None if it is no number.
    """
    is_part = unit is not None and not unit.dimension and unit.factor < 1
    return not is_part or (value is not None and abs(value) > 1)


def in_base_units(tree: Tree, unit: Unit | None) -> Tree:
    """A value times the factor of its unit; degrees as radians."""
    if unit is None:
        return tree
    if unit.dimension == ANGLE:
        return ("prod", tree, ("prod", ("const", "pi"), num(unit.factor / 180)))
    return ("prod", tree, num(unit.factor))


def is_unit_mismatch(unit: Unit | None, other: Unit | None) -> bool:
    """Whether both units are given and measure different things."""
    return unit is not None and other is not None and unit.dimension != other.dimension


def read_compound(text: str) -> tuple[str, Unit] | None:
    """A normalised text as a number, spelled as a fraction, of its largest unit.

    None for anything but two to four quantities of one kind, each in a smaller unit than the last.
    """
    if text[-1:].isdecimal() or not _FIRST_PART.match(text):
        return None
    flat = _BLANKS.sub(" ", _MARKS.sub(" ", text)).strip()
    sign, flat = ("-", flat[1:]) if flat.startswith("-") else ("", flat)
    largest: Unit | None = None
    total, factor, position, count = Fraction(0), Fraction(0), 0, 0
    while position < len(flat):
        part = _PART.match(flat, position)
        unit = None if part is None else _unit_of(part["unit"].rstrip("."), largest)
        if part is None or unit is None or count == MAX_PARTS:
            return None
        if largest is not None and (unit.dimension != largest.dimension or unit.factor >= factor):
            return None
        largest, factor = largest or unit, unit.factor
        total += Fraction(part["number"]) * unit.factor
        position, count = part.end(), count + 1
    if largest is None or count < 2:
        return None
    value = total / largest.factor
    return f"{sign}{value.numerator}/{value.denominator}", largest


def _unit_of(name: str, largest: Unit | None) -> Unit | None:
    base = "m" if largest is None else largest.dimension.removesuffix("^1")
    spelled = _BESIDE.get(base, {}).get(name, name)
    if spelled.startswith("'"):
        return None
    unit = read_unit(spelled if spelled.startswith("\\") else f"\\text{{{spelled}}}")
    return unit if unit is not None and unit.dimension.endswith("^1") else None
