"""Values of expressions: exact rationals, or balls that surely hold the value.

Runs in grading processes. FLINT's balls (`arb`) carry a proven bound of their error. No ball tells
a value on a jump or a branch cut from a value near it: `Unsure` asks for more bits. From
`settle_bits` on, a ball that holds such a point and is smaller than 2^-settle_bits counts as that
point.
"""

import math
from collections.abc import Callable
from fractions import Fraction

from flint import acb, arb, ctx, fmpq, fmpz

from verification.math.exact import (
    COUNTS,
    MAX_EXACT_BITS,
    Unbounded,
    Undefined,
    Unsure,
    Work,
    exact_logarithm,
    exact_power,
)
from verification.math.trees import Tree

MAX_MAGNITUDE_BITS = 50
MAX_COUNTED = 5000

Value = fmpq | acb | float
"""A rational, a ball, or an infinity."""

_ONE = fmpq(1)


class Evaluation:
    """Values of trees at one point with one precision.

    `size_bits` grows with the bits of every number on the way: digits written, digits before the
    point of what is large, zeros behind the point of what is small. In real mode every part of an
    expression must be real.
    """

    def __init__(
        self,
        values: dict[str, Fraction],
        precision_bits: int,
        *,
        settle_bits: int,
        is_real: bool,
        work: Work,
    ) -> None:
        self._values = {name: fmpq(x.numerator, x.denominator) for name, x in values.items()}
        self._precision_bits = precision_bits
        self._least = arb(2) ** -settle_bits if settle_bits else None
        self._is_real = is_real
        self._work = work
        self.size_bits = 0

    def value(self, tree: Tree) -> Value:
        """Value of a tree. Raises Undefined, Unbounded, Unsure."""
        with ctx.workprec(self._precision_bits):
            return self._value(tree)

    def is_zero(self, value: Value) -> bool:
        """Whether a value is zero. Raises Unsure."""
        if not isinstance(value, acb):
            return value == 0
        return self._is_zero(value.real) and self._is_zero(value.imag)

    def difference(self, first: Value, second: Value) -> Value:
        """Difference of two values; infinity if just one is infinite."""
        if isinstance(first, float) or isinstance(second, float):
            return fmpq(0) if first is second or first == second else math.inf
        with ctx.workprec(self._precision_bits):
            return first - second

    def sign(self, value: Value) -> int:
        """Sign of a real value or infinity. Raises Undefined, Unsure."""
        if isinstance(value, acb):
            real = self._real(value)
            return 0 if self._is_zero(real) else 1 if real > 0 else -1
        return (value > 0) - (value < 0)

    def real(self, value: Value) -> arb | float:
        """A real value as a ball, or an infinity. Raises Undefined for others, Unsure."""
        return value if isinstance(value, float) else self._real(value)

    def _is_zero(self, part: arb) -> bool:
        if not part.is_finite():
            raise Unsure
        if not part.contains(0):
            return False
        if part.is_zero() or (self._least is not None and part.abs_upper() < self._least):
            return True
        raise Unsure

    def _value(self, tree: Tree) -> Value:
        kind = tree[0]
        if kind == "num":
            value: Value = fmpq(tree[1].numerator, tree[1].denominator)
        elif kind == "sym":
            value = self._values[tree[1]]
        elif kind == "const":
            return self._constant(tree[1])
        elif kind == "pow":
            value = self._power(self._value(tree[1]), self._value(tree[2]))
        elif kind == "call":
            value = self._call(tree[1], [self._value(child) for child in tree[2:]])
        elif kind == "apply":
            # Nothing is known of a named function.
            raise Unbounded
        else:
            return self._fold(kind, tree[1:])
        return self._measured(value)

    def _constant(self, name: str) -> Value:
        if name == "infty":
            return math.inf
        if name == "i" and self._is_real:
            raise Undefined
        return {"pi": acb.pi, "e": lambda: acb(arb.const_e()), "i": lambda: acb(0, 1)}[name]()

    def _fold(self, kind: str, children: tuple[Tree, ...]) -> Value:
        result = self._value(children[0])
        for child in children[1:]:
            value = self._value(child)
            if isinstance(result, float) or isinstance(value, float):
                result = self._infinite(kind, result, value)
            else:
                result = result * value if kind == "prod" else result + value
            result = self._measured(result)
        return result

    def _infinite(self, kind: str, first: Value, second: Value) -> Value:
        if kind == "prod":
            other = second if isinstance(first, float) else first
            if other not in (fmpq(1), fmpq(-1)):
                raise Undefined
            return math.copysign(math.inf, self.sign(first) * self.sign(second))
        raise Undefined

    def _measured(self, value: Value) -> Value:
        """The value, its size and cost counted. Raises Unsure for a ball without bounds."""
        if isinstance(value, float):
            return value
        if isinstance(value, fmpq):
            bits = value.p.height_bits() + value.q.height_bits()
            if bits > MAX_EXACT_BITS:
                raise Unbounded
            self.size_bits += bits
            self._work.spend(1 + bits // 8)
            return value
        self._work.spend(1 + self._precision_bits // 100)
        if not value.is_finite():
            raise Unsure
        if self._is_real and not value.imag.is_zero():
            raise Undefined
        self.size_bits += 1 + min(abs(_magnitude_bits(value)), 1 << 40)
        return value

    def _real(self, value: Value) -> arb:
        """A finite value as a real ball. Raises Undefined for others, Unsure."""
        if isinstance(value, float):
            raise Undefined
        if isinstance(value, fmpq):
            return arb(value)
        if not self._is_zero(value.imag):
            raise Undefined
        return value.real

    def _ball(self, value: Value) -> acb:
        """A finite value as a ball, on the real line if it is real."""
        if isinstance(value, acb):
            is_cut = not value.imag.is_zero() and value.imag.contains(0)
            return acb(self._real(value)) if is_cut else value
        return acb(self._real(value))

    def _rational(self, value: Value) -> fmpq | None:
        """The value as a rational number if it is known to be one."""
        if not isinstance(value, acb):
            return value if isinstance(value, fmpq) else None
        if not value.imag.contains(0) or not value.real.contains_integer():
            return None
        whole = value.real.unique_fmpz()
        if whole is None:
            raise Unsure
        return fmpq(whole) if self.is_zero(value - whole) else None

    def _whole(self, value: Value) -> fmpz:
        """The value as a whole number. Raises Undefined, Unsure."""
        rational = self._rational(value)
        if rational is None or rational.q != 1:
            raise Undefined
        return rational.p

    # --- powers -------------------------------------------------------------------------------

    def _power(self, base: Value, exponent: Value) -> Value:
        if isinstance(base, float) or isinstance(exponent, float):
            raise Undefined
        if isinstance(exponent, acb):
            return self._general_power(base, exponent)
        if exponent == 0:
            return _ONE
        if self.is_zero(base):
            if exponent < 0:
                raise Undefined
            return fmpq(0)
        if isinstance(base, fmpq):
            exact = exact_power(base, exponent)
            if exact is not None:
                return exact
        if exponent.q == 1:
            self._check_magnitude(base, exponent)
            return self._function(lambda: self._ball(base) ** acb(exponent))
        return self._root_power(self._ball(base), exponent)

    def _root_power(self, base: acb, exponent: fmpq) -> Value:
        """A power whose exponent is a fraction in lowest terms."""
        self._check_magnitude(base, exponent)
        if not base.imag.is_zero():
            return self._function(lambda: base ** acb(exponent))
        real = base.real
        if real < 0 and exponent.q % 2:
            # The real root of a negative number, as schools teach it, where there is one.
            sign = -1 if exponent.p % 2 else 1
            return self._function(lambda: acb(sign * _positive_power(-real, exponent)))
        if real < 0:
            if self._is_real:
                raise Undefined
            # Half-turns are exact: the square root of -4 has no real part.
            turn = (acb(exponent) if exponent.q > 2 else acb(fmpq(exponent.p % 4, 2))).exp_pi_i()
            return self._function(lambda: acb(_positive_power(-real, exponent)) * turn)
        return self._function(lambda: acb(_positive_power(real, exponent)))

    def _general_power(self, base: Value, exponent: acb) -> Value:
        if self.is_zero(base):
            if self._real(exponent) > 0:
                return fmpq(0)
            raise Undefined
        ball = self._ball(base)
        if self._is_real and ball.real < 0:
            raise Undefined
        self._check_magnitude(ball, exponent)
        return self._function(lambda: (ball.log() * exponent).exp())

    def _check_magnitude(self, base: Value, exponent: Value) -> None:
        """Raises Unbounded where a power would have too many digits."""
        bits = _magnitude_bits(acb(exponent))
        size = abs(_magnitude_bits(acb(base))) + 1
        if bits > 0 and bits + size.bit_length() > MAX_MAGNITUDE_BITS:
            raise Unbounded

    # --- functions ----------------------------------------------------------------------------

    def _function(self, compute: Callable[[], Value]) -> Value:
        self._work.spend(self._precision_bits)
        return compute()

    def _call(self, name: str, arguments: list[Value]) -> Value:
        first = arguments[0]
        if name == "root":
            degree = self._rational(arguments[1])
            if degree is None or degree == 0:
                raise Undefined
            return self._power(first, 1 / degree)
        if name in COUNTS:
            return self._count(name, arguments)
        if name in ("floor", "ceil"):
            return self._rounded(first, name)
        if name in ("max", "min"):
            return self._extreme(name, arguments)
        if name == "sign":
            return fmpq(self.sign(first))
        if name == "mod":
            return self._remainder(first, arguments[1])
        if name == "abs":
            return abs(first) if isinstance(first, fmpq) else acb(abs(self._ball(first)))
        if name == "log":
            return self._logarithm(first, arguments[1])
        return self._function(lambda: self._analytic(name, self._ball(first)))

    def _analytic(self, name: str, ball: acb) -> acb:
        if name == "ln":
            return self._ln(ball)
        if name in ("arcsin", "arccos"):
            return self._arc(name, ball)
        if name == "arccot":
            return acb.pi() / 2 if self.is_zero(ball) else (1 / ball).atan()
        if name in ("exp", "sinh", "cosh", "tanh", "coth"):
            self._check_magnitude(2, ball)
        if name in _RATIOS:
            top, bottom = _RATIOS[name]
            # Measured, for the sizes tell how far below the last digit tanh 500 differs from 1.
            value, divisor = self._measured(top(ball)), self._measured(bottom(ball))
            if self.is_zero(divisor):
                raise Undefined
            return value / divisor
        return _ENTIRE[name](ball)

    def _ln(self, ball: acb) -> acb:
        if self.is_zero(ball) or (self._is_real and ball.real < 0):
            raise Undefined
        return ball.log()

    def _arc(self, name: str, ball: acb) -> acb:
        """Arc sine or cosine, whose domain ends at 1 and -1."""
        for end in (1, -1):
            # At an end itself the ball would spill over it.
            if ball.real.contains(end) and self.is_zero(ball - end):
                ball = acb(end)
        if self._is_real and not abs(ball.real) <= 1:
            raise Undefined
        return ball.asin() if name == "arcsin" else ball.acos()

    def _logarithm(self, value: Value, base: Value) -> Value:
        number, base_number = self._rational(value), self._rational(base)
        if number is not None and base_number is not None:
            exact = exact_logarithm(number, base_number)
            if exact is not None:
                return exact
        top, bottom = self._ln(self._ball(value)), self._ln(self._ball(base))
        if self.is_zero(bottom):
            raise Undefined
        return self._function(lambda: top / bottom)

    def _count(self, name: str, arguments: list[Value]) -> Value:
        """Functions of whole numbers: of those that count, none is negative or large."""
        numbers = [self._whole(argument) for argument in arguments]
        if name not in ("gcd", "lcm"):
            if min(numbers) < 0:
                raise Undefined
            # A choice of few among many is small work: its complement is as many.
            most = min(numbers[1], numbers[0] - numbers[1]) if name == "binom" else max(numbers)
            if most > MAX_COUNTED or most * int(numbers[0]).bit_length() > MAX_EXACT_BITS:
                raise Unbounded
        return fmpq(COUNTS[name](*map(int, numbers)))

    def _rounded(self, value: Value, name: str) -> fmpq:
        rational = self._rational(value)
        if rational is not None:
            return fmpq(rational.floor() if name == "floor" else rational.ceil())
        real = self._real(value)
        if _magnitude_bits(acb(real)) > MAX_EXACT_BITS:
            raise Unbounded
        whole = (real.floor() if name == "floor" else real.ceil()).unique_fmpz()
        if whole is None:
            raise Unsure
        return fmpq(whole)

    def _extreme(self, name: str, arguments: list[Value]) -> Value:
        if len(arguments) < 2:
            # 150 min + 1 is a time with something added.
            raise Undefined
        best = arguments[0]
        for argument in arguments[1:]:
            sign = self.sign(self.difference(argument, best))
            best = argument if sign == (1 if name == "max" else -1) else best
        self.sign(best)
        return best

    def _remainder(self, value: Value, divisor: Value) -> Value:
        if isinstance(value, float) or isinstance(divisor, float) or self.is_zero(divisor):
            raise Undefined
        return value - divisor * self._rounded(value / divisor, "floor")


def _magnitude_bits(value: acb) -> int:
    """Bits before the point, or minus the zeros behind it; 0 for a ball around zero."""
    mantissa, exponent = value.abs_lower().man_exp()
    if mantissa == 0:
        mantissa, exponent = value.abs_upper().man_exp()
        # A surely small value is small; a wide ball around zero gives no information.
        return max(0, int(exponent) + mantissa.height_bits()) if mantissa else 0
    return int(exponent) + mantissa.height_bits()


def _positive_power(base: arb, exponent: fmpq) -> arb:
    if exponent.q == 2:
        return base.sqrt() ** arb(exponent.p)
    return base ** arb(exponent)


_RATIOS = {
    "tan": (acb.sin, acb.cos), "cot": (acb.cos, acb.sin), "sec": (lambda x: acb(1), acb.cos),
    "csc": (lambda x: acb(1), acb.sin), "coth": (acb.cosh, acb.sinh),
    "tanh": (acb.sinh, acb.cosh),
}  # fmt: skip
_ENTIRE = {
    "sin": acb.sin, "cos": acb.cos, "sinh": acb.sinh, "cosh": acb.cosh,
    "arctan": acb.atan, "exp": acb.exp,
}  # fmt: skip
