"""Where an inequality in one variable holds: `x^2<1`, `\\frac{x+2}{x-2}\\le0`, `|2x-1|<3`.

Runs in grading processes. Both sides are rational functions and absolute values of them. Their
zeros, poles and sign changes cut the line; between two of these the inequality holds everywhere or
nowhere, so one rational point decides; each cut is decided separately.
"""

import itertools
import math
from fractions import Fraction

from flint import fmpq, fmpq_poly

from verification.math.trees import (
    MINUS_ONE,
    ZERO,
    Tree,
    at_point,
    difference,
    inverse,
    num,
    replaced,
    symbols_of,
)
from verification.math.values import Real, is_constant_ratio, real_value, same_value

MAX_DEGREE = 10
MAX_QUOTIENTS = 8
_ONE = fmpq_poly([1])
# Points where the signs of two expressions are compared.
_PRIMES = (3, 7, 13, 19, 29, 37, 43, 53)

Quotient = tuple[fmpq_poly, fmpq_poly]
"""Numerator and denominator."""
Stretch = tuple[Tree | None, Tree | None, bool]
"""Ends of an interval, None for an infinite one; and whether it is a single point, not open."""


def solution(excess: Tree, sign: str) -> list[Stretch] | None:
    """Where `excess sign 0` holds, in pieces; None beyond this module's functions."""
    names = symbols_of(excess)
    if len(names) != 1 or sign not in ("<", ">", "<=", ">="):
        return None
    name = next(iter(names))
    try:
        return _stretches(excess, name, sign, _in_order(_cuts(excess, name)))
    except _Unknown:
        return None


def _cuts(excess: Tree, name: str) -> list[Tree]:
    """Where the sign may change. Raises _Unknown."""
    breaks: list[fmpq_poly] = []
    try:
        quotients = _quotients(excess, breaks)
        polynomials = [*breaks, *itertools.chain.from_iterable(quotients)]
        return [root for polynomial in polynomials for root in _real_roots(polynomial)]
    except _Unknown:
        return _roots_of_quadratic(excess, name)


def is_positive_multiple(first: Tree, second: Tree) -> bool | None:
    """Whether one expression is the other times a positive constant."""
    result = is_constant_ratio(first, second)
    if not result:
        return result
    names = sorted(symbols_of(first) | symbols_of(second))
    for shift in range(6):
        point = {name: Fraction(_PRIMES[(k + shift) % 8], 5 + k) for k, name in enumerate(names)}
        signs = [_sign(at_point(tree, point)) for tree in (first, second)]
        if signs[0] and signs[1]:
            return signs[0] == signs[1]
    return None


class _Unknown(ValueError):
    """Not a rational function, or one of too high a degree."""


def _stretches(excess: Tree, name: str, sign: str, cuts: list[Tree]) -> list[Stretch] | None:
    ends = [None, *cuts, None]
    found: list[Stretch] = []
    for k, (low, high) in enumerate(itertools.pairwise(ends)):
        middle = _between(low, high)
        if middle is None:
            return None
        if _holds(at_point(excess, {name: middle}), sign):
            found.append((low, high, False))
        if high is not None and _holds(replaced(excess, {("sym", name): cuts[k]}), sign):
            found.append((high, high, True))
    return found


def _holds(value: Tree, sign: str) -> bool:
    order = _sign(value)
    if order is None:
        return False
    return {"<": order < 0, ">": order > 0, "<=": order <= 0, ">=": order >= 0}[sign]


def _sign(value: Tree) -> int | None:
    """Sign as -1, 0 or 1; None without a real value."""
    if same_value(value, ZERO):
        return 0
    number = real_value(value)
    if number is None or math.isinf(float(number)):
        return None
    return 1 if number > real_value(ZERO) else -1


def _between(low: Tree | None, high: Tree | None) -> Fraction | None:
    """A rational point within an open interval; None when its ends are too close to tell."""
    ends = [None if end is None else float(_value(end)) for end in (low, high)]
    if ends[0] is None or ends[1] is None:
        known = [end for end in ends if end is not None]
        step = 1 if ends[1] is None else -1
        return Fraction(math.floor(known[0]) + 2 * step) if known else Fraction(0)
    middle = Fraction((ends[0] + ends[1]) / 2)
    is_inside = _value(low) < _value(num(middle)) < _value(high)
    return middle if is_inside else None


def _value(tree: Tree | None) -> Real:
    value = real_value(tree) if tree is not None else None
    if not isinstance(value, Real) or math.isinf(float(value)):
        raise _Unknown
    return value


