"""Numbers in words: `seven`, `three quarters`, `5 million`.

Pure string code; runs in the verifier and its grading processes.
"""

import re
from decimal import Decimal
from fractions import Fraction

MAX_WORDS = 20
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SMALL = {word: k for k, word in enumerate(_ONES)}
SMALL |= {word: 10 * k for k, word in enumerate(_TENS, start=2)}
_GROUPS = {
    "thousand": 10**3, "lakh": 10**5, "lac": 10**5, "million": 10**6, "mln": 10**6,
    "crore": 10**7, "billion": 10**9, "bn": 10**9, "trillion": 10**12, "quadrillion": 10**15,
}  # fmt: skip
_COUNTS = {"dozen": 12, "doz": 12, "score": 20, "gross": 144}
_MULTIPLES = {"hundred": 100} | _GROUPS | _COUNTS
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12,
    "sixteenth": 16, "twentieth": 20, "hundredth": 100, "thousandth": 1000, "millionth": 10**6,
    "billionth": 10**9, "basis point": 10**4, "permille": 1000, "per mille": 1000,
}  # fmt: skip
NUMBER_WORDS = frozenset({*SMALL, *_MULTIPLES, *(f"{word}s" for word in _MULTIPLES), *_PARTS})
BASES = {word: value for word, value in SMALL.items() if 2 <= value <= 16}
_BASE_NAME = rf"(?P<base>{'|'.join(BASES)}|[0-9]{{1,2}})"
_DIGITS = r"(?<![0-9A-Za-z.,])(?P<open>\()?(?P<digits>[0-9][0-9A-F]{0,100})(?(open)\))"
_SUBSCRIPT_BASE = re.compile(
    rf"{_DIGITS} ?_ ?(?:\{{ ?(?:\\text\{{ ?)?\(?(?:base[ -]?\}}?)?{_BASE_NAME}\)? ?\}}? ?\}}"
    rf"|(?P<one>[0-9])|\\text\{{ ?(?:base[ -]?)?(?P<word>{'|'.join(BASES)}) ?\}})"
)
_NAMED_BASE = re.compile(
    rf"{_DIGITS}[ ,]{{0,2}}\(?(?:\\text\{{ ?)?\(?(?:in )?base[ }}-]{{1,2}}"
    rf"(?:\\text\{{)?{_BASE_NAME}"
    r"(?![0-9A-Za-z])[)}]{0,3}"
)

_ANY_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")
_LITERAL = (
    r"(?<![0-9A-Za-z.,_^/*\\])"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,60})(?:\.[0-9]{1,60})?)"
)
_FACTOR = re.compile(
    rf"(?:{_LITERAL})?(?<=[0-9)}}\]])(?:-| ?)(?P<mark>\\text\{{[ -]?)?"
    rf"(?i:(?P<multiple>{'|'.join(_MULTIPLES)})s?|(?P<part>{'|'.join(_PARTS)})(?P<plural>e?s)?)"
    r"(?![A-Za-z])(?: of(?= ))?(?(mark) ?(?P<end>\}?)|)"
)
_CURRENCY_FACTOR = re.compile(
    r"(?P<sign>\\\$ ?)(?P<digits>[0-9]{1,30}(?:\.[0-9]{1,30})?)"
    r" ?(?P<letter>[kKmMbB])n?(?![A-Za-z0-9_^])"
)
_CURRENCY_LETTERS = {"k": 10**3, "m": 10**6, "b": 10**9}
_AND_PART = re.compile(
    r"(?<![0-9A-Za-z.,])([0-9]{1,60}) ?\\text\{ ?and (?:a|an|one)[ -]"
    r"(half|third|quarter|fourth|fifth)(?![a-z]) ?(\}?)"
)


def spell_factors(text: str) -> str:
    """A text whose number words behind numbers are written out: `5 million` is 5000000."""
    if "\\$" in text:
        text = _CURRENCY_FACTOR.sub(_scale_currency, text)
    if not _ANY_WORD.search(text):
        return text
    text = _AND_PART.sub(_add_part, text)
    for _ in range(3):
        text, n_changes = _FACTOR.subn(_scale, text)
        if not n_changes:
            break
    return text


def spell_bases(text: str) -> str:
    """A text whose bases of numerals are subscripts in digits: `1011_{\\text{two}}` is `1011_2`."""
    for pattern in (_SUBSCRIPT_BASE, _NAMED_BASE):
        text = pattern.sub(_with_base, text)
    return text


