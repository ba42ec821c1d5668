"""Reward against length over a run's rollouts: reward = a * log(length) + b.

Used by `megatron-rl analyse lengths`. The reward excludes the length penalty, which would bias the
fit. Source: Magistral (arXiv 2506.10910), section on analysis.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import read_records, rollout_files

LENGTH_PART = "length"
BINS = 12


class LineFit(msgspec.Struct, frozen=True):
    """y = slope * x + intercept."""

    slope: float
    slope_se: float
    intercept: float
    intercept_se: float
    r_squared: float | None
    """Explained share of the variance of y; None when y is constant."""
    points: int
    degrees_of_freedom: int
    """Degrees of freedom of the t statistic: points - 2, or clusters - 1."""
    residual_autocorrelation: float | None = None
    """Autocorrelation of neighbouring points' residuals; None for clusters."""


class Means(msgspec.Struct, frozen=True):
    """Means over a step, or over completions of similar length."""

    step: int | None
    completions: int
    length_tokens: float
    reward: float
    """Without the length penalty."""


class LengthsResult(msgspec.Struct, frozen=True):
    """Result of `analyse lengths`; a section of analysis.json."""

    run: str
    left_out: dict[str, int]
    """Excluded rollouts, by reason."""
    by_step: LineFit | None
    """Mean reward of a step against the natural logarithm of its mean length; None for fewer than
    three steps, or equal lengths."""
    by_rollout: LineFit
    """Fit over completions; errors are clustered by prompt."""
    prompts: int
    steps: list[Means]
    bins: list[Means]
    """Bins of length in ascending order, with about as many completions each."""


@dataclass(frozen=True)
class Lengths:
    """Training completions of a run; arrays are [completions]."""

    steps: np.ndarray
    prompts: np.ndarray
    """Number of the prompt."""
    tokens: np.ndarray
    rewards: np.ndarray
    """Without the length penalty."""
    left_out: Counter[str]


def read_lengths(run_dir: Path) -> Lengths:
    """All graded training completions, dropped groups included.

    Completions of a dropped group count for the step of the next batch. Raises InputError.
    """
    torn: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    prompts: dict[str, int] = {}
    rows: list[tuple[int, int, int, float]] = []
    for file in rollout_files(run_dir):
        if file.step is None:
            continue
        for record in read_records(file.path, torn):
            if record.reward is None:
                left_out[f"not graded: {record.reason}"] += 1
            elif not record.tokens:
                left_out["no token"] += 1
            else:
                prompt = prompts.setdefault(record.prompt_id, len(prompts))
                reward = record.reward - record.parts.get(LENGTH_PART, 0.0)
                rows.append((file.step, prompt, record.sampled_tokens, reward))
    if torn:
        left_out["line cut short"] = torn.total()
    if not rows:
        raise InputError(f"{run_dir} has no graded rollouts of training steps")
    steps, numbers, tokens, rewards = (np.array(column) for column in zip(*rows, strict=True))
    return Lengths(steps, numbers, tokens.astype(float), rewards, left_out)


def fit_lengths(run_dir: Path) -> LengthsResult:
    """Fits over a run, by step and by completion. Raises InputError."""
    found = read_lengths(run_dir)
    steps = [_means(found, found.steps == step, int(step)) for step in np.unique(found.steps)]
    by_rollout = fit_line_clustered(np.log(found.tokens), found.rewards, found.prompts)
    mean_lengths = np.array([step.length_tokens for step in steps])
    by_step = None
    if len(steps) >= 3 and np.ptp(mean_lengths) > 0:
        by_step = fit_line(np.log(mean_lengths), np.array([step.reward for step in steps]))
    return LengthsResult(
        run=str(run_dir),
        left_out=dict(sorted(found.left_out.items())),
        by_step=by_step,
        by_rollout=by_rollout,
        prompts=len(np.unique(found.prompts)),
        steps=steps,
        bins=_bins(found),
    )


def _bins(found: Lengths) -> list[Means]:
    """Up to BINS bins; equal lengths share a bin."""
    edges = np.unique(found.tokens)
    if len(edges) > BINS:
        edges = np.unique(np.quantile(found.tokens, np.arange(1, BINS) / BINS, method="lower"))
    numbers = np.searchsorted(edges, found.tokens, side="left")
    return [_means(found, numbers == number, None) for number in np.unique(numbers)]


def _means(found: Lengths, mine: np.ndarray, step: int | None) -> Means:
    return Means(
        step, int(mine.sum()), float(found.tokens[mine].mean()), float(found.rewards[mine].mean())
    )


# --- a straight line by least squares -------------------------------------------------------------


def fit_line(x: np.ndarray, y: np.ndarray) -> LineFit:
    """Least squares for points with independent errors of equal variance.

    x, y: [points]. Raises InputError for fewer than three points, or constant x.
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
    """Least squares with cluster-robust standard errors.

    clusters: [points] int. Raises InputError, also for fewer than two clusters. Source: Cameron and
    Miller, "A practitioner's guide to cluster-robust inference" (2015), eq. 11 with the factor of
    eq. 12.
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
    """(x minus its mean, slope, residuals). Raises InputError."""
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
