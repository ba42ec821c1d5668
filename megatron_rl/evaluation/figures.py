"""avg@k, pass@k and maj@k of evaluated problems, with standard errors over problems.

Used by the rollout queue and the launcher. Completions of one problem are dependent. So figures are
averaged over completions first, and errors are of the mean over problems.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from megatron_rl.algorithms.majority import majority_value
from megatron_rl.evaluation.samples import ProblemSamples


@dataclass(frozen=True)
class Figure:
    """A mean over problems."""

    value: float
    se: float | None
    """Standard error; None for one problem."""
    problems: int


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Sample standard deviation over sqrt(n), with n - 1 degrees of freedom; None for one value.

    sqrt(p (1 - p) / (n - 1)) for verdicts with a share p of right ones.
    """
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return None
    # Equal values have no variance, whatever the rounding of their mean.
    deviation = 0.0 if (array == array[0]).all() else float(np.std(array, ddof=1))
    return deviation / math.sqrt(len(array))


def mean_figure(values: Sequence[float] | np.ndarray) -> Figure:
    """Mean of one value per problem.

    Its error equals that of clustered_figure if all problems have the same number of completions.
    """
    return Figure(float(np.mean(values)), standard_error(values), len(values))


def clustered_figure(values: np.ndarray, clusters: np.ndarray) -> Figure:
    """Mean over a subset of the completions, with an error clustered by problem.

    values: [m] float; clusters: [m], number of the problem. Error: sqrt(g / (g - 1) * sum over the
    g problems of (sum of its deviations)^2) / m. Source: arXiv 2411.00640, eq. 4, with g / (g - 1)
    so that it equals standard_error for equal numbers of completions.
    """
    mean = float(values.mean())
    _, places = np.unique(clusters, return_inverse=True)
    sums = np.bincount(places, weights=values - mean)
    count = len(sums)
    if count < 2:
        return Figure(mean, None, count)
    squares = float((sums**2).sum()) * count / (count - 1)
    return Figure(mean, math.sqrt(squares) / len(values), count)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that at least one of k completions is right, drawn from n without replacement.

    1 - (n - right choose k) / (n choose k), in exact integers up to the division.
    Source: arXiv 2107.03374, eq. 1.
    """
    _check_k(n, k)
    every = comb(n, k)
    return (every - comb(n - right, k)) / every


def maj_at_k(classes: np.ndarray, is_correct: np.ndarray, k: int) -> float:
    """Chance that the majority vote of k of the n completions, drawn without replacement, is right.

    Exact over all k-subsets; ties are broken uniformly. A completion without an answer has no vote;
    a subset without votes is wrong. classes: [n], as in ProblemSamples.
    """
    _check_k(len(classes), k)
    return majority_value(classes, is_correct, k)


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of n={n} completions: k is from 1 to n")


def sizes(most: int) -> list[int]:
    """The k to report for up to `most` completions: 2, 4, 8 ... and all of them."""
    return sorted({most, *(2**power for power in range(1, most.bit_length()))} - {0, 1})


def pass_figures(problems: Sequence[ProblemSamples]) -> dict[int, Figure]:
    """pass@k by k, each over the problems with at least k graded completions."""
    return {
        k: mean_figure([pass_at_k(p.n, p.right, k) for p in problems if p.n >= k])
        for k in sizes(most_samples(problems))
    }


def maj_figures(problems: Sequence[ProblemSamples]) -> dict[int, Figure]:
    """maj@k by k, each over the problems with known classes and at least k graded completions."""
    known = [p for p in problems if p.classes is not None]
    return {
        k: mean_figure(
            [
                maj_at_k(p.classes, p.is_correct, k)
                for p in known
                if p.n >= k and p.classes is not None
            ]
        )
        for k in sizes(most_samples(known))
    }


def most_samples(problems: Iterable[ProblemSamples]) -> int:
    """The largest number of completions of a problem; 0 without problems."""
    return max((problem.n for problem in problems), default=0)
