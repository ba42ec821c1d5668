"""Splitting a text at its outermost level.

Pure string code in time linear in the text.
"""

import re
from collections.abc import Iterator

_BRACKETS = re.compile(r"\\[{}]|\\[lr]angle(?![a-z])|\\text\{[^{}]*\}|[()\[\]{}]")
_OPENING = {"(", "[", "{", "\\{", "\\langle"}


def enclosed(text: str, opening: str = "(", closing: str = ")") -> str | None:
    """Text between a pair of brackets around the whole text; None without such a pair."""
    if not text.startswith(opening) or not text.endswith(closing):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    if len(text) < len(opening) + len(closing):
        return None
    return inner if all(depth >= 0 for _, depth in bracket_depths(inner)) else None


def split_at(text: str, *marks: str) -> list[str]:
    """Pieces between marks outside all brackets; the whole text without a mark."""
    if not any(mark in text for mark in marks):
        return [text]
    pattern = re.compile("|".join(map(re.escape, marks)))
    return _pieces(text, pattern)


def split_words(text: str, word: str) -> list[str]:
    """Pieces between a word, bare or in `\\text{}`, outside all brackets."""
    if word not in text:
        return [text]
    pattern = re.compile(rf"\\text\{{ ?,? ?{word} ?\}}|(?<![A-Za-z\\]){word}(?![A-Za-z])")
    return _pieces(text, pattern)


def split_list(text: str) -> list[str]:
    """Items between commas, semicolons, `or` and `and` outside all brackets; none is empty."""
    items = [
        part.strip()
        for piece in split_at(text, ",", ";")
        for half in split_words(piece, "or")
        for part in split_words(half, "and")
    ]
    return [item for item in items if item]


def _pieces(text: str, pattern: re.Pattern[str]) -> list[str]:
    spans = [(match.start(), match.end()) for match in pattern.finditer(text)]
    if not spans:
        return [text]
    levels = list(bracket_depths(text))
    pieces = []
    start = place = depth = 0
    for begin, end in spans:
        while place < len(levels) and levels[place][0] <= begin:
            depth = levels[place][1]
            place += 1
        if depth == 0 and begin >= start:
            pieces.append(text[start:begin])
            start = end
    pieces.append(text[start:])
    return pieces


def bracket_depths(text: str) -> Iterator[tuple[int, int]]:
    """Bracket depth from each position on; half-open intervals count like other brackets."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        token = match.group()
        if not token.startswith("\\text"):
            depth += 1 if token in _OPENING else -1
            yield match.start(), depth


def group_end(text: str, start: int) -> int | None:
    """End of the group in brackets that begins at `start`; None when it does not end."""
    for place, depth in bracket_depths(text[start:]):
        if depth == 0:
            bracket = _BRACKETS.match(text, start + place)
            assert bracket is not None
            return bracket.end()
    return None
