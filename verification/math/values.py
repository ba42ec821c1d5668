"""Whether two expressions are equal, by their values.

Runs in grading processes. Rational values are exact. Others are balls that surely hold the value:
two values whose balls part are different. Values whose balls keep meeting count as equal when
they agree in SURE_BITS bits beyond three times the size of all numbers on the way. So no small term
of the text can hide below the last digit. A pair that would need more than MAX_BITS is undecided.

Expressions with symbols are compared at points that depend on both: they are equal when they agree
wherever every part of both is real, at points enough to tell. So x/x is 1, and the logarithm of
x^2 is twice that of x; but the root of x^2 is not x, which differs where x is negative.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

from verification.math.balls import Evaluation
from verification.math.exact import Exhausted, Unbounded, Undefined, Unsure, Work
from verification.math.points import Point, is_enough, points_of
from verification.math.trees import ZERO, Tree, at_point, inverse, num, subtrees, symbols_of

FIRST_BITS = 128
SURE_BITS = 256
MAX_BITS = 200_000
# Points are many, and one where a value is huge can be left out.
MAX_POINT_BITS = 20_000
MAX_TRIES = 12
MAX_LACKING = 24
_MODULI = ("abs", "max", "min", "sign")
_LOGARITHMS = ("ln", "log", "arcsin", "arccos")

Result = TypeVar("Result")


class Undecided(ArithmeticError):
    """Two values agree as far as they can be computed, which is too few bits to decide."""


def same_value(first: Tree, second: Tree) -> bool | None:
    """Whether two trees are equal expressions; None when no value tells."""
    names = sorted(symbols_of(first) | symbols_of(second))
    try:
        if not names:
            return _agree_at({}, first, second, is_real=False, work=Work())
        agreed = _agree_at_points(first, second, names)
    except (Unbounded, Undecided, RecursionError):
        agreed = None
    # A value too large to compute still equals itself.
    return True if agreed is None and _form(first) == _form(second) else agreed


def is_constant_ratio(first: Tree, second: Tree) -> bool | None:
    """Whether one expression is a constant multiple, not 0, of the other."""
    names = sorted(symbols_of(first) | symbols_of(second))
    if not names:
        return None
    work = Work()
    ratio = None
    agreed: list[Point] = []
    lacking: list[Point] = []
    try:
        count, points = points_of(first, second, names)
        for index, point in enumerate(points):
            if index >= count and is_enough(agreed):
                break
            value = ("prod", at_point(first, point), inverse(at_point(second, point)))
            is_zero = _agrees_or_none({}, value, ZERO, is_real=True, work=work)
            if is_zero is None:
                lacking.append(point)
                continue
            ratio = ratio or value
            if is_zero or _agrees_or_none({}, value, ratio, is_real=True, work=work) is False:
                return False
            agreed.append(point)
        if ratio is None or not is_enough(agreed):
            return None
        return not _is_narrower(first, ("prod", ratio, second), lacking, work)
    except (Exhausted, RecursionError):
        return None


def _agree_at_points(first: Tree, second: Tree, names: list[str]) -> bool | None:
    """Whether two trees agree at their points; None if too few points tell."""
    has_i = any(("const", "i") in subtrees(tree) for tree in (first, second))
    modes = (False,) if has_i else (True, False)
    work = Work()
    for is_real in modes:
        agreed: list[Point] = []
        lacking: list[Point] = []
        count, points = points_of(first, second, names)
        for index, point in enumerate(points):
            if index >= count and is_enough(agreed):
                break
            agrees = _agrees_or_none(point, first, second, is_real=is_real, work=work)
            if agrees is False:
                return False
            if agrees:
                agreed.append(point)
            elif is_real:
                lacking.append(point)
        # Functions that are real nowhere are compared as complex ones.
        if agreed:
            if is_enough(agreed) and _is_narrower(first, second, lacking, work):
                return False
            return is_enough(agreed) or None
    return None


def _is_narrower(first: Tree, second: Tree, lacking: list[Point], work: Work) -> bool:
    """Whether one of two trees that agree where both are real is another function elsewhere.

    The square of the root of x is not |x|: below 0 it is x. The rule applies only to a function
    that is real at every point, or that takes an absolute value. Where lengths and sizes are
    positive, the root of ab is also the product of two roots, and ln(x^2) is 2ln(x).
    """
    lacking = lacking[:MAX_LACKING]
    for wide, narrow in ((first, second), (second, first)):
        if not lacking or not _has_branch(narrow):
            continue
        defined = [point for point in lacking if _is_defined(point, wide, work, is_real=True)]
        if not defined or not (len(defined) == len(lacking) or _has_modulus(wide)):
            continue
        for point in defined:
            if _is_defined(point, narrow, work, is_real=True):
                continue
            agrees = _agrees_or_none(point, wide, narrow, is_real=False, work=work)
            if agrees is False and (
                not _has_logarithm(narrow) or _is_defined(point, narrow, work, is_real=False)
            ):
                return True
    return False


def _is_defined(point: Point, tree: Tree, work: Work, *, is_real: bool) -> bool:
    """Whether a tree is real at a point: in all its parts, or as a whole where not `is_real`."""

    try:
        _settled(
            lambda run: run.real(run.value(tree)),
            point,
            is_real=is_real,
            work=work,
            most=MAX_POINT_BITS,
        )
    except Exhausted:
        raise
    except ArithmeticError:
        return False
    return True


def _has_modulus(tree: Tree) -> bool:
    return any(part[0] == "call" and part[1] in _MODULI for part in subtrees(tree))


def _has_branch(tree: Tree) -> bool:
    """Whether a tree holds a root or logarithm, which may be real only at some points."""
    return any(
        (part[0] == "pow" and (part[2][0] != "num" or part[2][1].denominator > 1))
        or (part[0] == "call" and part[1] in ("root", *_LOGARITHMS))
        for part in subtrees(tree)
    )


def _has_logarithm(tree: Tree) -> bool:
    """Whether a tree holds a logarithm or a power with names in its exponent."""
    return any(
        (part[0] == "pow" and symbols_of(part[2])) or (part[0] == "call" and part[1] in _LOGARITHMS)
        for part in subtrees(tree)
    )


def _agrees_or_none(
    point: Point, first: Tree, second: Tree, *, is_real: bool, work: Work
) -> bool | None:
    """As `_agree_at`; None too for a point that leaves it undecided. Raises Exhausted."""
    try:
        agrees = _agree_at(point, first, second, is_real=is_real, work=work, most=MAX_POINT_BITS)
    except Exhausted:
        raise
    except (Unbounded, Undecided):
        return None
    return agrees


def _agree_at(
    point: Point,
    first: Tree,
    second: Tree,
    *,
    is_real: bool,
    work: Work,
    most: int = MAX_BITS,
) -> bool | None:
    """Whether both trees have the same value at a point; None where one has none to compare."""

    def compare(run: Evaluation) -> bool | None:
        values = []
        for tree in (first, second):
            try:
                values.append(run.value(tree))
            except Undefined:
                # Where symbols have values, or arguments may be complex, the point is the cause.
                if point or is_real:
                    return None
        if len(values) < 2:
            # 1/0 is no number.
            return False if values else None
        return run.is_zero(run.difference(*values))

    return _settled(compare, point, is_real=is_real, work=work, most=most)


def _settled(
    compute: Callable[[Evaluation], Result],
    point: Point,
    *,
    is_real: bool = False,
    work: Work,
    most: int = MAX_BITS,
) -> Result:
    """The result of a computation with as many bits as it needs. Raises Undecided, Unbounded."""
    bits, settle_bits = FIRST_BITS, 0
    for _ in range(MAX_TRIES):
        run = Evaluation(point, bits, settle_bits=settle_bits, is_real=is_real, work=work)
        is_sure = True
        try:
            result = compute(run)
        except Unsure:
            is_sure = False
        # Sizes show only on the way: what was settled for a smaller size is computed again.
        needed = SURE_BITS + 3 * run.size_bits
        if is_sure and (settle_bits == 0 or settle_bits >= needed):
            return result
        bits = max(needed + run.size_bits + 64, 2 * bits if settle_bits >= needed else 0)
        settle_bits = max(settle_bits, needed)
        if max(settle_bits, bits // 4) > most:
            raise Undecided
    raise Undecided


def _form(tree: Tree) -> str:
    """A spelling that trees share when they differ in the order of terms and factors alone."""
    if tree[0] not in ("sum", "prod"):
        parts = [_form(part) if isinstance(part, tuple) else str(part) for part in tree]
        return f"({' '.join(parts)})"
    parts = [part for child in tree[1:] for part in _parts(tree[0], child)]
    return f"({tree[0]} {' '.join(sorted(map(_form, parts)))})"


def _parts(kind: str, tree: Tree) -> list[Tree]:
    if tree[0] != kind:
        return [tree]
    return [part for child in tree[1:] for part in _parts(kind, child)]


# --- real numbers -------------------------------------------------------------------------------


@functools.total_ordering
class Real:
    """The real value of a tree without symbols, ordered by exact comparison."""

    def __init__(self, tree: Tree, approximation: float) -> None:
        self._tree = tree
        self._approximation = approximation

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | float) and math.isfinite(other):
            return _order(self._tree, num(other)) == 0
        return isinstance(other, Real) and _order(self._tree, other._tree) == 0

    def __lt__(self, other: "Real | float") -> bool:
        if isinstance(other, Real):
            return _order(self._tree, other._tree) < 0
        # An infinity.
        return other > 0

    def __hash__(self) -> int:
        return hash(self._approximation)

    def __float__(self) -> float:
        return self._approximation


def real_value(tree: Tree) -> Real | float | None:
    """Value of a tree without symbols as a real number or infinity; None when it has none."""
    if symbols_of(tree):
        return None
    try:
        value = _settled(lambda run: run.real(run.value(tree)), {}, work=Work())
    except (ArithmeticError, RecursionError):
        return None
    return value if isinstance(value, float) else Real(tree, float(value.mid()))


@functools.lru_cache(maxsize=256)
def _order(first: Tree, second: Tree) -> int:
    """Sign of the difference; of two that stay undecided, any order but never equality."""
    try:
        return _settled(
            lambda run: run.sign(run.difference(run.value(first), run.value(second))),
            {},
            work=Work(),
        )
    except (ArithmeticError, RecursionError):
        one, other = _form(first), _form(second)
        return (one > other) - (one < other)
