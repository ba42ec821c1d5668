"""Means over seeds, their standard errors, and differences of paired seeds.

Used by `megatron-rl sweep`. Pure functions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    standard_error: float | None
    """Sample standard deviation over sqrt(n); None for one seed."""
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """What a variant differs by from the baseline, seed by seed."""

    difference: Estimate
    """Over the seeds that both have."""
    t: float | None
    """Mean over its standard error, with n - 1 degrees of freedom; None where that is none or 0."""
    higher: int
    """Seeds of a difference above 0."""
    lower: int
    """Seeds of one below 0."""
    sign_p: float | None
    """Chance of so uneven a split, or a more uneven one, between equals; None where all tie."""


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and standard error; None of nothing. A value that is not finite makes them so too."""
    if not values:
        return None
    count = len(values)
    with np.errstate(invalid="ignore", over="ignore"):
        error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else None
    return Estimate(mean_of(values), error, count)


def mean_of(values: Sequence[float]) -> float:
    """Mean; not finite where a value is not: diverged runs are shown as they are, not left out."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values))


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> PairedDifference | None:
    """The difference by seed; None where no seed has both. Ties count for neither sign."""
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    found = estimate(differences)
    if found is None:
        return None
    error = found.standard_error
    # Equal differences come out unequal in the last bit.
    has_spread = error is not None and error > _ROUNDING * abs(found.mean)
    higher = sum(difference > 0 for difference in differences)
    lower = sum(difference < 0 for difference in differences)
    return PairedDifference(
        found, found.mean / error if has_spread else None, higher, lower, sign_p(higher, lower)
    )


def sign_p(higher: int, lower: int) -> float | None:
    """Two-sided p of the exact sign test: binomial with probability 1/2; None without a sign."""
    count = higher + lower
    if not count:
        return None
    tail = sum(math.comb(count, k) for k in range(max(higher, lower), count + 1))
    return min(1.0, 2 * tail / 2**count)
