"""Lettered choices: `(B)`, `B. 7`, `Option B`, `A and C`; and words that retract an answer.

Pure string code; runs in the verifier and its grading processes.
"""

import re
from typing import NamedTuple

_MARKED = re.compile(
    r"(?:\\text\{ ?)?(?:(?i:option|choice|answer)(?:\\?[: }]| is)*)?\(([A-J])\)\}?[.:]? ?(.*)",
    re.DOTALL,
)
_NAMED = re.compile(
    r"(?:\\text\{ ?)?(?i:option|choice|answer)[: }]{1,3}([A-J])\}? ?(.*)", re.DOTALL
)
_LISTED = re.compile(r"([A-J])(?:\)|\.(?![0-9])|:) ?(.*)", re.DOTALL)
_LONE = re.compile(r"\(([a-j])\)|([A-J])")
_STATED = re.compile(r"(?:\\text\{ ?)?(?:(?i:option|choice) ?(?=[ (]|(?<= )))?\(?([A-J])\)?\}? ?")
_CONFIRMED = re.compile(
    r"(?:\\text\{)? ?is (?:the )?"
    r"(?:(?:correct|right|true|best)(?: (?:answer|choice|option))?|answer|choice|option)[.}]{0,2}"
)
_TEXT = re.compile(r"-?[0-9.]|\\(?!le|ge|ne|in|cup|cap|pm|mp|to|set)[A-Za-z$]|[A-Za-z(\[{]")
# Text behind a letter that makes it another answer than the letter: at the start, anywhere.
_TURNED = re.compile(
    r"(?:\\text\{)? ?(?:[A-J](?![A-Za-z])[).:,;/&}]{0,3}$"
    r"|(?i:is|isn't|are|was|wasn't|or|and|but|nor|then|versus|vs|else|either|instead|if|unless)(?![A-Za-z])"
    r"|(?i:not (?!enough (?:info|data)|possible|defined|determin|an? |prime))"
    r"|(?i:can(?:not|'t) be (?:the|right|correct|true)))"
)
_TAKEN_BACK = re.compile(
    r"\([A-J]\)|\?\}?$"
    r"|(?<![A-Za-z])(?i:or|not|nor)[ }]{1,3}(?:\\text\{ ?)?(?i:option |choice )?[A-J](?![A-Za-z])"
)
_DOUBTS = frozenset(
    "maybe perhaps possibly probably likely presumably guess unsure uncertain wrong incorrect "
    "never".split()
)
_LETTER = r"(?:(?i:option|choice) )?\(?[A-J]\)?"
_SEVERAL = re.compile(rf"{_LETTER}(?:(?: ?, ?(?:and ?)?| ?and ?| ?& ?){_LETTER})+")
_ONE_LETTER = re.compile(r"(?<![A-Za-z])[A-J](?![A-Za-z])")
_JOINED = re.compile(r"(?:\\text\{ ?)?([A-J](?: ?[A-J]){1,9}) ?\}?")
_OFFERED = re.compile(
    r"\(A\).{1,2000}?\(B\)|(?<![A-Za-z])A[.):].{1,2000}?(?<![A-Za-z])B[.):]", re.DOTALL
)
_LISTED_MARK = re.compile(
    r"(?:\\(?:textbf|text|mathrm|mathbf|bf) ?\{ ?)?"
    r"(?:\(([A-J])\)|(?<![A-Za-z(\\])([A-J])[.):](?=[\s\\}$]))(?:[.:]? ?\})?"
)
_CHOICE_LAYOUT = re.compile(r"\\(?:qquad|quad)(?![A-Za-z])|\\[ ,;:!]|~")
MAX_PROBLEM_CHARS = 20_000
_BLANKS = re.compile(r" {2,}")
_HEDGE = re.compile(
    r"(?<![\\A-Za-z])(?P<word>approximately|approx|roughly|nearly|almost|circa|maybe|perhaps"
    r"|possibly|probably|likely|presumably|guess|unsure|uncertain|more|less|fewer|at least"
    r"|at most|not|never|cannot|except|other than|anything but|or so|ish|wrong|incorrect)"
    r"(?![A-Za-z])"
    r"|(?P<negation>[A-Za-z]n't)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])(?P<relation>over|under|above|below|beyond|around|about|between|up to"
    r"|within)[ }]{1,3}[$\\(-]{0,3}[0-9.]",
    re.IGNORECASE,
)


class Choice(NamedTuple):
    """A lettered choice, with the text that follows the letter."""

    letter: str
    text: str


class Choices(NamedTuple):
    """Several lettered choices that all hold."""

    letters: frozenset[str]


def read_choice(text: str) -> Choice | Choices | None:
    """The choice or choices that a normalised text names; None when it names none.

    `(C) or (D)`, `(C) is wrong` and the like choose nothing.
    """
    lone = _LONE.fullmatch(text)
    if lone:
        return Choice((lone[1] or lone[2]).upper(), "")
    several = _BLANKS.sub(" ", text.replace("\\text{", " ").replace("}", " ")).strip()
    if _SEVERAL.fullmatch(several):
        return Choices(frozenset(_ONE_LETTER.findall(several)))
    stated = _STATED.match(text)
    if stated and _CONFIRMED.fullmatch(text, stated.end()):
        return Choice(stated[1], "")
    match = _MARKED.fullmatch(text) or _NAMED.fullmatch(text) or _LISTED.fullmatch(text)
    if not match:
        return None
    rest = match[2].strip()
    if not rest:
        return Choice(match[1], "")
    is_doubted = bool(_DOUBTS & hedges_in(rest)) or _TAKEN_BACK.search(rest)
    if is_doubted or _TURNED.match(rest) or not _TEXT.match(rest):
        return None
    if text.startswith("\\text{(") and rest.endswith("}") and rest.count("{") < rest.count("}"):
        rest = f"\\text{{{rest}"
    return Choice(match[1], rest)


def are_joined(text: str, listed: str) -> bool:
    """Whether a normalised text has the letters of a list of choices, in its order: `ACD`."""
    joined = _JOINED.fullmatch(text)
    return joined is not None and [*joined[1].replace(" ", "")] == _ONE_LETTER.findall(listed)


def is_lettered(problem: str) -> bool:
    """Whether a problem has lettered choices."""
    return _OFFERED.search(problem[:MAX_PROBLEM_CHARS]) is not None


def text_of_choice(letter: str, problem: str) -> str:
    """The text that a problem lists behind a letter; empty where it does not list it once."""
    listed = list(_LISTED_MARK.finditer(problem[:MAX_PROBLEM_CHARS]))
    letters = [mark[1] or mark[2] for mark in listed]
    # The letters are those of one list: A, B, C, ... once each, in their order.
    is_one_list = len(letters) > 1 and letters == list("ABCDEFGHIJ"[: len(letters)])
    if not is_one_list or letter not in letters:
        return ""
    place = letters.index(letter)
    end = listed[place + 1].start() if place + 1 < len(letters) else MAX_PROBLEM_CHARS
    text = problem[listed[place].end() : end].strip().partition("\n")[0]
    return _CHOICE_LAYOUT.sub(" ", text).strip(" .,;$")


def hedges_in(text: str) -> frozenset[str]:
    """The words of doubt, denial and estimation in a normalised text."""
    return frozenset(
        (match["word"] or match["negation"] or match["relation"]).lower()
        for match in _HEDGE.finditer(text)
    )
