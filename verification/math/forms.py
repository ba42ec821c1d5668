"""Whether an answer is a number of the problem in another form than the one asked for.

Pure string code in time linear in the texts; runs in the verifier and its grading processes.
`\\frac38` occurs in "Write \\frac38 as a decimal", `321_4` in "Find the value of 321_4", and
3:30 PM in "Write 3:30 PM in 24-hour form".
"""

import math
import re
from fractions import Fraction

from verification.math.copied import MAX_PROBLEM_CHARS, stands_in
from verification.math.numbers import ClockTime, parse_colon, parse_hour, parse_number
from verification.math.text import normalise, without_marks
from verification.math.units import ANGLE, split_unit

_NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
_FORMS = (
    ("whole", re.compile(r"-?[0-9][0-9,]*")),
    ("decimal", re.compile(r"-?[0-9]*\.(?:[0-9]+|[0-9]*\\(?:overline|bar|dot) ?\{?[0-9]+\}?)")),
    ("fraction", re.compile(r"-?(?:\\frac\{-?[0-9]+\}\{[0-9]+\}|[0-9]+/[0-9]+)")),
    ("mixed", re.compile(r"-?[0-9]+(?: ?\\frac\{[0-9]+\}\{[0-9]+\}| [0-9]+/[0-9]+)")),
    ("scientific", re.compile(rf"-?(?:{_NUMBER}) ?[*x] ?10\^(?:\{{-?[0-9]+\}}|-?[0-9])")),
    ("base", re.compile(r"-?[0-9A-F]+_(?:\{[^{}]{1,9}\}|[0-9])")),
    ("ratio", re.compile(r"[0-9]+:[0-9]+")),
)
# Words of a problem that ask for a form; any of the last row ask for whichever the reference has.
_ASKED = {
    "decimal": r"decimal|divide|\\div|÷",
    "fraction": r"fraction|ratio|lowest|simplest|reduce|rational|\\frac\{m\}|m/n|p/q",
    "mixed": r"mixed",
    "scientific": r"scientific|standard (?:form|notation)|power of (?:10|ten)",
    "base": r"\bbase\b|binary|octal|hexadecimal",
    "whole": r"\bbase\b|decimal|binary|ordinary|whole number|integer",
    "percent": r"percent|\\?%",
    "ratio": r"ratio|lowest|simplest",
    "interval": r"interval",
}
_ASKED_ANY = r"\b(?:convert|express|write|rewrite|change|turn)\b"
_PLAIN_NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_CYCLE = re.compile(r"\\(?:overline|bar|dot) ?\{?([0-9]{1,40})\}?")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-z])")
_CLOCKS = re.compile(
    r"\b(?:24|12|twenty[- ]?four|twelve)[- ]?(?:hours?|h)\b|military|\b[ap]\.?m\b\.? (?:or|and)",
    re.I,
)


def is_other_form(first: str, second: str, problem: str) -> bool:
    """Whether an answer is a number of the problem in another form than the one asked for."""
    if not problem:
        return False
    (number, unit), (wanted, other_unit) = split_unit(first), split_unit(second)
    number, wanted = number.strip(), wanted.strip()
    if _is_other_clock(first, second, problem):
        return True
    form, other = form_of(number), form_of(wanted)
    form = "percent" if form and unit is not None and unit.dimension == "" else form
    other = "percent" if other and other_unit is not None and other_unit.dimension == "" else other
    is_interval = second[:1] in tuple("([") and second[-1] in ")]" and "," in second
    if is_interval and RELATION.search(first):
        return _asks(problem, "interval") and stands_in(first, problem)
    if other_unit is not None and other_unit.dimension == ANGLE and unit is None:
        return "\\pi" in first and stands_in(first, problem)
    if not form:
        return False
    is_same_number = parse_number(number) == parse_number(wanted)
    if is_same_number and (unit is not None or other_unit is not None):
        return False
    if unit is not None and form != "percent" and (other_unit is None or other_unit != unit):
        return _holds(problem, number)
    if form == other == "ratio":
        return _divisor(number) > _divisor(wanted) and _holds(problem, number)
    if form == "base" and other in ("base", "whole"):
        is_same_base = number.partition("_")[2] == wanted.partition("_")[2]
        return not is_same_base and _holds_numeral(problem, number)
    if not other or form == other or {form, other} == {"whole", "decimal"}:
        return False
    return _asks(problem, other) and _holds(problem, number)


def form_of(text: str) -> str:
    """Name of the form in which a number is written; empty for other text."""
    return next((name for name, pattern in _FORMS if pattern.fullmatch(text)), "")


def _divisor(ratio: str) -> int:
    return math.gcd(*(int(part[:18]) for part in ratio.split(":")))


def _asks(problem: str, form: str) -> bool:
    return re.search(f"{_ASKED[form]}|{_ASKED_ANY}", problem, re.IGNORECASE) is not None


def _holds(problem: str, number: str) -> bool:
    """Whether a problem contains a number, fractions with a slash or a bar."""
    text = _slashed(without_marks(normalise(problem[:MAX_PROBLEM_CHARS])))
    if _FORMS[0][1].fullmatch(number) or re.fullmatch(r"-?[0-9]*\.[0-9]+", number):
        value = abs(Fraction(number.replace(",", "")))
        found = _PLAIN_NUMBER.findall(text)
        return any(Fraction(one.replace(",", "")) == value for one in found)
    wanted = re.escape(_slashed(number))
    return re.search(rf"(?<![0-9.]){wanted}(?![0-9]|\.[0-9])", text) is not None


def _slashed(text: str) -> str:
    text = _CYCLE.sub(r"\\overline{\1}", text)
    return re.sub(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)


def _holds_numeral(problem: str, numeral: str) -> bool:
    """Whether a problem contains `1101_2`, or 1101 and a mention of bases."""
    if _holds(problem, numeral):
        return True
    text = problem[:MAX_PROBLEM_CHARS]
    digits = re.escape(numeral.partition("_")[0].lstrip("-"))
    is_bare = re.search(rf"(?<![0-9A-F.,_]){digits}(?![0-9A-F_]|[.,][0-9])", text) is not None
    return is_bare and re.search(_ASKED["base"], problem, re.IGNORECASE) is not None


def _is_other_clock(first: str, second: str, problem: str) -> bool:
    """Whether a time of the problem is given by another clock than the one asked for."""
    times = [parse_hour(text) or parse_colon(text) for text in (first, second)]
    if not all(isinstance(time, ClockTime) for time in times):
        return False
    time, other = times
    if bool(time.half) == bool(other.half) or not _CLOCKS.search(problem):
        return False
    minutes = f":{time.minutes:02}" if time.minutes else "(?::00)?"
    half = "" if time.minutes else r"(?:(?<=:00)| ?o'clock| ?[ap]\.? ?m)"
    return (
        re.search(rf"(?<![0-9:])0?{time.hours}{minutes}(?![0-9]){half}", problem, re.I) is not None
    )
