"""Exact results of functions of rational numbers, and exceptions of computing a value.

Runs in grading processes. Each function returns None if the result is not rational, or has
more than MAX_EXACT_BITS.
"""

import math
from fractions import Fraction

from flint import arb, ctx, fmpq, fmpz

MAX_EXACT_BITS = 200_000
MAX_ROOT_DEGREE = 10_000

# Costs a second or two: functions of 100,000 bits cost about 25 ms each.
MAX_WORK = 5_000_000


COUNTS = {
    "factorial": math.factorial, "binom": math.comb, "perm": math.perm, "gcd": math.gcd,
    "lcm": math.lcm,
}  # fmt: skip


class Undefined(ArithmeticError):
    """The expression has no value there, such as a division by zero."""


class Unbounded(ArithmeticError):
    """The value is too large, or costs too much, to compute with."""


class Exhausted(Unbounded):
    """The comparison has used up its time."""


class Unsure(ArithmeticError):
    """More bits are needed to tell on which side of a jump a value lies."""


class Work:
    """Remaining time of one comparison."""

    def __init__(self, units: int = MAX_WORK) -> None:
        self._left = units

    def spend(self, units: int) -> None:
        """Subtract units. Exhausted when none are left."""
        self._left -= units
        if self._left < 0:
            raise Exhausted


def exact_power(base: fmpq, exponent: fmpq) -> fmpq | None:
    """A power if it is rational and small enough to write out."""
    if base < 0 and exponent.q % 2 == 0:
        return None
    root = base if exponent.q == 1 else _exact_root(base, exponent.q)
    if root is None:
        return None
    power = exponent.p
    if abs(root) == 1:
        return root if power % 2 else fmpq(1)
    bits = max(root.p.height_bits(), root.q.height_bits())
    return root ** int(power) if abs(power) * bits <= MAX_EXACT_BITS else None


def _exact_root(base: fmpq, degree: fmpz) -> fmpq | None:
    if degree > MAX_ROOT_DEGREE:
        return None
    parts = [part.root(int(degree)) for part in (abs(base.p), base.q)]
    if parts[0] ** int(degree) != abs(base.p) or parts[1] ** int(degree) != base.q:
        return None
    return fmpq(-parts[0] if base < 0 else parts[0], parts[1])


def exact_logarithm(value: fmpq, base: fmpq) -> fmpq | None:
    """log_base(value) if it is a fraction with a small denominator."""
    if value <= 0 or base <= 0 or base == 1:
        return None
    with ctx.workprec(64):
        ratio = float((arb(value).log() / arb(base).log()).mid())
    if not abs(ratio) < MAX_EXACT_BITS:
        return None
    guess = Fraction(ratio).limit_denominator(60)
    power = exact_power(base, fmpq(guess.numerator))
    is_exact = power is not None and power == exact_power(value, fmpq(guess.denominator))
    return fmpq(guess.numerator, guess.denominator) if is_exact else None
