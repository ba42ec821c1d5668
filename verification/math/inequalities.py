"""Where an inequality in one variable holds: `x^2<1`, `\\frac{x+2}{x-2}\\le0`, `|2x-1|<3`.

Runs in grading processes. Both sides are rational functions and absolute values of them. Their
zeros, poles and sign changes cut the line; between two of these the inequality holds everywhere or
nowhere, so one rational point decides, and each cut is decided by itself.
"""

import itertools
import math
from fractions import Fraction
from typing import Any

from mpmath import libmp, mp

from verification.math.expression import Tree, symbols_of
from verification.math.values import is_constant_ratio, real_value, same_value

MAX_DEGREE = 10
MAX_FORMS = 8
ROOT_DIGITS = 120
_ZERO = ("num", Fraction(0))
_ONE = (Fraction(1),)
# Points where the signs of two expressions are compared.
_PRIMES = (3, 7, 13, 19, 29, 37, 43, 53)

Polynomial = tuple[Fraction, ...]
"""Coefficients, the constant first."""
Form = tuple[Polynomial, Polynomial]
"""Numerator and denominator."""
Stretch = tuple[Tree | None, Tree | None, bool]
"""Ends of an interval, None for an infinite one; and whether it is a single point, not open."""


def solution(difference: Tree, sign: str) -> list[Stretch] | None:
    """Where `difference sign 0` holds, in pieces; None beyond this module's functions."""
    names = symbols_of(difference)
    if len(names) != 1 or sign not in ("<", ">", "<=", ">="):
        return None
    name = next(iter(names))
    try:
        return _stretches(difference, name, sign, _in_order(_cuts(difference, name)))
    except _Unknown:
        return None


def _cuts(difference: Tree, name: str) -> list[Tree]:
    """Where the sign may change. Raises _Unknown."""
    breaks: list[Polynomial] = []
    try:
        forms = _forms(difference, breaks)
        polynomials = {*breaks, *itertools.chain.from_iterable(forms)}
        return [root for polynomial in polynomials for root in _real_roots(polynomial)]
    except (_Unknown, libmp.NoConvergence):
        return _roots_of_quadratic(difference, name)


def is_positive_multiple(first: Tree, second: Tree) -> bool | None:
    """Whether one expression is the other times a positive constant."""
    result = is_constant_ratio(first, second)
    if not result:
        return result
    names = sorted(symbols_of(first) | symbols_of(second))
    for shift in range(6):
        point = {name: Fraction(_PRIMES[(k + shift) % 8], 5 + k) for k, name in enumerate(names)}
        signs = [_sign(_at(tree, point)) for tree in (first, second)]
        if signs[0] and signs[1]:
            return signs[0] == signs[1]
    return None


class _Unknown(ValueError):
    """Not a rational function, or one of too high a degree."""


def _stretches(difference: Tree, name: str, sign: str, cuts: list[Tree]) -> list[Stretch] | None:
    ends = [None, *cuts, None]
    found: list[Stretch] = []
    for k, (low, high) in enumerate(itertools.pairwise(ends)):
        middle = _between(low, high)
        if middle is None:
            return None
        if _holds(_at(difference, {name: middle}), sign):
            found.append((low, high, False))
        if high is not None and _holds(_replaced(difference, name, cuts[k]), sign):
            found.append((high, high, True))
    return found


def _holds(value: Tree, sign: str) -> bool:
    order = _sign(value)
    if order is None:
        return False
    return {"<": order < 0, ">": order > 0, "<=": order <= 0, ">=": order >= 0}[sign]


def _sign(value: Tree) -> int | None:
    """-1, 0 or 1; None without a real value."""
    if same_value(value, _ZERO):
        return 0
    number, zero = real_value(value), real_value(_ZERO)
    if number is None or zero is None or math.isinf(float(number)):
        return None
    return 1 if zero < number else -1


