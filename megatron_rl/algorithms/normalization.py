"""Normalization of the advantages of a minibatch. Pure numpy; used by the rollout queue.

A normalization is `f(advantages, config) -> scaled advantages`, over the groups of a minibatch.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.config.algorithm import NormalizationConfig

MIN_STD = 1e-6
"""Below this, advantages differ by rounding only."""

Advantages = Sequence[np.ndarray]
"""[n] float64 per group."""
NormalizationFunction = Callable[[Advantages, NormalizationConfig], list[np.ndarray]]


def minibatch(advantages: Advantages, cfg: NormalizationConfig) -> list[np.ndarray]:
    """(A - mean) / std over all sequences of the minibatch; std divides by their count.

    Source: Magistral (arXiv 2506.10910), section 2.1.
    """
    normalized = _normalized(np.concatenate(advantages))
    return np.split(normalized, np.cumsum([len(group) for group in advantages])[:-1])


def group(advantages: Advantages, cfg: NormalizationConfig) -> list[np.ndarray]:
    """(A - mean) / std over each group. Source: GRPO (arXiv 2402.03300), section 4.1.2."""
    return [_normalized(group) for group in advantages]


def none(advantages: Advantages, cfg: NormalizationConfig) -> list[np.ndarray]:
    """The advantages unchanged."""
    return list(advantages)


def _normalized(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean()
    std = values.std()
    return centred / std if std > MIN_STD else centred


NORMALIZATIONS: dict[str, NormalizationFunction] = {
    "minibatch": minibatch,
    "group": group,
    "none": none,
}
