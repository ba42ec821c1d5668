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
| conditions, conditions | same items in any order, all joined by "or" or none |
| region, region | same points of the line, and no different variables |
| inequality, inequality | one is a positive multiple of the other, both strict or neither |
| assignment, its value | the values are |
| equation, equation | one is a constant multiple of the other |
| ratio, ratio or fraction | equal up to a factor |
| residue class, class or number | same modulus and residues; the residue as written |
| pieces by condition, pieces | same pieces in any order |
| matrix, matrix | same entries |
| determinant of numbers, number | the number is its value |
| words, words | same words |
"""

from collections.abc import Iterable

from verification.math.applications import settled_pairs, with_names_for_applications
from verification.math.bound_names import (
    is_class,
    may_be_progression,
    same_but_for_constants,
    same_progression,
    with_bound_names,
)
from verification.math.expression import parse_expression
from verification.math.inequalities import is_positive_multiple
from verification.math.labels import Assignment, contradicts_itself, same_head, same_name
from verification.math.linear import with_determinant
from verification.math.notation import Congruence, respell, same_congruence
from verification.math.plain import Words, compare_plain, settle_choices
from verification.math.readings import (
    Collection,
    Equation,
    Expression,
    Inequality,
    Matrix,
    Piecewise,
    Ratio,
    Reading,
    read,
    without_names,
)  # fmt: skip
from verification.math.regions import Region, same_region
from verification.math.split import split_at
from verification.math.text import normalise
from verification.math.trees import ONE, ZERO, Tree, num, renamed, subtrees, symbols_of
from verification.math.units import ANGLE, in_base_units, is_unit_mismatch, may_lack, settle_units
from verification.math.values import is_constant_ratio, real_value, same_value

MAX_ITEMS = 40
MAX_LEVELS = 6
# Kinds of collections that compare at all, and whether the order of items counts.
_ORDERED = ({"tuple"}, {"tuple", "list"}, {"row", "list"})
_UNORDERED = ({"set"}, {"list"}, {"set", "list"}, {"named"}, {"conditions"}, {"alternatives"})


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
    # Letters that decide have done so above.
    first, second = (normalise(text) for text in settle_choices(first, second))
    first, second = (
        with_determinant(normalise(respell(text, other)))
        for text, other in ((first, second), (second, first))
    )
    if first == second:
        return True
    if contradicts_itself(first) or contradicts_itself(second):
        return False
    texts = with_bound_names(first, second)
    values = without_names(*texts)
    if values != (first, second):
        return same_structure(
            *values, accept_missing_unit=accept_missing_unit, level=level + 1
        )  # fmt: skip
    first, second = settle_units(first, second)
    comparison = _Comparison(accept_missing_unit, level)
    pairs = settled_pairs(first, second)
    results = [comparison.same(read(one), read(other)) for one, other in pairs]
    if len(results) == 1:
        # An equation that no parser can read is not the value of a text without one.
        is_equation = [len(split_at(text, "=")) > 1 for text in (first, second)]
        return False if results[0] is None and is_equation[0] != is_equation[1] else results[0]
    # If the texts leave open whether P(2) is a product, both meanings must agree; no other
    # parser may choose one.
    return all(result is True for result in results)


def _same_tree(first: Tree, second: Tree) -> bool | None:
    """Whether two expressions are equal, up to the names that they bind."""
    pair = with_names_for_applications(first, second)
    if pair is None:
        return None
    result = same_value(*pair)
    if result is not False:
        return result
    return bool(same_progression(*pair) or same_but_for_constants(*pair))


def _same_ratio(a: Reading, b: Reading) -> bool | None:
    """Ratios are equal up to a factor; one of two parts is also a fraction."""
    if isinstance(a, Expression) and isinstance(b, Ratio):
        return _same_ratio(b, a)
    if not isinstance(a, Ratio):
        return False
    if isinstance(b, Expression) and len(a.parts) == 2 and b.unit is None:
        parts = (b.tree, ONE)
    elif isinstance(b, Ratio) and len(a.parts) == len(b.parts):
        parts = b.parts
    else:
        return False
    if any(same_value(part, ZERO) is not False for part in (*a.parts, *parts)):
        return False
    first, other = a.parts[0], parts[0]
    pairs = zip(a.parts[1:], parts[1:], strict=True)
    return all(same_value(("prod", first, y), ("prod", other, x)) is True for x, y in pairs)


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

    def _same_tied(self, first: str, second: str) -> bool | None:
        """As `_same_text` for one of two ends: the whole number in both has one value at a time."""
        trees = [parse_expression(normalise(text)) for text in (first, second)]
        if trees[0] is None or trees[1] is None or not any(map(may_be_progression, trees)):
            return self._same_text(first, second)
        return same_value(*trees)

    def _same_reading(self, a: Reading, b: Reading) -> bool | None:
        if isinstance(a, Assignment) and isinstance(b, Assignment):
            return self._same_assignment(a, b)
        if isinstance(a, Congruence):
            return self._same_congruence(a, b)
        if isinstance(b, Congruence):
            return self._same_congruence(b, a)
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            return _same_ratio(a, b)
        if isinstance(a, Piecewise) and isinstance(b, Piecewise):
            return self._same_pieces(a, b)
        if isinstance(a, Collection) and isinstance(b, Collection):
            return self._same_collection(a, b)
        if isinstance(a, Expression) and isinstance(b, Expression):
            return self._same_expression(a, b)
        if isinstance(a, Region) and isinstance(b, Region):
            return self._same_region(a, b)
        if isinstance(a, Inequality) and isinstance(b, Inequality):
            pair = with_names_for_applications(a.difference, b.difference)
            is_same = None if pair is None else is_positive_multiple(*pair)
            return is_same if a.is_strict == b.is_strict else False
        if isinstance(a, Matrix) and isinstance(b, Matrix):
            return self._same_matrix(a, b)
        if isinstance(a, Equation) and isinstance(b, Equation):
            pair = with_names_for_applications(a.difference, b.difference)
            # No multiple of an equation with an infinite term can be told.
            if pair is None or any(("const", "infty") in subtrees(side) for side in pair):
                return None
            return is_constant_ratio(*pair)
        return isinstance(a, Words) and a == b

    def _same_congruence(self, a: Congruence, b: Reading) -> bool | None:
        """Whether a congruence equals a class, the residue that it names, or `11k+7`."""
        if isinstance(b, Congruence):
            return same_congruence(a, b)
        # 7 mod 3 may be meant as a remainder: it does not name 7.
        is_least = all(abs(residue) < a.modulus for residue in a.residues)
        residues = tuple(map(str, a.residues))
        if isinstance(b, Collection):
            return is_least and self._same_collection(Collection("list", residues), b)
        if isinstance(b, Assignment):
            if a.name and not same_name(a.name, b.name):
                return False
            results = [self._same_congruence(a, reading) for reading in read(b.value)]
            return True in results
        if not isinstance(b, Expression) or len(residues) > 1 or b.unit is not None:
            return False
        residue = a.residues[0]
        is_residue = is_least and same_value(num(residue), b.tree) is True
        return is_residue or is_class(b.tree, residue, a.modulus)

    def _same_pieces(self, a: Piecewise, b: Piecewise) -> bool | None:
        if len(a.rows) != len(b.rows) or len(a.rows) > MAX_ITEMS:
            return False
        free = list(b.rows)
        for row in a.rows:
            same = [
                other for other in free
                if all(self._same_text(x, y) for x, y in zip(row, other, strict=True))
            ]  # fmt: skip
            if not same:
                return False
            free.remove(same[0])
        return True

    def _same_assignment(self, a: Assignment, b: Assignment) -> bool | None:
        if not a.name or not b.name or same_name(a.name, b.name):
            return self._same_text(a.value, b.value)
        letters = same_head(a.name, b.name)
        trees = [parse_expression(side.value) for side in (a, b)]
        if letters is None or trees[0] is None or trees[1] is None:
            return False
        # f(x)=x^2 and f(t)=t^2 are one function; E(X)=3 and E(Y)=3 are two values.
        symbols = [symbols_of(tree) for tree in trees]
        if letters[0] in symbols[1] or letters[1] in symbols[0]:
            return False
        if letters[0] not in symbols[0] or letters[1] not in symbols[1]:
            return False
        return _same_tree(renamed(trees[0], dict([letters])), trees[1])

    def _same_expression(self, a: Expression, b: Expression) -> bool | None:
        if is_unit_mismatch(a.unit, b.unit):
            return False
        if a.unit is None and b.unit is None:
            return _same_tree(a.tree, b.tree)
        if a.unit is None or b.unit is None:
            known = a.unit or b.unit
            if self._accept_missing_unit and _same_tree(a.tree, b.tree):
                value = real_value(a.tree)
                if may_lack(known, None if value is None else float(value)):
                    return True
            is_number = known is not None and known.dimension in ("", ANGLE)
            if not is_number:
                return False
        return _same_tree(in_base_units(a.tree, a.unit), in_base_units(b.tree, b.unit))

    def _same_region(self, a: Region, b: Region) -> bool | None:
        result = same_region(a, b)
        if result is None and a.shape() == b.shape():
            ends = zip(a.endpoints(), b.endpoints(), strict=True)
            return _all(self._same_tied(end.text, other.text) for end, other in ends)
        return result

    def _same_matrix(self, a: Matrix, b: Matrix) -> bool | None:
        if a.kind != b.kind or [*map(len, a.rows)] != [*map(len, b.rows)]:
            return False
        entries = zip(sum(a.rows, ()), sum(b.rows, ()), strict=True)
        return _all(self._same_text(entry, other) for entry, other in entries)

    def _same_collection(self, a: Collection, b: Collection) -> bool | None:
        kinds = {a.kind, b.kind}
        if not _may_share_names(a.names, b.names):
            return False
        if kinds in _ORDERED:
            is_open_pair = kinds == {"tuple", "list"} and len(a.items) < 3
            if len(a.items) != len(b.items) or is_open_pair:
                return False
            return _all(self._same_tied(x, y) for x, y in zip(a.items, b.items, strict=True))
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
        """Whether every item has an equal among the others; distinct equals unless for a set."""
        if not is_set and len(items) != len(others):
            return False
        free = list(others)
        is_open = False
        for item in items:
            results = [
                # {1} is 1 as a whole answer, but no member.
                item.startswith("\\{") == other.startswith("\\{") and self._same_text(item, other)
                for other in free
            ]
            if True in results:
                if not is_set:
                    del free[results.index(True)]
            elif None in results:
                is_open = True
            else:
                return False
        return None if is_open else True


def _may_share_names(names: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether two answers give values to the same names; x_1 and x_2 are both x."""
    if not names or not others or names == others:
        return True
    are_numbered = [all("_" in name for name in side) for side in (names, others)]
    if all(are_numbered) or not any(are_numbered):
        return False
    return {name.partition("_")[0] for name in names} == {name.partition("_")[0] for name in others}


def _all(results: Iterable[bool | None]) -> bool | None:
    outcomes = list(results)
    if False in outcomes:
        return False
    return None if None in outcomes else True
