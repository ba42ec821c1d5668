"""Units of measure: names and conversion factors.

Pure string code; runs in the verifier and its grading processes.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from verification.math.number_words import NUMBER_WORDS

MAX_UNIT_CHARS = 60
PERCENT = "%"
NOTHING = "nothing"
GENERIC = "unit"
"""A unit of unknown length: 5 units are 5, but 5 square units are not 5 cubic units."""


class Unit(NamedTuple):
    """A unit after a number: 1 unit is `factor` base units of its dimension."""

    dimension: str
    """Sorted `base^power` factors; empty for a pure number, as percent is."""
    factor: Fraction


# dimension -> (factor, spellings); spellings also match with a final s.
_TABLE: dict[str, list[tuple[str, str]]] = {
    "m": [
        ("1", "m meter metre"), ("1/100", "cm centimeter centimetre"), ("1000", "km kilometer "
        "kilometre"), ("1/1000", "mm millimeter millimetre"), ("1/10", "dm decimeter decimetre"),
        ("254/10000", "in inch inches"), ("3048/10000", "ft foot feet"), ("9144/10000", "yd yard"),
        ("1609344/1000", "mi mile"), ("1/1000000", "\\mum micrometer micrometre"), ("1/1000000000",
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
    "gbp": [("1", "£ gbp")],
    "yen": [("1", "¥ yen jpy")],
    "rupee": [("1", "₹ rupee rs inr")],
    "deg": [("1", "\\deg deg degree"), ("1/60", "arcminute"), ("1/3600", "arcsecond")],
    "rad": [("1", "rad radian")],
    "v": [("1", "v volt")],
    "a": [("1", "ampere amp")],
    "ohm": [("1", "ohm"), ("1000", "kiloohm kilohm")],
    "mol": [("1", "mol mole")],
    "m^2": [("40468564224/10000000", "acre"), ("10000", "hectare ha")],
    "m^3": [("1/1000", "l liter litre"), ("1/1000000", "ml milliliter millilitre cc")],
    "m*s^-1": [("44704/100000", "mph"), ("1000/3600", "kph kmh")],
    "g*m*s^-2": [("1000", "n newton"), ("1000000", "kn kilonewton")],
    "g*m^2*s^-2": [
        ("1000", "j joule"), ("1000000", "kj kilojoule"), ("1000000000", "mj megajoule"),
        ("3600000000", "kwh"),
    ],
    "g*m^2*s^-3": [("1000", "w watt"), ("1000000", "kw kilowatt")],
    "g*m^-1*s^-2": [("1000", "pa pascal"), ("1000000", "kpa kilopascal")],
    "s^-1": [("1", "hz hertz"), ("1000", "khz kilohertz"), ("1000000", "mhz megahertz")],
}  # fmt: skip
# A bare letter in the other case is a variable.
_LETTERS = {letter: letter.lower() for letter in "mgshlLNJWV"}
# In this case a prefix or letter means something else: a megagram is no milligram.
_OTHER_CASE = frozenset("Mg Ms Mm Ml ML mJ mHz Nm NM".split())
_NO_UNIT = frozenset({"unit", "number", "point"})
_HEDGES = frozenset(
    "more less fewer remaining left so approximately approx about ish maybe perhaps possibly "
    "probably likely roughly nearly almost around circa guess plus minus at most least many few "
    "too lower higher longer shorter taller older younger greater smaller bigger larger faster "
    "slower extra additional below above under over beyond short wrong incorrect ago within "
    "between except unless because since as false true yes neither either max "
    "maximum minimum tops past upward upwards downward downwards".split()
)
# Words that make a text behind a number something else than a unit.
_NOT_UNITS = (
    _HEDGES
    | NUMBER_WORDS
    | frozenset(
        "or and not to than if when where for no only but is are with from choose mod modulo pi "
        "e i squared cubed factorial root inverse reciprocal divided multiplied power powers "
        "base fold mil zillion myriad pair pairs couple couples thou grand "
        "tens tenfold negative positive".split()
    )
)
_TOKEN = re.compile(
    r"\\text\{|\\[$]|\\[A-Za-z]+|[A-Za-z]+|[€£¥₹]|\^ ?\{?-?[0-9]\}?|[/*(){} ]|[-.](?![0-9])"
)
_PERCENT = re.compile(
    r"(?:\\text\{)? ?(?:percent|per cent|percentage(?: points?)?|pct\.?) ?\}?", re.IGNORECASE
)
_TEMPERATURE = re.compile(
    r"\\deg ?(?:\\text\{)?([CF])\}?|(?:\\text\{)? ?degrees? (c|f|celsius|centigrade|fahrenheit)\}?"
    r"|((?-i:K)|\\text\{kelvins?\})",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"\\frac\{((?:\\text\{[^{}]*\}|[^{}])*)\}\{((?:\\text\{[^{}]*\}|[^{}])*)\}")
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


@functools.cache
def known_units() -> dict[str, tuple[dict[str, int], Fraction]]:
    """Spelling -> (powers of base units, factor)."""
    units = {}
    for dimension, rows in _TABLE.items():
        parts = (part.partition("^") for part in dimension.split("*"))
        powers = {base: int(power or 1) for base, _, power in parts}
        for factor, spellings in rows:
            units |= dict.fromkeys(spellings.split(), (powers, Fraction(factor)))
    return units


def read_unit(text: str) -> Unit | None:
    """The unit that a text spells; None when it spells none.

    Unknown words that are marked as text become a new dimension: apples are no oranges.
    """
    text = text.strip()
    if text == PERCENT or _PERCENT.fullmatch(text):
        return Unit("", Fraction(1, 100))
    if len(text) > MAX_UNIT_CHARS:
        return None
    text = _FRACTION.sub(r"\1/\2", text).replace("pounds sterling", "gbp")
    text = text.replace("years old", "years").replace("year old", "year")
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature:
        scale = (temperature[1] or temperature[2] or "k")[0].upper()
        return Unit(f"~{scale}", Fraction(1))
    parsed = _read_product(text)
    if parsed is not None:
        powers, factor = parsed
        generic = powers.pop(GENERIC, 0)
        parts = (f"{base}^{power}" for base, power in sorted(powers.items()) if power)
        # A mile per metre is a number, but not the number 1.
        other = f"{GENERIC}^{generic}" if generic and not powers else "unit"
        return Unit("*".join(parts) or (other if factor == 1 else "~ratio"), factor)
    return read_opaque_unit(text)


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
        if token.group() in _OTHER_CASE:
            return None
        word = token.group().lower()
        if word in (" ", "*", "\\text{", "}", "{", "(", ")", "-", "."):
            continue
        if word in ("/", "per", "an"):
            sign, last = -1, ""
        elif word[0] == "^" or word in ("squared", "cubed"):
            power = _POWER_WORDS.get(word) or int(word.strip("^ {}"))
            if not last or abs(power) > 9:
                return None
            if not power:
                # No length in cm^0 is left to be compared with cm^2.
                powers[NOTHING] = 1
            _add_unit(powers, last, sign * (power - 1))
            factor *= known_units()[last][1] ** (sign * (power - 1)) if last in known_units() else 1
        elif word in _POWER_WORDS:
            next_power = _POWER_WORDS[word]
        else:
            last = _LETTERS.get(token.group(), "") if _is_letter(word) else _singular(word)
            if last not in known_units() and last not in _NO_UNIT:
                return None
            _add_unit(powers, last, sign * next_power)
            factor *= known_units()[last][1] ** (sign * next_power) if last in known_units() else 1
            next_power = 1
    return (powers, factor) if position == len(text) else None


def _is_letter(word: str) -> bool:
    return len(word) == 1 and word.isalpha()


def _add_unit(powers: dict[str, int], name: str, power: int) -> None:
    if name == GENERIC:
        powers[GENERIC] = powers.get(GENERIC, 0) + power
    for base, base_power in known_units().get(name, ({}, 0))[0].items():
        powers[base] = powers.get(base, 0) + base_power * power


def _singular(word: str) -> str:
    if word in known_units() or word in _NO_UNIT:
        return word
    return word.removesuffix("s")


def read_opaque_unit(text: str) -> Unit | None:
    """A unit of unknown words such as `\\text{apples}`; None for a text that is no unit."""
    if not text.startswith("\\text{") or not text.endswith("}") or text.count("{") > 1:
        return None
    words = text[6:-1].lower().split()
    is_plain = all(word.replace("-", "").replace(".", "").isalpha() for word in words)
    words = words[1:] if words[:1] == ["ordered"] and words[1:] else words
    is_pair = text[6:-1].lower().strip() in ("ordered pairs", "ordered pair")
    if not words or len(words) > 3 or not is_plain:
        return None
    parts = " ".join(words).replace("-", " ").replace(".", " ").split()
    if _NOT_UNITS.intersection(parts) and not is_pair:
        return None
    return Unit("~" + " ".join(map(singular, words)), Fraction(1))


_IRREGULAR = {
    "people": "person", "children": "child", "men": "man", "women": "woman", "feet": "foot",
    "inches": "inch", "dice": "die", "mice": "mouse", "teeth": "tooth", "vertices": "vertex",
}  # fmt: skip


def singular(word: str) -> str:
    """The singular of a noun; for any other word, one fixed spelling."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("xes", "shes", "ches", "sses")):
        return word[:-2]
    return word if word.endswith(("ss", "us", "is")) else word.removesuffix("s")
