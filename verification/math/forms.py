"""Whether an answer is a number of the problem in another form than the one asked for.

Pure string code in time linear in the texts; runs in the verifier and its grading processes.
`\\frac38` occurs in "Write \\frac38 as a decimal", `321_4` in "Find the value of 321_4", and
3:30 PM in "Write 3:30 PM in 24-hour form".
"""

import math
import re
from fractions import Fraction

from verification.math.copied import MAX_PROBLEM_CHARS, stands_in
from verification.math.number_words import BASES
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
_NUMERAL = re.compile(
    r"(?P<digits>-?[0-9A-F]{1,100})(?:_(?:\{(?P<base>[0-9]{1,2})\}|(?P<one>[0-9])))?"
)
# Starts with a digit: a_{12} and A_{12} are two names.
_LETTERED_NUMERAL = re.compile(r"[0-9][0-9A-F]{1,99}_\{1[1-6]\}")
_BASE_WORDS = {"binary": 2, "octal": 8, "hexadecimal": 16, "decimal": 10} | BASES
_BASE = (
    r"(?:base[ -]?[$(]?(?P<base>[0-9]{1,2}|[a-z]{3,8})(?![0-9A-Za-z])"
    r"|(?P<name>binary|octal|hexadecimal|decimal))"
)
_INTO_BASE = re.compile(rf"(?<![a-z])(?:in|to|into|as)(?: an?| its)? {_BASE}", re.IGNORECASE)
_ANY_BASE = re.compile(rf"(?<![a-z]){_BASE}|(?<=[0-9])_\{{?(?P<index>[0-9]{{1,2}})", re.IGNORECASE)
_WANTED = re.compile(
    r"(?<![a-z])(?:express|write|convert|give|represent|state|leave|compute|find|answer|simplify"
    r"|calculate|evaluate|add|subtract|multiply|what is)(?![a-z])[^.?!;]{0,150}$",
    re.IGNORECASE,
)
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


def is_in_named_base(answer: str, reference: str, problem: str) -> bool:
    """Whether one of two equal numerals lacks the base that the problem asks for.

    A reference without its base may be an ordinary number: then the problem may name no other
    base, and may not hold that number in the base that it names.
    """
    if not problem or ("_" in answer) == ("_" in reference):
        return False
    numerals = _NUMERAL.fullmatch(answer), _NUMERAL.fullmatch(reference)
    if numerals[0] is None or numerals[1] is None or numerals[0]["digits"] != numerals[1]["digits"]:
        return False
    written = numerals[0] if "_" in answer else numerals[1]
    base, digits = int(written["base"] or written["one"]), written["digits"].lstrip("-")
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in digits):
        return False
    problem = problem[:MAX_PROBLEM_CHARS]
    wanted = [match for match in _INTO_BASE.finditer(problem) if _base_of(match) == base]
    if written is numerals[1] or not wanted:
        return bool(wanted)
    if {_base_of(match) for match in _ANY_BASE.finditer(problem)} != {base}:
        return False
    is_asked = any(_WANTED.search(problem[: match.start()]) for match in wanted)
    return is_asked and not _holds_value(problem, digits, base)


def are_numerals_in_two_cases(first: str, second: str) -> bool:
    """Whether two texts are one numeral with small and with capital letters: 2b_{16}, 2B_{16}."""
    upper = first.upper()
    return upper == second.upper() and _LETTERED_NUMERAL.fullmatch(upper) is not None


def _base_of(match: re.Match[str]) -> int:
    name = (match["name"] or match["base"] or match["index"]).lower()
    return int(name) if name.isdecimal() else _BASE_WORDS.get(name, 0)


def _holds_value(problem: str, digits: str, base: int) -> bool:
    """Whether a problem contains, in a base, the number that digits are in base ten."""
    if not digits.isdecimal():
        return False
    numerals = re.findall(r"(?<![0-9A-Za-z])[0-9][0-9A-F]{0,99}", problem)
    fitting = [one for one in numerals if all(int(digit, 16) < base for digit in one)]
    return any(int(one, base) == int(digits) for one in fitting)


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
