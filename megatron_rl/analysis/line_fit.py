"""A straight line by least squares, with standard errors for single points and for clusters.

Pure functions; used by `megatron-rl analyse lengths`.
"""

import math

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError


class LineFit(msgspec.Struct, frozen=True):
    """y = slope * x + intercept."""

    slope: float
    slope_se: float
    intercept: float
    intercept_se: float
    r_squared: float | None
    """Share of the variance of y; None where y does not vary."""
    points: int
    degrees_of_freedom: int
    """Of t = (estimate - truth) / standard error: points - 2, or clusters - 1."""
    residual_autocorrelation: float | None = None
    """Between neighbours in the order given; None for clusters."""


def fit_line(x: np.ndarray, y: np.ndarray) -> LineFit:
    """Least squares for points whose errors are independent and equally large.

    x, y: [points]. Raises InputError for fewer than three points, or where x does not vary.
    """
    centred, slope, residuals = _least_squares(x, y)
    free = len(x) - 2
    variance = float(residuals @ residuals) / free
    spread = float(centred @ centred)
    mean = float(x.mean())
    energy = float(residuals @ residuals)
    return LineFit(
        slope=slope,
        slope_se=math.sqrt(variance / spread),
        intercept=float(y.mean()) - slope * mean,
        intercept_se=math.sqrt(variance * (1 / len(x) + mean**2 / spread)),
        r_squared=_r_squared(y, residuals),
        points=len(x),
        degrees_of_freedom=free,
        residual_autocorrelation=float(residuals[1:] @ residuals[:-1]) / energy if energy else None,
    )


def fit_line_clustered(x: np.ndarray, y: np.ndarray, clusters: np.ndarray) -> LineFit:
    """Least squares with standard errors that allow for any dependence within clusters.

    clusters: [points] of int, the cluster of each. Raises InputError, also for fewer than two
    clusters. Source: Cameron and Miller, "A practitioner's guide to cluster-robust inference"
    (2015), eq. 11 with the factor of eq. 12.
    """
    centred, slope, residuals = _least_squares(x, y)
    _, numbers = np.unique(clusters, return_inverse=True)
    count = int(numbers.max()) + 1
    if count < 2:
        raise InputError("all completions are of one prompt: a fit needs two prompts or more")
    # In the basis (1, x - mean) the inverse of X'X is diagonal.
    scores = np.stack([np.bincount(numbers, residuals * column) for column in (1 + 0 * x, centred)])
    inverse = np.array([1 / len(x), 1 / float(centred @ centred)])
    factor = count / (count - 1) * (len(x) - 1) / (len(x) - 2)
    covariance = factor * inverse[:, None] * (scores @ scores.T) * inverse
    to_intercept = np.array([1.0, -x.mean()])
    return LineFit(
        slope=slope,
        slope_se=math.sqrt(covariance[1, 1]),
        intercept=float(y.mean()) - slope * float(x.mean()),
        intercept_se=math.sqrt(to_intercept @ covariance @ to_intercept),
        r_squared=_r_squared(y, residuals),
        points=len(x),
        degrees_of_freedom=count - 1,
    )


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """(x less its mean, slope, residuals). Raises InputError."""
    if len(x) < 3:
        raise InputError(f"a fit needs three points or more, and there are {len(x)}")
    centred = x - x.mean()
    spread = float(centred @ centred)
    if spread <= len(x) * (1e-12 * float(np.abs(x).max())) ** 2:
        raise InputError("all lengths are equal: there is no fit against the logarithm of length")
    slope = float(centred @ y) / spread
    return centred, slope, y - y.mean() - slope * centred


def _r_squared(y: np.ndarray, residuals: np.ndarray) -> float | None:
    total = float(((y - y.mean()) ** 2).sum())
    return 1 - float(residuals @ residuals) / total if total > 0 else None
