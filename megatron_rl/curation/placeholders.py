"""Takes numbers, formulas and code out of a text before it is translated, and puts them back.

Pure. Each piece becomes a sign such as ⟦3⟧, which a translator is to leave alone and may move. What
comes back is taken only if every sign is there exactly once, nothing of the kind was added, and the
whole text has the same pieces, byte for byte, as the source.
"""

import re
from collections import Counter
from typing import NamedTuple

OPEN, CLOSE = "⟦", "⟧"
# Bounded, so that a text of openings takes no quadratic time; of a longer formula every number and
# command is a piece by itself.
_PIECE = re.compile(
    r"```.{0,4000}?```"
    r"|`[^`\n]+`"
    r"|\\begin\{(?P<name>[A-Za-z]+\*?)\}.{0,4000}?\\end\{(?P=name)\}"
    r"|(?<!\\)\$\$.{1,4000}?(?<!\\)\$\$"
    # As in pandoc, so that "$5 and $7" are prices: no space inside, no digit behind.
    r"|(?<!\\)\$(?=\S)(?:\\.|[^$\\])*?(?<=\S)\$(?!\d)"
    r"|\\\(.{1,2000}?\\\)|\\\[.{1,4000}?\\\]"
    r"|https?://[!-~]+"
    r"|\\[A-Za-z]+\*?|\\."
    r"|\$?[-\u2212+]?\d+(?:[.,:/]\d+)*\s?%|\$?[-\u2212+]?\d+(?:[.,:/]\d+)*"
    # Signs of formulas that stand alone: ASCII, superscripts, fractions, operators.
    r"|[$^_=<>+*/|\u00b1-\u00b3\u00b9\u00bc-\u00be\u00d7\u00f7\u2070-\u209c\u2150-\u218b\u2200-\u22ff]",
    re.DOTALL,
)
_SIGN = re.compile(f"{OPEN}(\\d{{1,6}}){CLOSE}", re.ASCII)
_BRACES = re.compile(r"[{}]")


class Protected(NamedTuple):
    """A text to be translated, and what was taken out of it."""

    text: str
    pieces: tuple[str, ...]
    """By the number of the sign."""


class Restored(NamedTuple):
    """A translation with its pieces, or why it is refused."""

    text: str = ""
    refusal: str = ""


def protect(text: str) -> Protected | None:
    """The text with signs in place of pieces; None if it has such signs of its own."""
    if OPEN in text or CLOSE in text:
        return None
    pieces: list[str] = []

    def take(found: re.Match[str]) -> str:
        pieces.append(found[0])
        return f"{OPEN}{len(pieces) - 1}{CLOSE}"

    return Protected(_PIECE.sub(take, text), tuple(pieces))


def restore(source: str, protected: Protected, translated: str) -> Restored:
    """The translation of `source` with its pieces in their places."""
    numbers = Counter(int(number) for number in _SIGN.findall(translated))
    expected = Counter(range(len(protected.pieces)))
    if expected - numbers:
        return Restored(refusal="placeholder_lost")
    if numbers - expected:
        return Restored(refusal="placeholder_added")
    rest = _SIGN.sub(" ", translated)
    if OPEN in rest or CLOSE in rest:
        return Restored(refusal="placeholder_broken")
    if any(sign.isnumeric() and not sign.isalpha() for sign in rest):
        return Restored(refusal="number_added")
    plain = _SIGN.sub(" ", protected.text)
    is_braced_alike = sorted(_BRACES.findall(rest)) == sorted(_BRACES.findall(plain))
    if _PIECE.search(rest) or "\\" in rest or "`" in rest or not is_braced_alike:
        return Restored(refusal="formula_added")
    # By number, and not by str.replace: a piece may look like a sign.
    text = _SIGN.sub(lambda found: protected.pieces[int(found[1])], translated)
    if pieces_of(text) != pieces_of(source):
        return Restored(refusal="pieces_run_together")
    return Restored(text)


def pieces_of(text: str) -> Counter[str]:
    """Numbers, formulas and code of a text, with how often each is there."""
    return Counter(found[0] for found in _PIECE.finditer(text))