def read_number_words(words: list[str]) -> tuple[Fraction, int] | None:
    """The number that words begin with, and its length in words; None without a number."""
    words = words[:MAX_WORDS]
    is_negative = words[:1] in (["minus"], ["negative"])
    start = int(is_negative)
    value, place = _read_whole(words, start)
    if place == start:
        place += words[place : place + 1] in (["a"], ["an"])
        part = _part_of(words[place : place + 1], 1)
        # A third is a part, third the one behind the second.
        if part is None or (place == start and words[place] != "half"):
            return None
        value, place = part, place + 1
    else:
        value, place = _add_fraction(words, value, place)
    return (-value if is_negative else value), place


def _add_fraction(words: list[str], value: Fraction, place: int) -> tuple[Fraction, int]:
    """Number and place behind `quarters`, `and a half` or `point five`, if they follow."""
    part = _part_of(words[place : place + 1], value)
    if part is not None:
        return value * part, place + 1
    following = words[place : place + 1]
    if following == ["point"]:
        digits = [SMALL.get(word, 10) for word in words[place + 1 :]]
        if digits and max(digits) < 10:
            return value + Fraction(int("".join(map(str, digits))), 10 ** len(digits)), len(words)
    if following == ["and"]:
        top, end = Fraction(1), place + 2
        if words[place + 1 : place + 2] not in (["a"], ["an"]):
            top, end = _read_whole(words, place + 1)
        part = _part_of(words[end : end + 1], top)
        if part is not None and end > place + 1:
            return value + top * part, end + 1
    return value, place


def _read_whole(words: list[str], place: int) -> tuple[Fraction, int]:
    """The whole number in words from a place, and the place behind it."""
    total, group, is_open, largest = 0, 0, False, 10**18
    while place < len(words):
        word = words[place]
        following = words[place + 1 : place + 2]
        if word in SMALL and _fits(group, SMALL[word], is_open=is_open):
            group, is_open = group + SMALL[word], True
        elif word in ("a", "an") and not is_open and not total and following[:1] != []:
            if following[0] not in _MULTIPLES:
                break
            group, is_open = 1, True
        elif word == "hundred" and is_open and 0 < group < 100:
            group *= 100
        elif word in _COUNTS and is_open and not total:
            return Fraction(group * _COUNTS[word]), place + 1
        elif word in _GROUPS and is_open and _GROUPS[word] < largest:
            largest = _GROUPS[word]
            total, group, is_open = total + group * largest, 0, False
        elif not (word == "and" and (group >= 100 or total) and _is_small(words, place + 1)):
            break
        place += 1
    return Fraction(total + group), place


def _fits(group: int, value: int, *, is_open: bool) -> bool:
    """Whether a small number continues a group: `twenty` `one`, `one hundred` `five`."""
    if not is_open:
        return True
    if group and group % 100 == 0:
        return value > 0
    return group >= 20 and group % 10 == 0 and group % 100 != 10 and 0 < value < 10


def _is_small(words: list[str], place: int) -> bool:
    is_part = place + 1 < len(words) and _part_of([words[place + 1]], Fraction(2)) is not None
    return place < len(words) and words[place] in SMALL and not is_part


def _part_of(words: list[str], count: Fraction | int) -> Fraction | None:
    """1/4 for `quarters`; the singular goes with one of them."""
    if not words:
        return None
    word = words[0]
    is_plural = word.endswith("s")
    bottom = _PARTS.get(word.removesuffix("s"))
    return Fraction(1, bottom) if bottom and is_plural == (count != 1) else None


def _scale(match: re.Match[str]) -> str:
    mark = match["mark"] if match["mark"] and not match["end"] else ""
    digits = (match["digits"] or "").replace(",", "")
    if match["multiple"]:
        factor = _MULTIPLES[match["multiple"].lower()]
        scaled = _written_out(digits, factor) if digits else f"*{factor}"
        return scaled + mark
    if not match["plural"] and digits != "1":
        return match.group()
    bottom = _PARTS[match["part"].lower()]
    return (f"\\frac{{{digits}}}{{{bottom}}}" if digits else f"*\\frac{{1}}{{{bottom}}}") + mark


def _with_base(match: re.Match[str]) -> str:
    name = match["base"] or match.groupdict().get("one") or match.groupdict().get("word") or "0"
    base = BASES[name] if name in BASES else int(name)
    return f"{match['digits']}_{{{base}}}" if base > 9 else f"{match['digits']}_{base}"


def _scale_currency(match: re.Match[str]) -> str:
    return match["sign"] + _written_out(match["digits"], _CURRENCY_LETTERS[match["letter"].lower()])


def _written_out(digits: str, factor: int) -> str:
    numerator, _, decimals = digits.partition(".")
    scaled = int(numerator + decimals) * factor
    text = str(Decimal(scaled).scaleb(-len(decimals)).__format__("f")) if decimals else str(scaled)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _add_part(match: re.Match[str]) -> str:
    mark = "" if match[3] else "\\text{"
    return f"{match[1]}\\frac{{1}}{{{_PARTS[match[2]]}}}{mark}"
