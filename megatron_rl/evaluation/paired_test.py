"""Paired sign-flip permutation test of two evaluations on the same problems. Used by the launcher.

If the models are equal, swapping their completions of a problem changes no probability: the sign of
each difference is a fair coin. p is the share of all 2^problems choices of signs whose sum is at
least as far from 0 as the observed sum. The test assumes nothing about the distribution of the
differences. Its level is exact for any number of problems if both models have equally many
completions of each; a t-test needs many problems. With one completion per problem it is McNemar's
exact test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_rl.evaluation.figures import standard_error

_MOST_STATES = 300_000_000
"""Limit of the exact count in cells, a few seconds of work; beyond it, signs are drawn."""
_DRAWS = 100_000
_DRAWN_AT_ONCE = 1_000
_SEED = 0
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PairedTest:
    """Difference of two evaluations on their common problems."""

    difference: float
    """Mean over problems of the second accuracy minus the first."""
    se: float | None
    """Standard error of the difference; None for one problem."""
    p: float
    """Two-sided."""
    problems: int
    higher: int
    """Problems on which the second evaluation is better."""
    lower: int
    is_exact: bool
    """Whether p counts all choices of signs; else 100,000 draws."""


def paired_test(differences: Sequence[Fraction]) -> PairedTest:
    """Test the hypothesis that each difference has either sign with equal chance.

    differences: one per problem, at least one, as fractions of numbers of completions.
    """
    count = len(differences)
    values = np.array([float(d) for d in differences])
    mean = float(sum(differences, Fraction(0)) / count)
    steps = _in_steps(differences)
    is_exact = len(steps) * (2 * sum(steps) + 1) <= _MOST_STATES
    seen = abs(sum(_in_steps(differences, keep_sign=True)))
    p = _exact_p(steps, seen) if is_exact else _drawn_p(values)
    higher, lower = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return PairedTest(mean, standard_error(values), p, count, higher, lower, is_exact)


def _in_steps(differences: Sequence[Fraction], *, keep_sign: bool = False) -> list[int]:
    """The nonzero differences as multiples of their greatest common divisor."""
    found = [d if keep_sign else abs(d) for d in differences if d]
    denominator = math.lcm(*(d.denominator for d in found))
    whole = [d.numerator * (denominator // d.denominator) for d in found]
    step = math.gcd(*whole) or 1
    return [number // step for number in whole]


def _exact_p(steps: list[int], seen: int) -> float:
    """Share of the choices of signs whose sum is at least `seen` away from 0."""
    total = sum(steps)
    # chances[s]: of the sum s - total; the chance of either sign is 1/2.
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for step in steps:
        moved = np.zeros_like(chances)
        moved[step:] += chances[: len(chances) - step]
        moved[: len(chances) - step] += chances[step:]
        chances = moved / 2
    sums = np.arange(-total, total + 1)
    return min(1.0, float(chances[np.abs(sums) >= seen].sum()))


def _drawn_p(differences: np.ndarray) -> float:
    """`_exact_p` from drawn signs; the observed signs count as a draw, so p is never 0."""
    chance = np.random.default_rng(_SEED)
    seen = abs(float(differences.sum())) - _ROUNDING
    hits = 0
    for _ in range(_DRAWS // _DRAWN_AT_ONCE):
        signs = chance.integers(0, 2, (_DRAWN_AT_ONCE, len(differences))) * 2 - 1
        hits += int((np.abs(signs @ differences) >= seen).sum())
    return (1 + hits) / (1 + _DRAWS)
