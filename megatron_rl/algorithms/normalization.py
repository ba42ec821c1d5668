"""Normalization: how credits of a minibatch are scaled. Pure numpy; used by the rollout queue.

A normalization is `f(credits, config) -> advantages`, over the groups of a minibatch.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.config.algorithm import NormalizationConfig

MIN_STD = 1e-6
"""Below this advantages count as equal: what differs is rounding."""

Credits = Sequence[np.ndarray]
"""Of each group [n] float64."""
NormalizationFunction = Callable[[Credits, NormalizationConfig], list[np.ndarray]]


def minibatch(credits: Credits, cfg: NormalizationConfig) -> list[np.ndarray]:
    """(A - mean) / std over all sequences of the minibatch; std divides by their count.

    Source: Magistral (arXiv 2506.10910), section 2.1.
    """
    normalized = _normalized(np.concatenate(credits))
    return np.split(normalized, np.cumsum([len(credit) for credit in credits])[:-1])


def group(credits: Credits, cfg: NormalizationConfig) -> list[np.ndarray]:
    """(A - mean) / std over each group. Source: GRPO (arXiv 2402.03300), section 4.1.2."""
    return [_normalized(credit) for credit in credits]


def none(credits: Credits, cfg: NormalizationConfig) -> list[np.ndarray]:
    """As they are."""
    return list(credits)


def _normalized(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean()
    std = values.std()
    return centred / std if std > MIN_STD else centred


NORMALIZATIONS: dict[str, NormalizationFunction] = {
    "minibatch": minibatch,
    "group": group,
    "none": none,
}
