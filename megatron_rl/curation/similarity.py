"""When two questions are nearly the same: words by shingles, numbers by equality.

Pure. Layout does not count: case, spacing, dollars, braces, LaTeX's spaces and sizes, punctuation,
and some synonyms of instructions. Two texts are near duplicates when

- the Jaccard index of their shingles (single tokens and pairs of neighbours) is at least a
  threshold: one changed word of n different ones leaves about (2n - 4) / (2n + 2), so 0.73 for 10;
- and all that decides about the answer is equal: numbers (as digits or words), operators, LaTeX
  functions and relations, and words of DIRECTIONS (maximum or minimum, even or odd). Problems that
  differ in numbers alone are therefore no duplicates, however long they are.
"""

import re
import unicodedata
from typing import NamedTuple

import numpy as np
import xxhash

_LAYOUT = re.compile(
    r"\\(?:q?quad|left|right|displaystyle|limits|[bB]igg?[lr]?|text|textbf|textit|mathrm|mbox"
    r"|mathbf|mathbb|operatorname|[lc]?dots"
    r"|hspace\{[^{}]*\}|[ ,;:!()\[\]])(?![a-z])|\\\\|[~${}]"
)
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,|\\,)(?=\d{3}(?!\d))")
_TOKEN = re.compile(
    r"\d+(?:\.\d+)?|\\[a-z]+|[^\W\d_]+(?:'[a-z]+)?|(?<=[\d)])!|(?<=\b[a-z])!|[-+*/^=<>%|_&]"
)
_SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\times": "*", "\\cdot": "*", "\\ast": "*",
    "\\div": "/", "\\le": "\\leq", "\\ge": "\\geq", "\\leqslant": "\\leq", "\\geqslant": "\\geq",
    "\\ne": "\\neq", "\\lt": "<", "\\gt": ">", "\\%": "%", "\\to": "\\rightarrow",
    "compute": "find", "calculate": "find", "evaluate": "find", "determine": "find",
    "greatest": "maximum", "largest": "maximum", "max": "maximum", "maximal": "maximum",
    "highest": "maximum", "biggest": "maximum", "smallest": "minimum", "least": "minimum",
    "min": "minimum", "minimal": "minimum", "lowest": "minimum", "fewest": "minimum",
    "zero": "0", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "twenty": "20",
    "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "hundred": "100",
    "thousand": "1000",
}  # fmt: skip
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "—": " ", "×": "*", "·": "*", "÷": "/", "≤": "<=", "≥": ">="}
)
DIRECTIONS = frozenset(
    "maximum minimum even odd positive negative sum difference product quotient more less fewer "
    "not without before after increasing decreasing inside outside except half twice double triple "
    "most median mean mode mod modulo perimeter area volume".split()
)
"""Words on which the answer hangs: another one is another problem."""


class Fingerprint(NamedTuple):
    """What of a question is compared."""

    shingles: np.ndarray
    """[shingles] uint64, sorted, each once: digests of tokens and of pairs of neighbours."""
    numbers: tuple[str, ...]
    """In the order of the text."""
    decisive: frozenset[str]
    """Operators, LaTeX commands and DIRECTIONS that it has."""


def tokens_of(text: str) -> list[str]:
    """Words, numbers, operators and LaTeX commands of a text, synonyms as one."""
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS).casefold()
    # Commands of layout may touch a word that follows (\quad x), so a space takes their place.
    plain = _LAYOUT.sub(" ", _GROUPS.sub("", text))
    return [_SAME.get(token, token) for token in _TOKEN.findall(plain)]


def fingerprint(text: str) -> Fingerprint:
    """What of a question is compared with others."""
    tokens = [_as_number(token) for token in tokens_of(text)]
    pairs = {f"{first} {second}" for first, second in zip(tokens, tokens[1:], strict=False)}
    digests = {xxhash.xxh3_64_intdigest(shingle.encode()) for shingle in pairs | set(tokens)}
    return Fingerprint(
        np.array(sorted(digests), np.uint64),
        tuple(token for token in tokens if token[0].isdigit()),
        frozenset(t for t in tokens if t in DIRECTIONS or not (t[0].isalpha() or t[0].isdigit())),
    )


def _as_number(token: str) -> str:
    """3 for 3.0 and 03; any other token as it is."""
    if not token[0].isdigit():
        return token
    whole, _, part = token.partition(".")
    part = part.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{part}" if part else "")


def jaccard(one: Fingerprint, other: Fingerprint) -> float:
    """Common shingles over all shingles; 0 for two texts without any."""
    common = len(np.intersect1d(one.shingles, other.shingles, assume_unique=True))
    return common / max(1, len(one.shingles) + len(other.shingles) - common)


def key_of(known: Fingerprint, *, ordered: bool) -> np.uint64:
    """A digest of what `decides_alike` compares: equal where that is true."""
    numbers = known.numbers if ordered else sorted(known.numbers)
    text = "\0".join([*numbers, "", *sorted(known.decisive)])
    return np.uint64(xxhash.xxh3_64_intdigest(text.encode()))


def decides_alike(one: Fingerprint, other: Fingerprint, *, ordered: bool) -> bool:
    """Whether numbers and decisive tokens are equal. ordered: numbers in the same order, too."""
    if one.decisive != other.decisive:
        return False
    if ordered:
        return one.numbers == other.numbers
    return sorted(one.numbers) == sorted(other.numbers)
