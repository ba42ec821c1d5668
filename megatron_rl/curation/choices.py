"""Finds the lettered choices at the end of a question, and takes question and choices apart.

Pure string code. Choices are three or more in alphabetical order from A, all marked alike, `(A)`
(also in \\textbf, \\text and the like), or `A)`, `A.`, `A:` behind a space; or two of those that
begin lines.
"""

import re
from typing import NamedTuple

_STYLE = r"(?:\\(?:textbf|textrm|text|mathbf|mathrm|bf|rm)\s*\{\s*)"


def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Marks in parentheses, and those of a list; one group of each match is the letter."""
    marked = (
        rf"{_STYLE}\(({letters})\)\s*\.?(?:\\\s|~|\s)*\}}|\{{\s*\\bf\s*\(({letters})\)\s*\}}"
        rf"|\({_STYLE}({letters})\}}\)|(?<![\w)])\(({letters})\)(?!\w)"
    )
    listed = (
        rf"(?:(?<=\s)|(?<=^)|(?<=\$))(?:{_STYLE}({letters})[.):]\s*\}}|({letters})[.):](?=\s|\$))"
    )
    return re.compile(marked), re.compile(listed, re.MULTILINE)


_UPPER, _LOWER = _patterns("[A-J]"), _patterns("[a-j]")
_GAP = r"(?:\\(?:q?quad|hfill|hspace\*?\{[^{}]*\}|newline|item|[ ,;:!])|\\\\|[~&;,]|\s)+"
_GAP_BEFORE = re.compile(rf"^{_GAP}")
_GAP_BEHIND = re.compile(rf"{_GAP}$")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:enumerate|itemize|tabular|array|choices)\}\S*")
_DOLLAR = re.compile(r"(?<!\\)\$")


class Asked(NamedTuple):
    """A question of its own, and the texts of its choices."""

    stem: str
    choices: dict[str, str]
    """By letter."""


def find_choices(question: str, *, is_lower: bool = False) -> Asked | None:
    """What is asked and what there is to choose from; None where no choices are found.

    is_lower: marks are small letters, which number the parts of a problem as well. A choice is
    empty where its text cannot be told from what surrounds it.
    """
    for pattern in _LOWER if is_lower else _UPPER:
        marks = _last_sequence(question, pattern)
        begins_lines = all(_begins_line(question, mark) for mark in marks)
        if len(marks) >= 3 or (len(marks) == 2 and begins_lines):
            return _take_apart(question, marks)
    return None


def _last_sequence(question: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The marks A, B, ... that begin at the last A from which there is a B."""
    marks = list(pattern.finditer(question))
    letters = [next(letter for letter in mark.groups() if letter).upper() for mark in marks]
    found: list[re.Match[str]] = []
    for start in [place for place, letter in enumerate(letters) if letter == "A"]:
        count = 0
        while start + count < len(marks) and letters[start + count] == "ABCDEFGHIJ"[count]:
            count += 1
        # A letter out of order behind them is a mention, and makes their texts unclear.
        if count >= 2 and start + count == len(marks):
            found = marks[start:]
    return found


def _begins_line(question: str, mark: re.Match[str]) -> bool:
    return not question[question.rfind("\n", 0, mark.start()) + 1 : mark.start()].strip(" $")


def _take_apart(question: str, marks: list[re.Match[str]]) -> Asked:
    stem = question[: marks[0].start()]
    # An odd dollar opens a formula that holds the choices.
    in_formula = len(_DOLLAR.findall(stem)) % 2 == 1
    if in_formula:
        opening = list(_DOLLAR.finditer(stem))[-1].start()
        is_clean = not _trimmed(stem[opening + 1 :])
        stem = stem[:opening] if is_clean else ""
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    choices = {}
    for letter, mark, end in zip("ABCDEFGHIJ", marks, ends, strict=False):
        text = question[mark.end() : end]
        is_last = end == len(question)
        choices[letter] = _text_of(text, is_last=is_last, in_formula=in_formula)
    return Asked(_trimmed(_ENVIRONMENT.sub(" ", stem)).strip(), choices)


def _text_of(text: str, *, is_last: bool, in_formula: bool) -> str:
    """A choice without what surrounds it; empty where text follows that is none of it."""
    text = _trimmed(_ENVIRONMENT.sub(" ", text))
    if is_last and "\n" in text.strip():
        return ""
    if in_formula:
        parts = [_trimmed(part) for part in _DOLLAR.split(text)]
        return parts[0] if not any(parts[1:]) else ""
    if len(_DOLLAR.findall(text)) == 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = text.removesuffix(".") if not text.endswith("..") else text
    return text if len(_DOLLAR.findall(text)) % 2 == 0 else ""


def _trimmed(text: str) -> str:
    return _GAP_BEHIND.sub("", _GAP_BEFORE.sub("", text.strip())).strip()
