"""Whether two expressions are equal, by their values.

Runs in grading processes. Rational values are exact. Others are computed with 50 digits, and with
200 before they are called equal. Expressions with symbols are compared at fixed points, positive
and negative: they are equal when they agree wherever both are real, at four points or more.
Every number is bounded, so no expression takes long.
"""

import math
import random
from fractions import Fraction

import mpmath
from mpmath import mp

from verification.math.expression import Tree, has_constant, symbols_of

MAX_BITS = 6000
MAX_EXPONENT = 20_000
MAX_POINTS = 14
ENOUGH_POINTS = 5
DIGITS = 50
SURE_DIGITS = 200
# Names that mathematics gives to whole numbers; (-1)^n has no real value between them.
_WHOLE_NAMES = frozenset("nmk")

Value = Fraction | mpmath.mpf | mpmath.mpc


class Undefined(ArithmeticError):
    """The expression has no value there, such as a division by zero."""


class Unbounded(ArithmeticError):
    """The value is too large to compute with."""


def same_value(first: Tree, second: Tree) -> bool | None:
    """Whether two trees are equal expressions; None when no value could be computed."""
    names = sorted(symbols_of(first) | symbols_of(second))
    is_complex = has_constant(first, "i") or has_constant(second, "i")
    agreed = 0
    try:
        for point in range(MAX_POINTS if names else 1):
            values = values_at(point, names)
            agrees = _agree_at(first, second, values, is_real=bool(names) and not is_complex)
            if agrees is False:
                return False
            agreed += agrees is True
            if agreed >= ENOUGH_POINTS:
                return True
    except (Unbounded, OverflowError, RecursionError):
        return None
    return agreed >= (2 if names else 1) or None


def is_constant_ratio(first: Tree, second: Tree) -> bool | None:
    """Whether one expression is a constant multiple, not 0, of the other."""
    names = sorted(symbols_of(first) | symbols_of(second))
    if not names:
        return None
    ratio_of = ("prod", first, ("pow", second, ("num", Fraction(-1))))
    ratio = None
    agreed = 0
    try:
        for point in range(MAX_POINTS):
            try:
                with mp.workdps(DIGITS):
                    value = evaluate(ratio_of, values_at(point, names))
            except Undefined:
                continue
            if ratio is None:
                ratio = value
            if value == 0 or not is_close(value, ratio, DIGITS):
                return False
            agreed += 1
    except (Unbounded, OverflowError, RecursionError):
        return None
    return agreed >= ENOUGH_POINTS or None


def real_value(tree: Tree) -> mpmath.mpf | None:
    """Value of a tree without symbols as a real number of 50 digits; None when it has none."""
    if symbols_of(tree):
        return None
    try:
        with mp.workdps(DIGITS):
            value = evaluate(tree, {})
            return mp.re(_inexact(value)) if is_real_value(value) else None
    except (ArithmeticError, RecursionError):
        return None


def values_at(point: int, names: list[str]) -> dict[str, Fraction]:
    """Values of symbols at one of the fixed points, the same in every process."""
    values = {}
    for name in names:
        draw = random.Random(f"{point} {name!a}")
        if name[0] in _WHOLE_NAMES and (len(name) == 1 or name[1] in "_'"):
            value = Fraction(draw.choice([-7, -4, -3, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12]))
        else:
            value = Fraction(draw.randrange(200, 4000), draw.choice([997, 1009, 1013]))
            # Near 1 no term of a high power drowns the others; roots like large values; and roots
            # and logarithms want a point where all is positive.
            value = {2: 1 + (value - 2) / 100, 3: 9 * value}.get(point % 4, value)
            value = -value if point % 4 and draw.random() < 0.6 else value
        values[name] = value
    return values


def _agree_at(
    first: Tree, second: Tree, values: dict[str, Fraction], *, is_real: bool
) -> bool | None:
    """Whether both trees have the same value at a point; None where one has none to compare."""
    a, b = (_value_or_none(tree, values, DIGITS) for tree in (first, second))
    if a is None or b is None:
        # 1/0 is no number; but where symbols have values the point may be to blame.
        return None if values or a is b else False
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    if is_real and not (is_real_value(a) and is_real_value(b)):
        return None
    if not is_close(a, b, DIGITS):
        return False
    a, b = (_value_or_none(tree, values, SURE_DIGITS) for tree in (first, second))
    return None if a is None or b is None else is_close(a, b, SURE_DIGITS)


def _value_or_none(tree: Tree, values: dict[str, Fraction], digits: int) -> Value | None:
    with mp.workdps(digits):
        try:
            return evaluate(tree, values)
        except Undefined:
            return None


def is_close(a: Value, b: Value, digits: int) -> bool:
    """Whether two values agree in two thirds of the digits they were computed with."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    with mp.workdps(digits):
        a, b = _inexact(a), _inexact(b)
        if mp.isinf(a) or mp.isinf(b):
            return bool(a == b)
        return bool(abs(a - b) <= mp.mpf(10) ** (-digits * 2 // 3) * max(1, abs(a), abs(b)))


def is_real_value(value: Value) -> bool:
    """Whether a value has no imaginary part but rounding."""
    if not isinstance(value, mpmath.mpc):
        return True
    return bool(abs(value.imag) <= mp.mpf(10) ** (-mp.dps * 2 // 3) * max(1, abs(value)))


def evaluate(tree: Tree, values: dict[str, Fraction]) -> Value:
    """Value of a tree at a point, in mpmath's working precision. Raises Undefined, Unbounded."""
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind == "sym":
        return values[tree[1]]
    if kind == "const":
        return _constant(tree[1])
    if kind == "pow":
        return _power(evaluate(tree[1], values), evaluate(tree[2], values))
    if kind == "call":
        arguments = [evaluate(child, values) for child in tree[2:]]
        return _bounded(_call(tree[1], arguments))
    result: Value = Fraction(int(kind == "prod"))
    for child in tree[1:]:
        value = evaluate(child, values)
        if isinstance(result, Fraction) != isinstance(value, Fraction):
            result, value = _inexact(result), _inexact(value)
        result = _bounded(result * value if kind == "prod" else result + value)
    return result


