"""Quantities in several units: `2 h 30 min`, `5'6''`, `3^\\circ 30'`.

Pure string code; runs in the verifier and its grading processes.
"""

import re
from fractions import Fraction

from verification.math.unit_table import Unit, read_unit

MAX_PARTS = 4
_MARKS = re.compile(r"\\text\{|\}")
_BLANKS = re.compile(r" {2,}")
_START = re.compile(r"-?(?:\\text\{ ?)?[0-9.]+ ?(?:\\text\{|\\deg|[A-Za-z'])")
_PART = re.compile(
    r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?P<unit>\\deg|''|'|[A-Za-z]{1,12}\.?)"
    r"(?: ?,)?(?: ?and(?![a-z]))? ?"
)
# Beside another unit these mean what they do not mean alone.
_BESIDE = {
    "s": {"m": "minute"},
    "m": {"'": "foot", "''": "inch"},
    "deg": {"'": "arcminute", "''": "arcsecond", "minute": "arcminute", "second": "arcsecond",
            "min": "arcminute", "sec": "arcsecond", "minutes": "arcminute",
            "seconds": "arcsecond"},
}  # fmt: skip


def read_compound(text: str) -> tuple[str, Unit] | None:
    """A normalised text as a number, spelled as a fraction, of its largest unit.

    None for anything but two to four quantities of one kind, each in a smaller unit than the last.
    """
    if text[-1:].isdigit() or not _START.match(text):
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
    if largest is None and name == "m":
        spelled = "m"
    if spelled.startswith("'"):
        return None
    unit = read_unit(spelled if spelled.startswith("\\") else f"\\text{{{spelled}}}")
    return unit if unit is not None and unit.dimension.endswith("^1") else None
