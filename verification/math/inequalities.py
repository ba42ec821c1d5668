"""Where an inequality in one variable holds: `x^2<1`, `\\frac{x+2}{x-2}\\le0`, `|2x-1|<3`.

Runs in grading processes. Both sides are rational functions and absolute values of them. Their
zeros, poles and sign changes cut the line; between two of these the inequality holds everywhere or
nowhere, so one rational point decides, and each cut is decided by itself.
"""

import itertools
from fractions import Fraction

import mpmath
from mpmath import mp

from verification.math.expression import Tree, symbols_of
from verification.math.values import (
    MAX_POINTS,
    Unbounded,
    Undefined,
    evaluate,
    is_constant_ratio,
    is_real_value,
    real_value,
    values_at,
)

MAX_DEGREE = 10
MAX_FORMS = 8
DIGITS = 120
# Of a value computed with DIGITS digits: below this it is 0, above its inverse it has a pole.
_TINY = mpmath.mpf(10) ** -60
_ONE = (Fraction(1),)

Polynomial = tuple[Fraction | mpmath.mpf, ...]
"""Coefficients, the constant first."""
Form = tuple[Polynomial, Polynomial]
"""Numerator and denominator."""
Stretch = tuple[mpmath.mpf, mpmath.mpf, bool]
"""Ends of an interval, and whether they belong to it: an open interval or a single point."""


def solution(difference: Tree, sign: str) -> list[Stretch] | None:
    """Where `difference sign 0` holds, in pieces; None beyond this module's functions."""
    names = symbols_of(difference)
    if len(names) != 1 or sign not in ("<", ">", "<=", ">="):
        return None
    name = next(iter(names))
    breaks: list[Polynomial] = []
    try:
        with mp.workdps(DIGITS):
            forms = _forms(difference, breaks)
            polynomials = {*breaks, *itertools.chain.from_iterable(forms)}
            cuts = _distinct([root for poly in polynomials for root in _real_roots(poly)])
            return _stretches(difference, name, sign, cuts)
    except (_Unknown, Unbounded, ArithmeticError, RecursionError, mpmath.libmp.NoConvergence):
        return None


def is_positive_multiple(first: Tree, second: Tree) -> bool | None:
    """Whether one expression is the other times a positive constant."""
    if not is_constant_ratio(first, second):
        return is_constant_ratio(first, second)
    names = sorted(symbols_of(first) | symbols_of(second))
    for point in range(MAX_POINTS):
        values = values_at(point, names)
        try:
            with mp.workdps(DIGITS):
                pair = [_inexact(evaluate(tree, values)) for tree in (first, second)]
        except (Undefined, Unbounded):
            continue
        if all(is_real_value(value) and value != 0 for value in pair):
            return bool((mp.re(pair[0]) > 0) == (mp.re(pair[1]) > 0))
    return None


class _Unknown(ValueError):
    """Not a rational function, or one of too high a degree."""


def _stretches(difference: Tree, name: str, sign: str, cuts: list) -> list[Stretch]:
    ends = [mp.ninf, *map(_inexact, cuts), mp.inf]
    found: list[Stretch] = []
    for k, (low, high) in enumerate(itertools.pairwise(ends)):
        if _holds(difference, name, sign, _between(low, high)):
            found.append((low, high, False))
        if k < len(cuts) and _holds(difference, name, sign, cuts[k]):
            found.append((ends[k + 1], ends[k + 1], True))
    return found


def _holds(difference: Tree, name: str, sign: str, place: Fraction | mpmath.mpf) -> bool:
    try:
        value = _inexact(evaluate(difference, {name: place}))
    except Undefined:
        return False
    if abs(value) > 1 / _TINY:
        return False
    value = mp.mpf(0) if abs(value) < _TINY else value
    return {"<": value < 0, ">": value > 0, "<=": value <= 0, ">=": value >= 0}[sign]


