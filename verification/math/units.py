"""Units of measure at the end of an answer.

Pure string code; runs in the verifier and its grading processes.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

MAX_UNIT_CHARS = 60
PERCENT = "%"
ANGLE = "deg^1"
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


class Unit(NamedTuple):
    """What follows a number: 1 of it is `factor` of its dimension's base unit."""

    dimension: str
    """Sorted `base^power` factors; empty for a pure number, as percent is."""
    factor: Fraction


# base unit of a dimension -> (factor, spellings); spellings also match with a final s.
_TABLE: dict[str, list[tuple[str, str]]] = {
    "m": [
        ("1", "m meter metre"), ("1/100", "cm centimeter centimetre"), ("1000", "km kilometer "
        "kilometre"), ("1/1000", "mm millimeter millimetre"), ("1/10", "dm decimeter decimetre"),
        ("254/10000", "in inch inches"), ("3048/10000", "ft foot feet"), ("9144/10000", "yd yard"),
        ("1609344/1000", "mi mile"), ("1/1000000", "\\mum micrometer"), ("1/1000000000",
        "nm nanometer"),
    ],
    "g": [
        ("1", "g gram gramme"), ("1000", "kg kilogram"), ("1/1000", "mg milligram"),
        ("1000000", "ton tonne"), ("45359237/100000", "lb pound"), ("28349523125/1000000000", "oz "
        "ounce"),
    ],
    "s": [
        ("1", "s sec second"), ("60", "min minute"), ("3600", "h hr hour"), ("86400", "day"),
        ("604800", "week"), ("1/1000", "ms millisecond"),
    ],
    "month": [("1", "month"), ("12", "year yr")],
    "dollar": [("1", "\\$ dollar usd"), ("1/100", "cent \\textcent \\cent")],
    "euro": [("1", "€ euro eur")],
    "deg": [("1", "\\deg deg degree"), ("1/60", "arcminute"), ("1/3600", "arcsecond")],
    "rad": [("1", "rad radian")],
    "n": [("1", "n newton"), ("1000", "kn kilonewton")],
    "j": [("1", "j joule"), ("1000", "kj kilojoule"), ("1000000", "mj megajoule")],
    "w": [("1", "w watt"), ("1000", "kw kilowatt")],
    "v": [("1", "v volt")],
    "a": [("1", "ampere amp")],
    "hz": [("1", "hz hertz"), ("1000", "khz kilohertz"), ("1000000", "mhz megahertz")],
    "mol": [("1", "mol mole")],
    "pa": [("1", "pa pascal"), ("1000", "kpa kilopascal")],
}  # fmt: skip
_COMPOUND = {
    "l": ("m^3", "1/1000"), "liter": ("m^3", "1/1000"), "litre": ("m^3", "1/1000"),
    "ml": ("m^3", "1/1000000"), "milliliter": ("m^3", "1/1000000"),
    "millilitre": ("m^3", "1/1000000"), "cc": ("m^3", "1/1000000"),
    "mph": ("m^1*s^-1", "44704/100000"), "kph": ("m^1*s^-1", "1000/3600"),
    "kmh": ("m^1*s^-1", "1000/3600"), "acre": ("m^2", "40468564224/10000000"),
    "hectare": ("m^2", "10000"), "ha": ("m^2", "10000"),
}  # fmt: skip
# A bare letter in the other case is a variable.
_LETTERS = {letter: letter.lower() for letter in "mgshlLNJWV"}
_NO_UNIT = frozenset({"unit", "number", "point"})
# Words that make a text behind a number something else than a unit.
_NOT_UNITS = frozenset(
    "or and not to than if when where for no only but is are with from choose mod pi e i".split()
)
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_TOKEN = re.compile(
    r"\\text\{|\\[$]|\\[A-Za-z]+|[A-Za-z]+|€|\^ ?\{?-?[0-9]\}?|[/*(){} ]|[-.](?![0-9])"
)
# Where a unit may begin: a sign, marked text, or a bare word behind a number. One bare letter is a
# unit only behind a space: 5 m is a length, 5m a product.
_START = re.compile(
    r"%|\\deg|€|\\text\{|\\frac\{\\text|(?<=[0-9)}\]])(?:\\\$| (?=[A-Za-z])|(?=[A-Za-z]{2}))"
    r"|(?<=[a-z]) (?=[a-z]{2})"
)
_TEMPERATURE = re.compile(r"\\deg ?(?:\\text\{)?([CF])\}?|(K|\\text\{[Kk]elvins?\})")
_BARE_WORDS = re.compile(r" [A-Za-z]{3,}(?: [A-Za-z]{3,})?")
_PREFIX = re.compile(r"(-?) ?(\\\$|€|£|¥|₹|\\text\{(?:Rs|USD|US)\.?\}|Rs\.?)(?=[ 0-9.(\\-])")
_FRACTION = re.compile(r"\\frac\{((?:\\text\{[^{}]*\}|[^{}])*)\}\{((?:\\text\{[^{}]*\}|[^{}])*)\}")


@functools.cache
def _units() -> dict[str, tuple[dict[str, int], Fraction]]:
    """Spelling -> (powers of base units, factor)."""
    units = {}
    for base, rows in _TABLE.items():
        for factor, spellings in rows:
            for spelling in spellings.split():
                units[spelling] = ({base: 1}, Fraction(factor))
    for spelling, (dimension, factor) in _COMPOUND.items():
        powers = dict(part.split("^") for part in dimension.split("*"))
        units[spelling] = ({base: int(power) for base, power in powers.items()}, Fraction(factor))
    return units