def _quotients(tree: Tree, breaks: list[fmpq_poly]) -> list[Quotient]:
    """The tree as a rational function, one for each choice of signs of its absolute values."""
    kind = tree[0]
    if kind == "num":
        return [(fmpq_poly([_rational(tree[1])]), _ONE)]
    if kind == "sym":
        return [(fmpq_poly([0, 1]), _ONE)]
    if kind == "call" and tree[1] == "abs" and symbols_of(tree):
        inner = _quotients(tree[2], breaks)
        breaks += itertools.chain.from_iterable(inner)
        return _few([(part, q) for p, q in inner for part in (p, -p)])
    if kind == "pow" and tree[2][0] == "num" and tree[2][1].denominator == 1:
        power = int(tree[2][1])
        base = _quotients(tree[1], breaks)
        # A pole of the base stays one of its inverse.
        breaks += [q for _, q in base]
        pairs = base if power > 0 else [(q, p) for p, q in base]
        is_undefined = not symbols_of(tree) and any(q.is_zero() for _, q in pairs)
        if abs(power) > MAX_DEGREE or is_undefined:
            raise _Unknown
        return [(_bounded(p ** abs(power)), _bounded(q ** abs(power))) for p, q in pairs]
    if kind not in ("sum", "prod"):
        raise _Unknown
    combined = _quotients(tree[1], breaks)
    for child in tree[2:]:
        parts = _quotients(child, breaks)
        join = _added if kind == "sum" else _multiplied
        combined = _few([join(one, other) for one in combined for other in parts])
    return combined


def _few(quotients: list[Quotient]) -> list[Quotient]:
    if len(quotients) > MAX_QUOTIENTS:
        raise _Unknown
    return quotients


def _bounded(polynomial: fmpq_poly) -> fmpq_poly:
    if polynomial.degree() > MAX_DEGREE:
        raise _Unknown
    return polynomial


def _added(one: Quotient, other: Quotient) -> Quotient:
    (p, q), (r, s) = one, other
    return _bounded(p * s + r * q), _bounded(q * s)


def _multiplied(one: Quotient, other: Quotient) -> Quotient:
    return _bounded(one[0] * other[0]), _bounded(one[1] * other[1])


def _rational(value: Fraction) -> fmpq:
    return fmpq(value.numerator, value.denominator)


def _real_roots(polynomial: fmpq_poly) -> list[Tree]:
    """Real roots, each once: rational ones and those of one quadratic factor. Raises _Unknown."""
    if polynomial.degree() < 1:
        return []
    found: list[Tree] = []
    factors = [factor for factor, _ in polynomial.factor()[1]]
    if sum(factor.degree() for factor in factors if factor.degree() > 1) > 2:
        raise _Unknown
    for factor in factors:
        c, b, *a = (Fraction(int(x.p), int(x.q)) for x in factor.coeffs())
        found += _quadratic_roots(num(c), num(b), num(*a)) if a else [num(-c / b)]
    return found


def _quadratic_roots(c: Tree, b: Tree, a: Tree) -> list[Tree]:
    """Real roots of ax^2+bx+c, a not 0."""
    discriminant = ("sum", ("prod", b, b), ("prod", num(-4), a, c))
    sign = _sign(discriminant)
    if sign is None or sign < 0:
        return []
    root = ("pow", discriminant, num(Fraction(1, 2)))
    minus, half = ("prod", MINUS_ONE, b), inverse(("prod", num(2), a))
    ways = (-1, 1) if sign else (0,)
    return [("prod", ("sum", minus, ("prod", num(way), root)), half) for way in ways]


def _roots_of_quadratic(excess: Tree, name: str) -> list[Tree]:
    """Roots of a polynomial of degree 1 or 2 with any constants. Raises _Unknown."""
    c, up, down = (at_point(excess, {name: Fraction(value)}) for value in (0, 1, -1))
    half = num(Fraction(1, 2))
    b = ("prod", half, difference(up, down))
    a = difference(("prod", half, ("sum", up, down)), c)
    x = ("sym", name)
    if not same_value(excess, ("sum", ("prod", a, x, x), ("prod", b, x), c)):
        raise _Unknown
    if not same_value(a, ZERO):
        return _quadratic_roots(c, b, a)
    if same_value(b, ZERO) is not False:
        raise _Unknown
    return [("prod", MINUS_ONE, c, inverse(b))]


def _in_order(cuts: list[Tree]) -> list[Tree]:
    """Cuts from low to high, each once."""
    kept: list[Tree] = []
    for cut in sorted(cuts, key=lambda tree: float(_value(tree))):
        if not kept or same_value(kept[-1], cut) is not True:
            kept.append(cut)
    return kept
