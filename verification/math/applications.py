"""Functions by name: whether `P(2)` is a value of P or twice P.

Runs in grading processes. A letter before parentheses can be a factor or a function. The texts of
both sides are read together: their use of a letter tells its meaning. If the meaning is open,
both meanings must give the same verdict, so that no answer profits from the ambiguity.

| written | meaning |
|---|---|
| `f(..)`, `g(..)`, `y'(..)`, `P(2,3)` | a function |
| `n(n+1)`: the letter is inside too | a factor |
| `a(b+c)` and elsewhere `ab+ac`: a sum inside, and the letter also without parentheses | a factor |
| the same, a capital with `n-1`, `x+1` and the like inside | open |
| all else: `I(0)`, `B(t)`, `x(2)` | open |
"""

import re
from typing import NamedTuple

from verification.math.split import group_end, split_at
from verification.math.trees import Tree, subtrees
from verification.math.values import same_value

FUNCTION_MARK = "\\of"
FACTOR_MARK = "\\by"
MAX_APPLICATIONS = 12
_ALWAYS_FUNCTIONS = frozenset("fg")
_CONSTANTS = frozenset("ei")
_PRIME = "(?:'|\\^\\{?\\\\prime\\}?)"
_LETTER = re.compile(
    r"\\text\{[^{}]*\}|(?<![A-Za-z\\])(?:and|or|if|for|to|mod)(?![A-Za-z])"
    r"|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|(?:ln|log|exp|sqrt|gcd|lcm)\("
    r"|[_^] ?[A-Za-z](?!\{)"
    r"|(?P<name>[A-Za-z]|\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi"
    r"|rho|sigma|tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)"
    r"(?![A-Za-z]) ?)"
    rf"(?P<sub>_(?:[0-9A-Za-z]|\{{[^{{}}]*\}}))?(?P<prime>{_PRIME}{{1,3}})?"
    r"(?P<power>\^(?:\{-1\}|\{\([^{}()]{1,9}\)\}|[0-9](?=\()))?(?=(?P<applied>[(\[]))?"
    r"|\\[A-Za-z]+|\\."
)
_INDEX = re.compile(r"[nkmijtxyzs]|\\(?:theta|omega|tau)")
_SIMPLE_SUM = re.compile(r"(?:[0-9]*(?:[A-Za-z]|\\[a-z]+ ?)|[0-9]+)")


class _Use(NamedTuple):
    """A name in a text; `inside` is None for a name alone; `end` is the end of its text."""

    name: str
    inside: str | None
    end: int
    is_function: bool


def settled_pairs(first: str, second: str) -> list[tuple[str, str]]:
    """Both texts with every application marked: one pair per meaning that the texts leave open."""
    if not any(mark in text for text in (first, second) for mark in "(["):
        return [(first, second)]
    uses = (_uses(first), _uses(second))
    together = [use for side in uses for use in side]
    names = {use.name for use in together if use.inside is not None}
    meanings = {name: _meaning(name, together) for name in names}
    if not meanings:
        return [(first, second)]
    pairs = []
    for open_mark in (FACTOR_MARK, FUNCTION_MARK):
        marks = {name: meaning or open_mark for name, meaning in meanings.items()}
        pairs.append((_marked(first, uses[0], marks), _marked(second, uses[1], marks)))
    return pairs[:1] if all(meanings.values()) else pairs


def without_application_marks(text: str) -> str:
    """A text as it was before its applications were marked."""
    return text.replace(FUNCTION_MARK, "").replace(FACTOR_MARK, "")


def with_names_for_applications(first: Tree, second: Tree) -> tuple[Tree, Tree] | None:
    """Both trees, each value of a named function a symbol; equal arguments, equal symbols.

    None when there are too many to compare.
    """
    if not (_count(first) or _count(second)):
        return first, second
    if _count(first) + _count(second) > MAX_APPLICATIONS:
        return None
    known: list[tuple[str, tuple[Tree, ...], Tree]] = []
    return _named(first, known), _named(second, known)


def _meaning(name: str, uses: list[_Use]) -> str:
    """FUNCTION_MARK or FACTOR_MARK, or empty if the texts leave it open."""
    own = [use for use in uses if use.name == name]
    if any(use.is_function for use in own):
        return FUNCTION_MARK
    applied = [use.inside for use in own if use.inside is not None]
    if any(_stands_in(name, inside) for inside in applied):
        return FACTOR_MARK
    is_alone = any(use.inside is None for use in own)
    is_capital = name[0].isupper() or name == "h"
    is_sum = [_is_sum(inside) and not (is_capital and _is_index(inside)) for inside in applied]
    return FACTOR_MARK if is_alone and all(is_sum) else ""


def _uses(text: str) -> list[_Use]:
    uses = []
    for match in _LETTER.finditer(text):
        name = match["name"]
        if name is None or name in _CONSTANTS:
            continue
        name = name.strip() + (match["sub"] or "")
        if match["applied"] is None:
            uses.append(_Use(name, None, match.end(), False))
            continue
        end = group_end(text, match.end())
        if end is None:
            continue
        inside = text[match.end() + 1 : end - 1]
        letter = match["name"].strip()
        power = match["power"]
        if power and power[1].isdecimal() and letter not in _ALWAYS_FUNCTIONS:
            # x^2(x+1): the power is a factor, and says nothing of x.
            uses.append(_Use(name, None, match.end(), False))
            continue
        is_function = bool(
            letter in _ALWAYS_FUNCTIONS
            or match["prime"]
            or (power and "(" in power)
            or len(split_at(inside, ",")) > 1
        )
        uses.append(_Use(name + (power or ""), inside, match.end(), is_function))
    return uses


def _stands_in(name: str, inside: str) -> bool:
    base = name.partition("^")[0]
    return any(use.name == base and use.inside is None for use in _uses(inside))


def _terms(inside: str) -> list[str]:
    return [term.strip() for term in split_at(inside.lstrip("-"), "+", "-")]


def _is_sum(inside: str) -> bool:
    return len(_terms(inside)) > 1


def _is_index(inside: str) -> bool:
    """`n-1`, `t+h`, `2x+1`: typical arguments of functions and sequences."""
    terms = _terms(inside)
    has_index = any(_INDEX.search(term) for term in terms)
    return len(terms) == 2 and has_index and all(map(_SIMPLE_SUM.fullmatch, terms))


def _marked(text: str, uses: list[_Use], marks: dict[str, str]) -> str:
    parts = []
    start = 0
    for use in uses:
        if use.inside is None:
            continue
        parts += [text[start : use.end], marks[use.name]]
        start = use.end
    return "".join((*parts, text[start:]))


def _count(tree: Tree) -> int:
    return sum(part[0] == "apply" for part in subtrees(tree))


def _named(tree: Tree, known: list[tuple[str, tuple[Tree, ...], Tree]]) -> Tree:
    children = [_named(child, known) if isinstance(child, tuple) else child for child in tree[1:]]
    if tree[0] != "apply":
        return (tree[0], *children)
    name, arguments = children[0], tuple(children[1:])
    for other, other_arguments, symbol in known:
        if other == name and len(other_arguments) == len(arguments):
            pairs = zip(arguments, other_arguments, strict=True)
            if all(one == two or same_value(one, two) for one, two in pairs):
                return symbol
    symbol = ("sym", f"\\of {name} {len(known)}")
    known.append((name, arguments, symbol))
    return symbol
