"""Exact numbers, times and ratios as people write them.

Pure string code; runs in the verifier and its grading processes. Numbers are fractions of bounded
size: text whose value would need more than MAX_EXPONENT zeros is no number here.
"""

import re
from fractions import Fraction
from typing import NamedTuple

MAX_EXPONENT = 400
_PLAIN = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_GROUPED = r"[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?"
_DECIMAL = rf"(?:{_GROUPED}|{_PLAIN})"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)(?P<digits>{_DECIMAL})(?:[eE](?P<e>[+-]?[0-9]{{1,4}}))?")
_POWER_OF_TEN = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<digits>{_DECIMAL})(?: ?[*xX] ?| ))?"
    r"10\^(?:\{(?P<braced>[+-]?[0-9]{1,4})\}|(?P<bare>-?[0-9]{1,4})|\((?P<round>-?[0-9]{1,4})\))"
)
_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>[0-9]{{1,60}}) ?)?"
    rf"(?:\\frac\{{(?P<top>[+-]?{_DECIMAL})\}}\{{(?P<bottom>[+-]?{_DECIMAL})\}})"
)
_SLASH = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>[0-9]{{1,60}}) )?"
    rf"\(?(?P<top>{_DECIMAL})\)?/\(?(?P<bottom>[+-]?{_DECIMAL})\)?"
)
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]{0,60})\.(?P<fixed>[0-9]{0,60})"
    r"\\(?:overline|bar|dot) ?(?:\{(?P<cycle>[0-9]{1,60})\}|(?P<digit>[0-9]))"
)
_REPEATING_WITHIN = re.compile(
    r"(?P<sign>)(?P<whole>(?<![0-9.])[0-9]{1,60})\.(?P<fixed>[0-9]{0,60})"
    r"\\(?:overline|bar|dot) ?(?:\{(?P<cycle>[0-9]{1,60})\}|(?P<digit>[0-9]))"
)
_BASE = re.compile(
    r"(?P<sign>-?)(?P<digits>[0-9][0-9A-F]{0,100})_(?:\{(?P<base>[0-9]{1,2})\}|(?P<b>[0-9]))"
)
_COLON = re.compile(r"([0-9]{1,9}):([0-9]{1,9})(?::([0-9]{2}))? ?([ap]m)?")
_HALF_DAY = re.compile(r" ?(?:\\text\{)?\b([ap])\.? ?m\b\.?\}?", re.IGNORECASE)

_HOUR = re.compile(
    r"(?:\\text\{)?([0-9]{1,2}) ?(?:\\text\{)? ?(?:([ap])\.? ?m\.?|o'clock)\}?", re.IGNORECASE
)


class ClockTime(NamedTuple):
    """A time of day or a duration, as written."""

    hours: int
    minutes: int
    seconds: int
    half: str
    """"a", "p", or empty if the text gives neither."""


class Ratio(NamedTuple):
    """A ratio a:b that cannot be a time of day."""

    value: Fraction


def parse_number(text: str) -> Fraction | None:
    """The number that a normalised text is, exactly; None when it is none.

    Integers, decimals, grouped thousands, fractions, mixed numbers, powers of ten, repeating
    decimals, digits with a base.
    """
    if len(text) > 2 and text[0] == "(" and text[-1] == ")":
        text = text[1:-1]
    if not text or text[-1] not in "0123456789.})ABCDEF":
        return None
    for pattern, read in _READERS:
        match = pattern.fullmatch(text)
        if match:
            return read(match)
    return None


def parse_colon(text: str) -> ClockTime | Ratio | None:
    """The time or ratio that a normalised text is: a time when two digits below 60 follow."""
    if ":" not in text:
        return None
    if text.startswith("\\text{") and text.endswith("}") and text.count("}") == 1:
        text = text[6:-1]
    match = _COLON.fullmatch(_HALF_DAY.sub(lambda half: half[1].lower() + "m", text, count=1))
    if not match:
        return None
    first, second, seconds, half = match.groups()
    is_time = len(second) == 2 and int(second) < 60 and len(first) <= 2 and int(first) <= 24
    if is_time:
        return ClockTime(int(first), int(second), int(seconds or 0), (half or "")[:1])
    if seconds or half or int(second) == 0:
        return None
    return Ratio(Fraction(int(first), int(second)))


def parse_hour(text: str) -> ClockTime | None:
    """The time of `5 PM`, `5\\text{ p.m.}`; None for anything else."""
    match = _HOUR.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= 12:
        return None
    return ClockTime(int(match[1]), 0, 0, (match[2] or "").lower())


def same_time(first: ClockTime, second: ClockTime, *, accept_missing_unit: bool) -> bool:
    """Whether two times are equal; a missing am or pm is treated like a missing unit."""
    if not first.half and not second.half:
        return first == second
    if first.half and second.half:
        return _seconds_of_day(first) == _seconds_of_day(second)
    marked, bare = (first, second) if first.half else (second, first)
    # 9:15 p.m. is 21:15 for certain, and 9:15 only for a reader who knows which half is meant.
    if bare.hours > 12 or bare.hours == 0:
        return _seconds_of_day(marked) == _seconds_of_day(bare)
    return accept_missing_unit and marked[:3] == bare[:3]


def _seconds_of_day(time: ClockTime) -> int:
    hours = time.hours
    if time.half:
        hours = hours % 12 + (12 if time.half == "p" else 0)
    return hours * 3600 + time.minutes * 60 + time.seconds


def _read_decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "") + "0" * digits.endswith("."))


def _scaled(match: re.Match[str], exponent: int) -> Fraction | None:
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = _read_decimal(match["digits"] or "1") * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value


def _read_number(match: re.Match[str]) -> Fraction | None:
    return _scaled(match, int(match["e"] or 0))


def _read_power_of_ten(match: re.Match[str]) -> Fraction | None:
    return _scaled(match, int(match["braced"] or match["bare"] or match["round"]))


def _read_fraction(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["top"], match["bottom"]
    divisor = _read_decimal(bottom)
    # In a mixed number the fraction is a plain one; 3\frac{-1}{2} is a product.
    is_plain = top.isdecimal() and bottom.isdecimal()
    if divisor == 0 or (match["whole"] and not is_plain):
        return None
    value = int(match["whole"] or 0) + _read_decimal(top) / divisor
    return -value if match["sign"] == "-" else value


def _read_repeating(match: re.Match[str]) -> Fraction:
    cycle = match["cycle"] or match["digit"]
    fixed = match["fixed"]
    tail = Fraction(int(cycle), 10 ** len(cycle) - 1) / 10 ** len(fixed)
    value = Fraction(f"{match['whole'] or 0}.{fixed or 0}") + tail
    return -value if match["sign"] == "-" else value


def spell_repeating(text: str) -> str:
    """The text with its repeating decimals as fractions, for grammars that have none."""
    if "\\overline" not in text and "\\bar" not in text and "\\dot" not in text:
        return text
    return _REPEATING_WITHIN.sub(_as_fraction, text)


def _as_fraction(match: re.Match[str]) -> str:
    value = _read_repeating(match)
    return f"(\\frac{{{value.numerator}}}{{{value.denominator}}})"


def _read_base(match: re.Match[str]) -> Fraction | None:
    base = int(match["base"] or match["b"])
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in match["digits"]):
        return None
    value = Fraction(int(match["digits"], base))
    return -value if match["sign"] else value


_READERS = (
    (_NUMBER, _read_number),
    (_FRACTION, _read_fraction),
    (_SLASH, _read_fraction),
    (_POWER_OF_TEN, _read_power_of_ten),
    (_REPEATING, _read_repeating),
    (_BASE, _read_base),
)