def _between(low: Tree | None, high: Tree | None) -> Fraction | None:
    """A rational point within an open interval; None when its ends are too close to tell."""
    ends = [None if end is None else float(_value(end)) for end in (low, high)]
    if ends[0] is None or ends[1] is None:
        known = [end for end in ends if end is not None]
        step = 1 if ends[1] is None else -1
        return Fraction(math.floor(known[0]) + 2 * step) if known else Fraction(0)
    middle = Fraction((ends[0] + ends[1]) / 2)
    tree = ("num", middle)
    is_inside = _value(low) < _value(tree) and _value(tree) < _value(high)
    return middle if is_inside else None


def _value(tree: Tree | None) -> Any:
    value = real_value(tree) if tree is not None else None
    if value is None or math.isinf(float(value)):
        raise _Unknown
    return value


def _at(tree: Tree, point: dict[str, Fraction]) -> Tree:
    if tree[0] == "sym":
        return ("num", point[tree[1]])
    return tuple(_at(part, point) if isinstance(part, tuple) else part for part in tree)


def _replaced(tree: Tree, name: str, value: Tree) -> Tree:
    if tree == ("sym", name):
        return value
    return tuple(_replaced(part, name, value) if isinstance(part, tuple) else part for part in tree)


def _forms(tree: Tree, breaks: list[Polynomial]) -> list[Form]:
    """The tree as a rational function, one for each choice of signs of its absolute values."""
    kind = tree[0]
    if kind == "sym":
        return [((Fraction(0), Fraction(1)), _ONE)]
    if not symbols_of(tree):
        return [((_constant(tree),), _ONE)]
    if kind == "call" and tree[1] == "abs":
        inner = _forms(tree[2], breaks)
        breaks += itertools.chain.from_iterable(inner)
        return _few([(part, q) for p, q in inner for part in (p, tuple(-c for c in p))])
    if kind == "pow" and tree[2][0] == "num" and tree[2][1].denominator == 1:
        power = int(tree[2][1])
        base = _forms(tree[1], breaks)
        if abs(power) > MAX_DEGREE:
            raise _Unknown
        # A pole of the base stays one of its inverse.
        breaks += [q for _, q in base]
        pairs = base if power >= 0 else [(q, p) for p, q in base]
        return [(_power(p, abs(power)), _power(q, abs(power))) for p, q in pairs]
    if kind not in ("sum", "prod"):
        raise _Unknown
    combined = _forms(tree[1], breaks)
    for child in tree[2:]:
        parts = _forms(child, breaks)
        join = _added if kind == "sum" else _multiplied
        combined = _few([join(one, other) for one in combined for other in parts])
    return combined


def _few(forms: list[Form]) -> list[Form]:
    if len(forms) > MAX_FORMS:
        raise _Unknown
    return forms


def _constant(tree: Tree) -> Fraction:
    """A rational constant, as folding its numbers gives it."""
    if tree[0] == "num":
        return tree[1]
    if tree[0] in ("sum", "prod"):
        values = [_constant(child) for child in tree[1:]]
        return sum(values) if tree[0] == "sum" else math.prod(values)
    if tree[0] == "pow" and tree[2][0] == "num" and tree[2][1].denominator == 1:
        base, power = _constant(tree[1]), int(tree[2][1])
        if abs(power) <= MAX_DEGREE and (base or power > 0):
            return base**power
    raise _Unknown


def _added(one: Form, other: Form) -> Form:
    (p, q), (r, s) = one, other
    total = itertools.zip_longest(_product(p, s), _product(r, q), fillvalue=Fraction(0))
    return tuple(a + b for a, b in total), _product(q, s)


def _multiplied(one: Form, other: Form) -> Form:
    return _product(one[0], other[0]), _product(one[1], other[1])


def _power(polynomial: Polynomial, power: int) -> Polynomial:
    result: Polynomial = _ONE
    for _ in range(power):
        result = _product(result, polynomial)
    return result


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    if len(one) + len(other) - 2 > MAX_DEGREE:
        raise _Unknown
    result = [Fraction(0)] * (len(one) + len(other) - 1)
    for k, a in enumerate(one):
        for m, b in enumerate(other):
            result[k + m] += a * b
    return tuple(result)


