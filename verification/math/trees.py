"""Trees of expressions: how they are built, searched and changed.

Runs in the verifier and its grading processes. A tree is (kind, *children):

| kind | children |
|---|---|
| num | a Fraction |
| sym, const | a name |
| sum, prod | two or more trees |
| pow | base, exponent |
| call | the name of a known function, then its arguments |
| apply | the name of a function of which only the name is known, then its arguments |
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]


def num(value: int | Fraction) -> Tree:
    """The tree of a number."""
    return ("num", Fraction(value))


ZERO, ONE, MINUS_ONE = num(0), num(1), num(-1)


def difference(first: Tree, second: Tree) -> Tree:
    """The first tree minus the second."""
    return ("sum", first, ("prod", MINUS_ONE, second))


def inverse(tree: Tree) -> Tree:
    """1 over a tree."""
    return ("pow", tree, MINUS_ONE)


def subtrees(tree: Tree) -> Iterator[Tree]:
    """The tree and all trees within it, each before the trees within it."""
    yield tree
    for child in tree[1:]:
        if isinstance(child, tuple):
            yield from subtrees(child)


def symbols_of(tree: Tree) -> frozenset[str]:
    """Names of the symbols in a tree; `f()` for a function of which only the name is known."""
    found = (part for part in subtrees(tree) if part[0] in ("sym", "apply"))
    return frozenset(part[1] if part[0] == "sym" else f"{part[1]}()" for part in found)


def replaced(tree: Tree, values: Mapping[Tree, Tree]) -> Tree:
    """The tree with some of its symbols or constants replaced, all at once."""
    if tree[0] in ("sym", "const"):
        return values.get(tree, tree)
    return tuple(replaced(part, values) if isinstance(part, tuple) else part for part in tree)


def renamed(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The tree with some symbols under other names, all at once."""
    return replaced(tree, {("sym", old): ("sym", new) for old, new in names.items()})


def at_point(tree: Tree, point: Mapping[str, Fraction]) -> Tree:
    """The tree with numbers in the place of symbols."""
    return replaced(tree, {("sym", name): num(value) for name, value in point.items()})
