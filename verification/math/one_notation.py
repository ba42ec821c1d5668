"""Two normalised texts, of which one is rewritten in the notation of the other.

Pure string code in time linear in the texts; runs in the verifier and its grading processes. Each
rule looks at both texts, so a text alone keeps its reading: `50\\Omega` is a product, unless the
other text has ohms.
"""

import re

from verification.math.number_words import SMALL, read_number_words

_NUMBER = r"-?[0-9][0-9.,/]{0,40}|-?\\frac\{[0-9]{1,20}\}\{[0-9]{1,20}\}"
_SIGN = r"(?:\\[lg]e(?![A-Za-z])|[<>])"
_BOUND = re.compile(rf"{_SIGN} ?[^<>=,;]{{1,60}}")
_NAMED_BOUND = re.compile(
    rf"([A-Za-z]) ?{_SIGN} ?(?![^<>]*\\(?:[lg]e|ne)(?![a-z]))[^<>=,;]{{1,60}}"
)
_BOUND_SIGNS = {
    "at least": "\\ge ", "no less than": "\\ge ", "no fewer than": "\\ge ", "at most": "\\le ",
    "no more than": "\\le ", "more than": ">", "greater than": ">", "less than": "<",
    "fewer than": "<",
}  # fmt: skip
_BOUND_IN_WORDS = re.compile(
    rf"(?:\\text\{{ ?)?(?P<words>{'|'.join(_BOUND_SIGNS)})[ }}]{{0,2}}(?P<value>{_NUMBER}) ?\}}?"
)
_ESTIMATE = re.compile(
    rf"(?:\\text\{{ ?)?(?:approximately|approx\.?|about|roughly)[ }}]{{0,2}}({_NUMBER}) ?\}}?"
)
_OHM = re.compile(r"(?<=[0-9]) ?(k|\\text\{ ?k ?\})? ?\\Omega$")
_MICROMETER = re.compile(r"(?<=[0-9]) ?\\mu ?(?:\\text\{ ?m ?\}|m)$")
_SETS = re.compile(r"[A-Z](?: ?\\(cup|cap) ?[A-Z]){1,9}")
_MARKS = re.compile(r"\\text ?\{|[{}]")
_MONTHS = (
    "january february march april may june july august september october november december"
).split()
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)}|{'|'.join(month[:3] for month in _MONTHS)}|sept)\.?"
_YEAR = r"(?:,? (?P<year>[0-9]{4}))?"
_DATES = (
    re.compile(rf"(?:the )?(?P<day>[0-9]{{1,2}})(?: of)? {_MONTH}{_YEAR}"),
    re.compile(rf"{_MONTH}(?: the)? (?P<day>[0-9]{{1,2}}){_YEAR}"),
)
_MAX_CHARS = 120
_IRREGULAR_ORDINALS = {
    "first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight",
    "ninth": "nine", "twelfth": "twelve",
}  # fmt: skip
_ORDINALS = (
    {f"{word}th": word for word in SMALL if not word.endswith("ty")}
    | {f"{word[:-1]}ieth": word for word in SMALL if word.endswith("ty")}
    | _IRREGULAR_ORDINALS
)
_ORDINAL_IN_DIGITS = re.compile(
    r"[0-9]{1,9} ?(?:\^ ?)?\{? ?(?:\\(?:text|mathrm) ?\{ ?)?(?:st|nd|rd|th) ?\}{0,2}"
)


def in_one_notation(first: str, second: str) -> tuple[str, str]:
    """Both texts; where a rule knows that they write one thing in two ways, in one of the ways."""
    if max(len(first), len(second)) > _MAX_CHARS:
        return first, second
    dates = _date_in(first), _date_in(second)
    if dates[0] and dates[1]:
        return dates[0], dates[1]
    return _as_other(first, second), _as_other(second, first)


def _as_other(text: str, other: str) -> str:
    """The text as the other one writes it."""
    if named := _NAMED_BOUND.fullmatch(other):
        bound = _spell_bound(text)
        return f"{named[1]}{bound}" if _BOUND.fullmatch(bound) else text
    if _BOUND.fullmatch(other):
        return _spell_bound(text)
    if other.startswith("\\approx") and (estimate := _ESTIMATE.fullmatch(text)):
        return f"\\approx {estimate[1]}"
    if text.endswith("\\Omega") and "ohm" in other:
        return _OHM.sub(lambda sign: f"\\text{{{'kilo' if sign[1] else ''}ohm}}", text)
    if "\\mu" in text and "micromet" in other:
        return _MICROMETER.sub(r"\\text{micrometer}", text)
    if (sets := _SETS.fullmatch(text)) and _SETS.fullmatch(other):
        return _in_order(text, sets[1])
    return text


def _spell_bound(text: str) -> str:
    bound = _BOUND_IN_WORDS.fullmatch(text)
    return f"{_BOUND_SIGNS[bound['words']]}{bound['value']}" if bound else text


def _in_order(text: str, operation: str) -> str:
    """A union, or an intersection, of sets with names, in the order of the names."""
    other = "cap" if operation == "cup" else "cup"
    names = sorted(part.strip() for part in text.split(f"\\{operation}"))
    return text if other in text else f"\\{operation} ".join(names)


def _date_in(text: str) -> str:
    flat = " ".join(_MARKS.sub(" ", text).lower().split())
    for pattern in _DATES:
        date = pattern.fullmatch(flat)
        if date:
            day = str(int(date["day"]))
            return f"\\text{{{date['month'][:3]} {day} {date['year'] or ''}}}"
    return ""


def with_ordinal(text: str, other: str) -> str:
    """A text before normalisation; an ordinal in words as a number if the other has digits.

    `first` is `1st`, but no number: `twelfth` is not 12.
    """
    words = _MARKS.sub(" ", text[:_MAX_CHARS]).lower().replace("-", " ").split()
    words = words[1:] if words[:1] == ["the"] else words
    if not words or words[-1] not in _ORDINALS or not _ORDINAL_IN_DIGITS.fullmatch(other):
        return text
    words[-1] = _ORDINALS[words[-1]]
    number = read_number_words(words)
    is_whole = number is not None and number[1] == len(words) and number[0].denominator == 1
    return str(number[0]) if number is not None and is_whole else text
