"""Advantages and loss weights. Pure numpy; used by the rollout queue when it forms a batch.

Source: Magistral (arXiv 2506.10910), section 2.1.
"""

from collections.abc import Callable

import numpy as np

_MIN_STD = 1e-6
"""Below this the advantages of a minibatch count as equal and are only centred."""


def group_mean_advantages(rewards: np.ndarray) -> np.ndarray:
    """Reward minus the group's mean reward; [group size] float64 -> [group size] float64."""
    return rewards - rewards.mean()


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"group_mean": group_mean_advantages}


def normalize_over_minibatch(advantages: np.ndarray) -> np.ndarray:
    """(A - mean) / std over the sequences of a minibatch; std divides by their count.

    advantages: [sequences] float64.
    """
    centred = advantages - advantages.mean()
    std = advantages.std()
    return centred / std if std > _MIN_STD else centred


def token_weight(groups_in_minibatch: int, group_tokens: int) -> float:
    """Loss weight of each completion token of a group with `group_tokens` completion tokens.

    The paper's mean over groups of (sum over tokens / group's total length) as a weighted token
    sum: the weights of a minibatch sum to 1.
    """
    return 1.0 / (groups_in_minibatch * group_tokens)
