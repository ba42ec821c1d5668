"""The value of a majority vote, and each completion's share in it. Pure numpy.

Used by `advantage_estimators.py` and by evaluations.

f(S) is the probability that the majority of a set S of completions is right: an answer is drawn
uniformly from the most frequent ones. All right answers are one class. A completion without an
answer has no vote, and f = 0 without votes. Sums over subsets are counted class by class.
"""

from collections import Counter
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np

NO_ANSWER = -1
"""Class of a completion without an answer."""
_ROUNDING = 1e-12
"""A smaller advantage is rounding of terms that cancel."""


class _Vote(NamedTuple):
    """The counts in a set of completions that f depends on."""

    right: int
    """Completions that are right."""
    wrong: tuple[int, ...]
    """Sizes of the classes of wrong answers, in order."""
    silent: int
    """Completions without an answer."""


def majority_advantages(classes: np.ndarray, is_correct: np.ndarray, k: int) -> np.ndarray:
    """A_i = sum over the k-subsets S with i of (f(S) - f(S without i)) / (n choose k): [n] float64.

    classes: [n] int64, read where is_correct [n] is False. f(S without i) does not depend on
    completion i, so it changes no mean: E sum_i A_i grad log pi(y_i) is the gradient of E f of k
    samples, for every k from 1 to n.
    """
    n = len(classes)
    sizes = _sizes_of_wrong(classes, is_correct)
    vote = _vote(sizes, is_correct)
    advantages = np.zeros(n)
    for i in range(n):
        if is_correct[i]:
            others = vote._replace(right=vote.right - 1)
        elif classes[i] == NO_ANSWER:
            others = vote._replace(silent=vote.silent - 1)
        else:
            others = vote._replace(wrong=_less_one(vote.wrong, sizes[int(classes[i])]))
        # The sum over k-subsets with i: over all subsets, less over those without i.
        gain = _sums_of_f(vote, k)[k] - _sums_of_f(others, k)[k] - _sums_of_f(others, k)[k - 1]
        advantages[i] = gain / comb(n, k)
    return np.where(np.abs(advantages) < _ROUNDING, 0.0, advantages)


def majority_value(classes: np.ndarray, is_correct: np.ndarray, k: int) -> float:
    """Mean of f over the k-subsets; k from 1 to n. Exact but for rounding, up to n = 1024.

    classes: [n] int64, read where is_correct [n] is False.
    """
    vote = _vote(_sizes_of_wrong(classes, is_correct), is_correct)
    # Rounding may exceed a share of 1.
    return min(1.0, _sums_of_f(vote, k)[k] / comb(len(classes), k))


def _sizes_of_wrong(classes: np.ndarray, is_correct: np.ndarray) -> Counter[int]:
    """Members of each class of wrong answers."""
    return Counter(int(c) for c in classes[~is_correct] if c != NO_ANSWER)


def _vote(sizes: Counter[int], is_correct: np.ndarray) -> _Vote:
    right = int(is_correct.sum())
    silent = len(is_correct) - right - sizes.total()
    return _Vote(right, tuple(sorted(sizes.values())), silent)


def _less_one(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The sizes of classes after one of that size has lost a member."""
    left = list(sizes)
    left.remove(size)
    return tuple(sorted([*left, size - 1] if size > 1 else left))


@lru_cache(maxsize=4096)
def _sums_of_f(vote: _Vote, k: int) -> tuple[float, ...]:
    """[k + 1]: by s, the sum of f over the s-subsets."""
    sums = np.zeros(k + 1)
    # f is 1 / (1 + ties) where no wrong class has more members in the subset than the right one.
    for level in range(1, min(vote.right, k) + 1):
        ways = _ways(vote, level, k - level)
        shares = 1.0 / (1.0 + np.arange(len(ways)))
        sums[level:] += comb(vote.right, level) * (shares @ ways)
    return tuple(sums.tolist())


def _ways(vote: _Vote, level: int, room: int) -> np.ndarray:
    """[ties + 1, room + 1]: ways to choose 0 to `room` of the completions that are not right.

    At most `level` of each wrong class; ties: the number of classes with exactly `level`.
    """
    large = [size for size in vote.wrong if size >= level]
    # Classes below the level never tie, as if they did not vote.
    free = vote.silent + sum(vote.wrong) - sum(large)
    ways = np.zeros((min(len(large), room // level) + 1, room + 1))
    ways[0] = [comb(free, s) for s in range(room + 1)]
    for size in large:
        before, ways = ways, np.zeros_like(ways)
        for chosen in range(min(level, room + 1)):
            ways[:, chosen:] += comb(size, chosen) * before[:, : room + 1 - chosen]
        if level <= room:
            ways[1:, level:] += comb(size, level) * before[:-1, : room + 1 - level]
    return ways
