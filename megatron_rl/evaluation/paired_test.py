"""The paired test of two evaluations on the same problems. Used by the launcher.

The sign-flip permutation test on the differences by problem. If the two models are equal, swapping
their completions on one problem changes no probability, so each difference has either sign with
equal chance. p is the share of all 2^problems choices of signs whose sum is at least as far from 0
as the observed one. The test assumes nothing about the distribution of differences. Its level holds
for any number of problems, if both models have as many completions of each. With one completion per
problem it is McNemar's exact test. A t-test's level holds for many problems only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

_MOST_STATES = 300_000_000
"""Cells that the exact count may visit, a few seconds; above that, signs are drawn."""
_DRAWS = 100_000
_DRAWN_AT_ONCE = 1_000
_SEED = 0
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PairedTest:
    """The difference of two evaluations on the problems that both have."""

    difference: float
    """Mean over problems of the second accuracy minus the first."""
    se: float | None
    """Sample standard deviation of the differences over sqrt(problems); None for one problem."""
    p: float
    """Two-sided."""
    problems: int
    higher: int
    """Problems on which the second evaluation is better."""
    lower: int
    is_exact: bool
    """Whether all choices of signs were counted, rather than 100,000 drawn ones."""


def paired_test(differences: Sequence[Fraction]) -> PairedTest:
    """Test the hypothesis that each difference has either sign with equal chance.

    differences: one per problem, at least one, as fractions of numbers of completions.
    """
    count = len(differences)
    values = np.array([float(d) for d in differences])
    mean = float(sum(differences, Fraction(0)) / count)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else None
    steps = _in_steps(differences)
    is_exact = len(steps) * (2 * sum(steps) + 1) <= _MOST_STATES
    seen = abs(sum(_in_steps(differences, keep_sign=True)))
    p = _exact_p(steps, seen) if is_exact else _drawn_p(values)
    higher, lower = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return PairedTest(mean, error, p, count, higher, lower, is_exact)


def _in_steps(differences: Sequence[Fraction], *, keep_sign: bool = False) -> list[int]:
    """The differences other than 0, as multiples of their greatest common divisor."""
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
    """The same from drawn signs; the observed signs count as a draw, so p is never 0."""
    chance = np.random.default_rng(_SEED)
    seen = abs(float(differences.sum())) - _ROUNDING
    hits = 0
    for _ in range(_DRAWS // _DRAWN_AT_ONCE):
        signs = chance.integers(0, 2, (_DRAWN_AT_ONCE, len(differences))) * 2 - 1
        hits += int((np.abs(signs @ differences) >= seen).sum())
    return (1 + hits) / (1 + _DRAWS)
