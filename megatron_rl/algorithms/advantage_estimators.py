"""Advantage estimators: what each completion of a group is worth. Pure numpy; used by the rollout
queue.

An advantage estimator is `f(group, config) -> [n] float64`, from the rewards of one prompt's
completions. With the attribute `needs_classes = True` it reads `classes`: the verifier tells which
wrong answers are the same. With `zero_variance_on = "verdict"` it reads `is_correct` instead of
rewards: a group has zero variance if all its answers are right, or none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb

import numpy as np

from megatron_rl.algorithms.majority import majority_advantages
from megatron_rl.config.algorithm import AdvantageEstimatorConfig


@dataclass(frozen=True)
class GroupView:
    """What an advantage estimator reads of the n completions of a prompt."""

    prompt_id: str
    rewards: np.ndarray
    """[n] float64."""
    is_correct: np.ndarray
    """[n] bool: whether the verifier accepted the answer."""
    is_well_formed: np.ndarray
    """[n] bool: whether the format check passed."""
    lengths: np.ndarray
    """[n] int64, completion tokens."""
    classes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n] int64: the same number for the same answer; -1: no answer. Empty where the advantage
    estimator does not need classes."""


AdvantageEstimator = Callable[[GroupView, AdvantageEstimatorConfig], np.ndarray]


def group_mean(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """Reward minus the group's mean reward. Source: Magistral (arXiv 2506.10910), section 2.1."""
    return group.rewards - group.rewards.mean()


def leave_one_out(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """Reward minus the mean of the others: unbiased. Source: RLOO (arXiv 2402.14740), eq. 8.

    0 for a completion without others, such as a recorded one.
    """
    n = len(group.rewards)
    if n == 1:
        return np.zeros(1)
    return group_mean(group, cfg) * n / (n - 1)


def reward(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """The reward itself, without a baseline."""
    return group.rewards


def well_formed(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """1 for a completion that passed the format check, else 0, minus the group's mean: no verdict.

    Source: JEPO (arXiv 2503.19618), appendix B; its penalty's size is normalised away.
    """
    passed = group.is_well_formed.astype(np.float64)
    return passed - passed.mean()


def zero(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """0 for all: only a reference policy teaches."""
    return np.zeros_like(group.rewards)


def pass_at_k(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """Each completion's share in the mean over all k-subsets of their largest reward.

    A_i = sum over the k-subsets S with i of (max of S - max of S without i) / (n choose k): with
    rewards of 0 and 1 and C right ones, (n-C choose k-1) / (n choose k) for right ones, else 0.
    sum_i A_i grad log pi(y_i) has the gradient of E max as its mean; centring it would bias it.
    Source: leave-one-out form of PKPO (arXiv 2505.15201).
    """
    rewards, n = group.rewards, len(group.rewards)
    # A group that lost completions may have fewer than k.
    k = min(cfg.k, n)
    if k == 1:
        return rewards / n
    order = np.argsort(-rewards, kind="stable")
    ranked = rewards[order]
    advantages = np.zeros(n)
    # In subsets with the largest reward at rank i and the second at j, the others have later ranks.
    for i in range(n):
        for j in range(i + 1, n):
            subsets = comb(n - j - 1, k - 2)
            advantages[order[i]] += (ranked[i] - ranked[j]) * subsets
    return advantages / comb(n, k)


def majority(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """Each completion's share in the mean over all k-subsets of whether their majority is right.

    Ties are drawn uniformly. All right answers are one class. A completion without an answer has no
    vote; without votes the majority is not right.
    Source: the objective of arXiv 2503.19595, with a leave-one-out baseline; see `majority.py`.
    """
    # As in pass_at_k.
    return majority_advantages(group.classes, group.is_correct, min(cfg.k, len(group.classes)))


majority.needs_classes = True  # type: ignore[attr-defined]
majority.zero_variance_on = "verdict"  # type: ignore[attr-defined]


def soft_value(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """Reward minus beta * log mean exp(reward / beta) over the group, with beta cfg.temperature.

    For completions of the reference policy, the second term is the value of the best policy under
    the KL penalty. Source: SPO (arXiv 2503.05453), section 3, where the reference samples.
    """
    scaled = group.rewards / cfg.temperature
    top = scaled.max()
    value = cfg.temperature * (top + np.log(np.exp(scaled - top).mean()))
    return group.rewards - value


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "reward": reward,
    "zero": zero,
    "well_formed": well_formed,
    "pass_at_k": pass_at_k,
    "majority": majority,
    "soft_value": soft_value,
}
