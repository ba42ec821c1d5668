"""Answers and pass rates as rows write them: lists, placeholders, rates in text.

Pure and linear in the texts; used by all readers of rows.
"""

import math
import re
from typing import Any

_MAX_CHARS = 60
"""Of a placeholder or an empty label."""
MAX_ANSWERS = 64
"""Accepted answers of one question: each costs a comparison."""
_NO_LABEL = ("n/a", "null", "nan", "proof", "notfound", "not found")
"""Texts that stand for no answer to a mathematical problem: NuminaMath has the last three."""
_LAYOUT = re.compile(
    r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|left|right|displaystyle)(?![A-Za-z])"
    r"|\\[ ,;:!()\[\]]|[\s\u200b-\u200d\u2060\ufeff{}()\[\]$.,;:!?~]"
)
"""What of a text is layout alone: a label of nothing else, as `[]` or `\\boxed{}`, is empty."""
_ITEM = re.compile(
    r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|(-?[0-9]+(?:\.[0-9]+)?))\s*(,|\Z)""", re.S
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[nrt](?![A-Za-z])|([\\\"'/]))")
_SPACES = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}


def texts_of_list(text: str) -> list[str] | None:
    """The texts of a JSON or Python list of texts, as `["7/2", '3.5', 3.5]`; None for another text.

    A list without a text, such as the interval [1, 2] or a matrix, is one answer.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    inner, place = text[1:-1].strip(), 0
    found: list[str] = []
    has_text = False
    while place < len(inner):
        item = _ITEM.match(inner, place)
        if item is None:
            return None
        is_number = item[3] is not None
        has_text |= not is_number
        written = item[1] if item[1] is not None else item[2]
        found.append(item[3] if is_number else _with_pairs(_ESCAPE.sub(_unescaped, written)))
        place = item.end()
    return found if has_text or not found else None


def _unescaped(escape: re.Match[str]) -> str:
    # Any other backslash is LaTeX that was written without an escape, as in "\frac{7}{2}".
    if escape[1]:
        return chr(int(escape[1], 16))
    return escape[2] or _SPACES[escape[0]]


def _with_pairs(text: str) -> str:
    r"""The text, in which a surrogate pair, as JSON spells an emoji, is one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def accepted_answers(value: Any, *, reads_text: bool, is_math: bool) -> list[str]:
    """The different accepted answers of a row, without empty ones.

    Raises ValueError for too many, and for a number that is too large to be read exactly.

    value: a text, a number or a list of these. reads_text: a text may be a list of texts.
    """
    listed = texts_of_list(value) if reads_text and isinstance(value, str) else None
    values = value if isinstance(value, list) else [value] if listed is None else listed
    if any(isinstance(one, float) and math.isinf(one) for one in values):
        raise ValueError('the answer is a number beyond 1e308: write it as text, as "10^400"')
    texts = (str(one) for one in values if one is not None)
    found = list(dict.fromkeys(text for text in texts if not _is_empty(text, is_math=is_math)))
    if len(found) > MAX_ANSWERS:
        raise ValueError(f"there are {len(found)} accepted answers; allowed are {MAX_ANSWERS}")
    return found


def _is_empty(text: str, *, is_math: bool) -> bool:
    """Whether a text is no answer."""
    text = text.strip()
    if not text or not is_math or len(text) > _MAX_CHARS:
        return not text
    return text.casefold() in _NO_LABEL or not _LAYOUT.sub("", text)


# --- placeholders ---------------------------------------------------------------------------------

_BRACKETS = "[](){}<>_*$ .\n\t"
_WORDS = {"placeholder", "todo", "tbd", "fixme", "to be filled", "to be filled in", "fill me in"}
_NAMES = {"question", "problem", "prompt", "answer", "solution", "ground_truth", "ground truth",
          "expected_answer", "final answer", "your answer", "answer here", "your answer here",
          "insert answer", "insert question"}  # fmt: skip
_MARK = re.compile(r"(?<![\\A-Za-z}])\{\{?\s?(?:question|problem|problem_statement)\s?\}")


def is_placeholder(text: str) -> bool:
    """Whether a text stands for one that a script should have filled in."""
    if len(text) > _MAX_CHARS:
        return False
    bare = text.strip(_BRACKETS).casefold()
    bare = bare.removesuffix(" placeholder").removeprefix("placeholder ").removeprefix("insert ")
    is_marked = text.strip()[:1] in "[{<" and text.strip()[-1:] in "]}>"
    return bare in _WORDS or (is_marked and bare in _NAMES)


def has_placeholder(question: str) -> bool:
    """Whether a question is a placeholder, or a template that nobody filled in."""
    return is_placeholder(question) or _MARK.search(question) is not None


# --- pass rates -----------------------------------------------------------------------------------

UNKNOWN_RATES = ("", "n/a", "na", "none", "null", "nan", "unknown", "-")
_FRACTION = re.compile(r"([0-9]{1,9})\s?/\s?([0-9]{1,9})")
_NUMBER = re.compile(
    r"([0-9]{1,9}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(e[+-]?[0-9]{1,2})?\s?(%?)", re.I
)


def read_rate(value: Any) -> float | None:
    """The pass rate of a number or of text as "5/8", "0.25" or "62%"; None: unknown, as "n/a".

    Raises ValueError for anything else.
    """
    rate = _rate_of_text(value.strip()) if isinstance(value, str) else value
    if rate is None or rate != rate:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f'{value!r}; expected 0 to 1, "5/8", "62%" or "n/a"')
    return float(rate)


def _rate_of_text(text: str) -> Any:
    if text.casefold() in UNKNOWN_RATES:
        return None
    if fraction := _FRACTION.fullmatch(text):
        right, samples = int(fraction[1]), int(fraction[2])
        return right / samples if samples else None if not right else text
    if number := _NUMBER.fullmatch(text):
        return float(number[1] + (number[2] or "")) / (100 if number[3] else 1)
    return text