def _between(low: mpmath.mpf, high: mpmath.mpf) -> Fraction:
    """A rational point within an open interval."""
    if mp.isinf(low) and mp.isinf(high):
        return Fraction(0)
    if mp.isinf(low):
        return Fraction(int(mp.floor(high)) - 1)
    if mp.isinf(high):
        return Fraction(int(mp.ceil(low)) + 1)
    middle = (low + high) / 2
    scale = 10 ** (2 - min(0, int(mp.floor(mp.log10(high - low)))))
    return Fraction(int(mp.nint(middle * scale)), scale)


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


def _constant(tree: Tree) -> Fraction | mpmath.mpf:
    value = evaluate(tree, {})
    if isinstance(value, Fraction):
        return value
    real = real_value(tree)
    if real is None or mp.isinf(real):
        raise _Unknown
    return mp.re(value)


def _added(one: Form, other: Form) -> Form:
    (p, q), (r, s) = one, other
    cross = (_product(p, s), _product(r, q))
    total = itertools.zip_longest(*cross, fillvalue=Fraction(0))
    return tuple(_sum_of(a, b) for a, b in total), _product(q, s)


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
    result: list = [Fraction(0)] * (len(one) + len(other) - 1)
    for k, a in enumerate(one):
        for m, b in enumerate(other):
            result[k + m] = _sum_of(result[k + m], _product_of(a, b))
    return tuple(result)


def _sum_of(a: Fraction | mpmath.mpf, b: Fraction | mpmath.mpf) -> Fraction | mpmath.mpf:
    is_exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return a + b if is_exact else _inexact(a) + _inexact(b)


def _product_of(a: Fraction | mpmath.mpf, b: Fraction | mpmath.mpf) -> Fraction | mpmath.mpf:
    is_exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return a * b if is_exact else _inexact(a) * _inexact(b)


def _inexact(value: Fraction | mpmath.mpf) -> mpmath.mpf:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _real_roots(polynomial: Polynomial) -> list[Fraction | mpmath.mpf]:
    """Real roots, each once; the rational ones exactly."""
    coefficients = list(polynomial)
    while coefficients and coefficients[-1] == 0:
        coefficients.pop()
    if len(coefficients) < 2:
        return []
    if not all(isinstance(value, Fraction) for value in coefficients):
        return _roots_of_quadratic([_inexact(value) for value in coefficients])
    exact = _without_repeated_factors(coefficients)
    roots = mp.polyroots([_inexact(value) for value in reversed(exact)], 200, extraprec=400)
    real = [mp.re(root) for root in roots if abs(mp.im(root)) < _TINY * max(1, abs(root))]
    return [_rational_root(exact, root) for root in real]


def _roots_of_quadratic(coefficients: list[mpmath.mpf]) -> list[mpmath.mpf]:
    if len(coefficients) == 2:
        return [-coefficients[0] / coefficients[1]]
    if len(coefficients) > 3:
        raise _Unknown
    c, b, a = coefficients
    discriminant = b * b - 4 * a * c
    if abs(discriminant) < _TINY:
        return [-b / (2 * a)]
    root = mp.sqrt(discriminant) if discriminant > 0 else None
    return [] if root is None else [(-b - root) / (2 * a), (-b + root) / (2 * a)]


def _rational_root(exact: list[Fraction], root: mpmath.mpf) -> Fraction | mpmath.mpf:
    scale = 10**40
    near = Fraction(int(mp.nint(root * scale)), scale).limit_denominator(10**9)
    return near if sum(c * near**k for k, c in enumerate(exact)) == 0 else root


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


def _distinct(roots: list[Fraction | mpmath.mpf]) -> list[Fraction | mpmath.mpf]:
    """Roots in order, each once; a rational one in its exact form."""
    ordered = sorted(roots, key=lambda root: (_inexact(root), not isinstance(root, Fraction)))
    kept: list[Fraction | mpmath.mpf] = []
    for root in ordered:
        if kept and abs(_inexact(root) - _inexact(kept[-1])) < _TINY:
            kept[-1] = root if isinstance(root, Fraction) else kept[-1]
        else:
            kept.append(root)
    return kept
