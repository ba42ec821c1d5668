"""Residue classes: `x \\equiv 7 \\pmod{11}`, `7 \\pmod{11}`, `1, 3 (mod 8)`.

Runs in grading processes.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from verification.math.numbers import parse_number
from verification.math.split import split_at, split_words

_CONGRUENCE = re.compile(
    r"(?:(?P<name>[A-Za-z](?:_[0-9A-Za-z])?|[A-Za-z]\^[0-9]) ?(?:\\equiv|=) ?)?"
    r"(?P<residues>[^\\()]{1,60}|(?:[^\\()]|\\text\{(?:or|and)\}|\\equiv|\\pm){1,60}?) ?"
    r"(?:\\pmod ?(?:\{(?P<braced>[0-9]{1,12})\}|(?P<digit>[0-9]))"
    r"|\(?(?:\\b?mod(?![a-z])|\\text\{mod\}|(?<![A-Za-z])mod(?![a-z]))"
    r" ?\{?(?P<bare>[0-9]{1,12})\}?\)?)"
)


@dataclass(frozen=True)
class Congruence:
    """Classes of whole numbers by one modulus."""

    name: str
    residues: tuple[Fraction, ...]
    modulus: int

    def classes(self) -> Counter[Fraction]:
        """How often each least residue is named."""
        return Counter(residue % self.modulus for residue in self.residues)


def read_congruence(text: str) -> Congruence | None:
    """The congruence that a normalised text is; None when it is none."""
    if "mod" not in text:
        return None
    match = _CONGRUENCE.fullmatch(text)
    if match is None:
        return None
    modulus = int(match["braced"] or match["digit"] or match["bare"])
    items = [
        part.strip().removeprefix("\\equiv").strip()
        for piece in split_at(match["residues"], ",", ";")
        for half in split_words(piece, "or", "\\text{or}")
        for part in split_words(half, "and", "\\text{and}")
        if part.strip()
    ]
    if len(items) == 1 and items[0].startswith("\\pm"):
        items = [items[0][3:], f"-{items[0][3:].strip()}"]
    values = [parse_number(item.strip()) for item in items]
    known = tuple(value for value in values if value is not None and value.denominator == 1)
    if not known or len(known) < len(items) or modulus < 2:
        return None
    return Congruence(match["name"] or "", known, modulus)


def same_congruence(first: Congruence, second: Congruence) -> bool:
    """Whether two congruences name the same classes of the same unknown."""
    if first.name and second.name and first.name != second.name:
        return False
    return first.modulus == second.modulus and first.classes() == second.classes()
