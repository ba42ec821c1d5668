"""Answers with structure: collections, regions, equations, matrices, expressions.

Runs in grading processes. A text is read in every way it can be meant: `(1,2)` as an ordered pair
and as an open interval, `x=5` as an equation and as the value 5. Two texts are equal when they are
equal in one reading of the same kind, so the verdict does not depend on which is the reference:

| readings | equal when |
|---|---|
| expression, expression | same value everywhere, and no different units |
| set or list, set or list | same items in any order; a set ignores repetition |
| tuple, tuple | same items in order |
| `x=1, y=2`, list or tuple | same values in the order of the names |
| tuple, list | the same, from three items on: a pair may be an interval |
| region, region | same points of the line, and no different variables |
| assignment, its value | the values are |
| equation, equation | one is a constant multiple of the other |
| matrix, matrix | same entries |
| words, words | same words |
"""

from collections.abc import Iterable

from verification.math.expression import Tree
from verification.math.plain import Words, compare_plain, settle_choices
from verification.math.readings import (
    Assignment,
    Collection,
    Equation,
    Expression,
    Matrix,
    Reading,
    read,
    without_names,
)  # fmt: skip
from verification.math.regions import Region, same_region
from verification.math.text import normalise
from verification.math.units import ANGLE, is_unit_mismatch, settle_units
from verification.math.values import is_constant_ratio, same_value
from verification.verdict import Verdict

MAX_ITEMS = 40
MAX_LEVELS = 6
# Kinds of collections that compare at all, and whether the order of items counts.
_ORDERED = ({"tuple"}, {"tuple", "list"}, {"row", "list"})
_UNORDERED = ({"set"}, {"list"}, {"set", "list"}, {"named"})


def same_structure(
    first: str, second: str, *, accept_missing_unit: bool = True, level: int = 0
) -> bool | None:
    """Whether two normalised texts are equal answers; None when this module cannot tell."""
    if first == second:
        return bool(first)
    verdict = compare_plain(first, second, accept_missing_unit=accept_missing_unit)
    if verdict is not None:
        return verdict.is_correct
    if level > MAX_LEVELS:
        return None
    pair = settle_choices(first, second)
    if isinstance(pair, Verdict):
        return pair.is_correct
    first, second = (normalise(text) for text in pair)
    values = without_names(first, second)
    if values != (first, second):
        return same_structure(
            *values, accept_missing_unit=accept_missing_unit, level=level + 1
        )  # fmt: skip
    first, second = settle_units(first, second)
    comparison = _Comparison(accept_missing_unit, level)
    return comparison.same(read(first), read(second))


def _in_base_units(expression: Expression) -> Tree:
    """The value times its unit's factor; degrees as radians."""
    unit = expression.unit
    if unit is None:
        return expression.tree
    if unit.dimension == ANGLE:
        radian = ("prod", ("const", "pi"), ("num", unit.factor / 180))
        return ("prod", expression.tree, radian)
    return ("prod", expression.tree, ("num", unit.factor))


class _Comparison:
    """Comparison of readings under one rule for missing units."""

    def __init__(self, accept_missing_unit: bool, level: int) -> None:
        self._accept_missing_unit = accept_missing_unit
        self._level = level

    def same(self, first: tuple[Reading, ...], second: tuple[Reading, ...]) -> bool | None:
        """Whether any reading of one equals any reading of the other."""
        if not first or not second:
            return None
        results = [self._same_reading(a, b) for a in first for b in second]
        if True in results:
            return True
        return None if None in results else False

    def _same_text(self, first: str, second: str) -> bool | None:
        return same_structure(
            normalise(first),
            normalise(second),
            accept_missing_unit=self._accept_missing_unit,
            level=self._level + 1,
        )

    def _same_reading(self, a: Reading, b: Reading) -> bool | None:
        if isinstance(a, Assignment) and isinstance(b, Assignment):
            if a.name and b.name and a.name != b.name:
                return False
            return self._same_text(a.value, b.value)
        if isinstance(a, Collection) or isinstance(b, Collection):
            is_pair = isinstance(a, Collection) and isinstance(b, Collection)
            return self._same_collection(a, b) if is_pair else False
        if isinstance(a, Expression) and isinstance(b, Expression):
            return self._same_expression(a, b)
        if isinstance(a, Region) and isinstance(b, Region):
            return self._same_region(a, b)
        if isinstance(a, Matrix) and isinstance(b, Matrix):
            return self._same_matrix(a, b)
        if isinstance(a, Equation) and isinstance(b, Equation):
            return is_constant_ratio(a.difference, b.difference)
        return isinstance(a, Words) and a == b

    def _same_expression(self, a: Expression, b: Expression) -> bool | None:
        if is_unit_mismatch(a.unit, b.unit):
            return False
        if a.unit is None and b.unit is None:
            return same_value(a.tree, b.tree)
        if a.unit is None or b.unit is None:
            if self._accept_missing_unit and same_value(a.tree, b.tree):
                return True
            known = a.unit or b.unit
            is_number = known is not None and known.dimension in ("", ANGLE)
            return same_value(_in_base_units(a), _in_base_units(b)) if is_number else False
        return same_value(_in_base_units(a), _in_base_units(b))

    def _same_region(self, a: Region, b: Region) -> bool | None:
        result = same_region(a, b)
        if result is None and a.shape() == b.shape():
            ends = zip(a.endpoints(), b.endpoints(), strict=True)
            return _all(self._same_text(end.text, other.text) for end, other in ends)
        return result

    def _same_matrix(self, a: Matrix, b: Matrix) -> bool | None:
        if a.kind != b.kind or [*map(len, a.rows)] != [*map(len, b.rows)]:
            return False
        entries = zip(sum(a.rows, ()), sum(b.rows, ()), strict=True)
        return _all(self._same_text(entry, other) for entry, other in entries)

    def _same_collection(self, a: Collection, b: Collection) -> bool | None:
        kinds = {a.kind, b.kind}
        if kinds in _ORDERED:
            is_open_pair = kinds == {"tuple", "list"} and len(a.items) < 3
            if len(a.items) != len(b.items) or is_open_pair:
                return False
            return _all(self._same_text(x, y) for x, y in zip(a.items, b.items, strict=True))
        if kinds not in _UNORDERED:
            return False
        if max(len(a.items), len(b.items)) > MAX_ITEMS:
            return None
        is_set = "set" in kinds
        pairs = ((a.items, b.items), (b.items, a.items))
        return _all(self._covered(items, others, is_set=is_set) for items, others in pairs)

    def _covered(
        self, items: tuple[str, ...], others: tuple[str, ...], *, is_set: bool
    ) -> bool | None:
        """Whether every item has an equal among the others; each one its own if no set."""
        if not is_set and len(items) != len(others):
            return False
        free = list(others)
        is_open = False
        for item in items:
            results = [self._same_text(item, other) for other in free]
            if True in results:
                if not is_set:
                    del free[results.index(True)]
            elif None in results:
                is_open = True
            else:
                return False
        return None if is_open else True


def _all(results: Iterable[bool | None]) -> bool | None:
    outcomes = list(results)
    if False in outcomes:
        return False
    return None if None in outcomes else True