def split_unit(text: str) -> tuple[str, Unit | None]:
    """A normalised text without its unit, and the unit; the whole text and None without one.

    A unit is a per cent or degree sign, a currency, text in `\\text{}`, or a known unit's name
    behind a number: a letter glued to a number, as in `5m`, is a factor.
    """
    match = _PREFIX.match(text)
    if match:
        rest = match[1] + text[match.end() :].strip()
        name = match[2].removeprefix("\\text{").rstrip("}").rstrip(".").lower()
        # "$5 million" and the like are more than a currency.
        is_more = _PREFIX.match(rest) or _split_tail(rest)[1] is not None
        return (text, None) if is_more else (rest, _currency(name))
    return _split_tail(text)


def _currency(name: str) -> Unit:
    known = "\\$" if name in ("us", "usd") else name
    return read_unit(known) or Unit(f"~{name}", Fraction(1))


def _split_tail(text: str) -> tuple[str, Unit | None]:
    """As `split_unit`, for a unit behind the number."""
    # A unit stands at the end, so a bounded tail holds it.
    for match in _START.finditer(text, max(1, len(text) - MAX_UNIT_CHARS)):
        before, tail = text[: match.start()], text[match.start() :]
        if before[-1] in "+-*/^=<>,;_({":
            continue
        unit = read_unit(tail)
        if unit is None and before[-1].isdigit() and _BARE_WORDS.fullmatch(tail):
            unit = _opaque_unit(f"\\text{{{tail}}}")
        if unit is not None and not (unit.dimension == ANGLE and _TRIGONOMETRY.search(before)):
            return before, None if unit.dimension == "unit" else unit
    return text, None


def read_unit(text: str) -> Unit | None:
    """The unit that a text spells; None when it spells none.

    Unknown words become a dimension of their own, so that apples are no oranges, if the text marks
    them as text.
    """
    text = text.strip()
    if text == PERCENT or text.lower() in ("\\text{percent}", "percent"):
        return Unit("", Fraction(1, 100))
    if len(text) > MAX_UNIT_CHARS:
        return None
    text = _FRACTION.sub(r"\1/\2", text)
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature:
        return Unit(f"~{temperature[1] or 'K'}", Fraction(1))
    parsed = _read_product(text)
    if parsed is not None:
        powers, factor = parsed
        parts = (f"{base}^{power}" for base, power in sorted(powers.items()) if power)
        return Unit("*".join(parts) or "unit", factor)
    return _opaque_unit(text)


def _read_product(text: str) -> tuple[dict[str, int], Fraction] | None:
    """Powers of base units and factor of a text like `km/h` or `cubic meters per second`."""
    powers: dict[str, int] = {}
    factor = Fraction(1)
    sign, next_power, last = 1, 1, ""
    position = 0
    for token in _TOKEN.finditer(text):
        if token.start() != position:
            return None
        position = token.end()
        word = token.group().lower()
        if word in (" ", "*", "\\text{", "}", "{", "(", ")", "-", "."):
            continue
        if word in ("/", "per", "an"):
            sign, last = -1, ""
        elif word[0] == "^" or word in ("squared", "cubed"):
            power = _POWER_WORDS.get(word) or int(word.strip("^ {}"))
            if not last or abs(power) > 9:
                return None
            _add_unit(powers, last, sign * (power - 1))
            factor *= _units()[last][1] ** (sign * (power - 1)) if last in _units() else 1
        elif word in _POWER_WORDS:
            next_power = _POWER_WORDS[word]
        else:
            last = _LETTERS.get(token.group(), "") if len(word) == 1 else _singular(word)
            if last not in _units() and last not in _NO_UNIT:
                return None
            _add_unit(powers, last, sign * next_power)
            factor *= _units()[last][1] ** (sign * next_power) if last in _units() else 1
            next_power = 1
    return (powers, factor) if position == len(text) else None


def _add_unit(powers: dict[str, int], name: str, power: int) -> None:
    for base, base_power in _units().get(name, ({}, 0))[0].items():
        powers[base] = powers.get(base, 0) + base_power * power


def _singular(word: str) -> str:
    if word in _units() or word in _NO_UNIT:
        return word
    return word.removesuffix("s")


def _opaque_unit(text: str) -> Unit | None:
    """A unit of unknown words such as `\\text{apples}`; None for a text that is no unit."""
    if not text.startswith("\\text{") or not text.endswith("}") or text.count("{") > 1:
        return None
    words = text[6:-1].lower().split()
    is_plain = all(word.replace("-", "").replace(".", "").isalpha() for word in words)
    if not words or len(words) > 3 or not is_plain or _NOT_UNITS & set(words):
        return None
    return Unit("~" + " ".join(word.removesuffix("s") for word in words), Fraction(1))


def same_quantity(
    first: tuple[Fraction, Unit | None],
    second: tuple[Fraction, Unit | None],
    *,
    accept_missing_unit: bool,
) -> bool:
    """Whether two numbers with units are equal; see `is_unit_mismatch` for why not.

    Per cent is a factor: 50% = 0.5. Known units convert: 100 cm = 1 m.
    """
    (value, unit), (other_value, other_unit) = first, second
    if unit is None and other_unit is None:
        return value == other_value
    if unit is None or other_unit is None:
        known = unit or other_unit
        if accept_missing_unit and value == other_value:
            return True
        if known is None or known.dimension:
            return False
    factor = unit.factor if unit else Fraction(1)
    other_factor = other_unit.factor if other_unit else Fraction(1)
    return not is_unit_mismatch(unit, other_unit) and value * factor == other_value * other_factor


def is_unit_mismatch(unit: Unit | None, other: Unit | None) -> bool:
    """Whether both units are given and measure different things."""
    return unit is not None and other is not None and unit.dimension != other.dimension