def _constant(name: str) -> Value:
    if name == "infty":
        return mp.inf
    return {"pi": +mp.pi, "e": +mp.e, "i": mpmath.mpc(0, 1)}[name]


def _inexact(value: Value) -> mpmath.mpf | mpmath.mpc:
    if isinstance(value, Fraction):
        return mp.mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise Unbounded
        return value
    if mp.isnan(value):
        raise Undefined
    if not mp.isinf(value) and value != 0 and abs(mp.mag(value)) > MAX_EXPONENT:
        raise Unbounded
    return value


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and base == 0 and exponent <= 0:
        if exponent == 0:
            return Fraction(1)
        raise Undefined
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > MAX_BITS and abs(base) not in (0, 1):
            return _inexact_power(_inexact(base), _inexact(exponent))
        return base ** int(exponent) if abs(base) != 1 else base ** (int(exponent) % 2)
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return _power(root, Fraction(exponent.numerator))
        # The real root of a negative number, as schools teach it, where there is one.
        if base < 0 and exponent.denominator % 2:
            sign = -1 if exponent.numerator % 2 else 1
            return sign * _inexact_power(_inexact(-base), _inexact(exponent))
    return _inexact_power(_inexact(base), _inexact(exponent))


def _inexact_power(base: mpmath.mpf | mpmath.mpc, exponent: mpmath.mpf | mpmath.mpc) -> Value:
    if mp.isinf(base) or mp.isinf(exponent):
        raise Undefined
    if base == 0:
        if mp.re(exponent) > 0:
            return Fraction(0)
        raise Undefined
    if abs(mp.log(abs(base), 2) * abs(exponent)) > MAX_EXPONENT or mp.mag(exponent) > 60:
        raise Unbounded
    return _bounded(mp.power(base, exponent))


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    """The rational root of a rational, negative for a negative base and odd degree; or None."""
    if degree > 64 or (base < 0 and degree % 2 == 0):
        return None
    parts = []
    for part in (abs(base.numerator), base.denominator):
        root = part if degree == 1 else _whole_root(part, degree)
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(parts[0] if base > 0 else -parts[0], parts[1])


def _whole_root(number: int, degree: int) -> int:
    if degree == 2:
        return math.isqrt(number)
    with mp.workdps(number.bit_length() // 3 + 15):
        return int(mp.nint(mp.root(number, degree))) if number else 0


def _call(name: str, arguments: list[Value]) -> Value:
    first = arguments[0]
    if name == "root":
        if not isinstance(arguments[1], Fraction) or arguments[1] == 0:
            raise Undefined
        return _power(first, 1 / arguments[1])
    if name in _COUNTS:
        return _count(name, arguments)
    if name in ("max", "min", "sign", "mod"):
        return _of_order(name, arguments)
    if name in ("floor", "ceil"):
        return _rounded(first, name)
    if name == "abs" and isinstance(first, Fraction):
        return abs(first)
    if mp.isinf(_inexact(first)):
        raise Undefined
    try:
        if name == "log":
            return mp.log(_inexact(first), _inexact(arguments[1]))
        return _FUNCTIONS[name](_inexact(first))
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined from error


def _count(name: str, arguments: list[Value]) -> Value:
    """Functions of whole numbers: of those that count, none is negative or large."""
    for argument in arguments:
        if not isinstance(argument, Fraction) or argument.denominator != 1:
            raise Undefined
        if name in ("gcd", "lcm"):
            continue
        if argument < 0:
            raise Undefined
        if argument > 500:
            raise Unbounded
    numbers = [int(argument) for argument in arguments if isinstance(argument, Fraction)]
    return Fraction(_COUNTS[name](*numbers))


def _of_order(name: str, arguments: list[Value]) -> Value:
    """Largest, least, sign and remainder, of real values alone."""
    if not all(is_real_value(argument) for argument in arguments):
        raise Undefined
    if not all(isinstance(argument, Fraction) for argument in arguments):
        arguments = [mp.re(_inexact(argument)) for argument in arguments]
    if name in ("max", "min"):
        return max(arguments) if name == "max" else min(arguments)
    first = arguments[0]
    if name == "sign":
        return Fraction((first > 0) - (first < 0))
    divisor = arguments[1]
    if divisor == 0 or mp.isinf(_inexact(first)):
        raise Undefined
    return _bounded(first - divisor * _rounded(first / divisor, "floor"))


def _rounded(value: Value, name: str) -> Fraction:
    if isinstance(value, Fraction):
        return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
    if not is_real_value(value) or mp.isinf(value):
        raise Undefined
    real = mp.re(value)
    if mp.mag(real) > mp.prec:
        raise Unbounded
    return Fraction(int(mp.floor(real) if name == "floor" else mp.ceil(real)))


def _exp(value: mpmath.mpf | mpmath.mpc) -> Value:
    if abs(value) > MAX_EXPONENT:
        raise Unbounded
    return mp.exp(value)


_COUNTS = {
    "factorial": math.factorial, "binom": math.comb, "perm": math.perm, "gcd": math.gcd,
    "lcm": math.lcm,
}  # fmt: skip
_FUNCTIONS = {
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc,
    "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth, "arcsin": mp.asin,
    "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "ln": mp.log, "exp": _exp,
    "abs": abs,
}  # fmt: skip