def _real_roots(polynomial: Polynomial) -> list[Tree]:
    """Real roots, each once: rational ones and those of a quadratic. Raises _Unknown."""
    rest = _stripped(polynomial)
    if len(rest) < 2:
        return []
    rest = _without_repeated_factors(rest)
    with mp.workdps(ROOT_DIGITS):
        coefficients = [mp.mpf(c.numerator) / c.denominator for c in reversed(rest)]
        # Of degree 1 on, its roots are known to these digits.
        near = [mp.re(root) for root in mp.polyroots(coefficients, 200, extraprec=400)]
        scale = 10**40
        guesses = {
            Fraction(int(mp.nint(root * scale)), scale).limit_denominator(10**9) for root in near
        }
    roots = [root for root in guesses if sum(c * root**k for k, c in enumerate(rest)) == 0]
    for root in roots:
        rest = _divided(rest, [-root, Fraction(1)])[0]
    if len(rest) > 3:
        raise _Unknown
    found: list[Tree] = [("num", root) for root in roots]
    return found + (_quadratic_roots(*(("num", c) for c in rest)) if len(rest) == 3 else [])


def _quadratic_roots(c: Tree, b: Tree, a: Tree) -> list[Tree]:
    """Real roots of ax^2+bx+c, a not 0."""
    discriminant = ("sum", ("prod", b, b), ("prod", ("num", Fraction(-4)), a, c))
    sign = _sign(discriminant)
    if sign is None or sign < 0:
        return []
    root = ("pow", discriminant, ("num", Fraction(1, 2)))
    half = ("pow", ("prod", ("num", Fraction(2)), a), ("num", Fraction(-1)))
    minus = ("prod", ("num", Fraction(-1)), b)
    signs = (Fraction(-1), Fraction(1)) if sign else (Fraction(0),)
    return [("prod", ("sum", minus, ("prod", ("num", way), root)), half) for way in signs]


def _roots_of_quadratic(difference: Tree, name: str) -> list[Tree]:
    """Roots of a polynomial of degree 1 or 2 with any constants. Raises _Unknown."""
    c, up, down = (_at(difference, {name: Fraction(value)}) for value in (0, 1, -1))
    half, minus = ("num", Fraction(1, 2)), ("num", Fraction(-1))
    b = ("prod", half, ("sum", up, ("prod", minus, down)))
    a = ("sum", ("prod", half, ("sum", up, down)), ("prod", minus, c))
    x = ("sym", name)
    if not same_value(difference, ("sum", ("prod", a, x, x), ("prod", b, x), c)):
        raise _Unknown
    if not same_value(a, _ZERO):
        return _quadratic_roots(c, b, a)
    if same_value(b, _ZERO) is not False:
        raise _Unknown
    return [("prod", minus, c, ("pow", b, minus))]


def _stripped(coefficients: Polynomial | list[Fraction]) -> list[Fraction]:
    values = list(coefficients)
    while values and values[-1] == 0:
        values.pop()
    return values


def _without_repeated_factors(coefficients: list[Fraction]) -> list[Fraction]:
    derivative = [k * value for k, value in enumerate(coefficients)][1:]
    common, rest = coefficients, derivative
    while rest:
        common, rest = rest, _divided(common, rest)[1]
    return _divided(coefficients, common)[0]


def _divided(one: list[Fraction], other: list[Fraction]) -> tuple[list[Fraction], list[Fraction]]:
    """Quotient and remainder, without leading zeros."""
    rest = list(one)
    quotient = [Fraction(0)] * max(1, len(one) - len(other) + 1)
    while len(rest) >= len(other):
        factor = rest[-1] / other[-1]
        shift = len(rest) - len(other)
        quotient[shift] = factor
        for k, value in enumerate(other):
            rest[shift + k] -= factor * value
        rest.pop()
        while rest and rest[-1] == 0:
            rest.pop()
    return quotient, rest


def _in_order(cuts: list[Tree]) -> list[Tree]:
    """Cuts from low to high, each once."""
    kept: list[Tree] = []
    for cut in sorted(cuts, key=lambda tree: float(_value(tree))):
        if not kept or same_value(kept[-1], cut) is not True:
            kept.append(cut)
    return kept
