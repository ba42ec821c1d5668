"""Aggregation: the weight of a token in the loss. Pure numpy; used by the rollout queue.

An aggregation is `f(lengths, config) -> weights`, both [n] per group: from the tokens of each
completion, the weight of each of its tokens. The loss is a plain sum of weighted tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.config.algorithm import AggregationConfig

Lengths = Sequence[np.ndarray]
"""[n] int64 per group."""
AggregationFunction = Callable[[Lengths, AggregationConfig], list[np.ndarray]]


def group_tokens(lengths: Lengths, cfg: AggregationConfig) -> list[np.ndarray]:
    """Mean over groups of (sum over tokens / tokens of the group): they sum to 1.

    Source: Magistral (arXiv 2506.10910), section 2.1.
    """
    return [np.full(len(n), 1.0 / (len(lengths) * int(n.sum()))) for n in lengths]


def batch_tokens(lengths: Lengths, cfg: AggregationConfig) -> list[np.ndarray]:
    """Mean over the tokens of the minibatch. Source: DAPO (arXiv 2503.14476), section 3.3."""
    tokens = sum(int(n.sum()) for n in lengths)
    return [np.full(len(n), 1.0 / tokens) for n in lengths]


def sequence_mean(lengths: Lengths, cfg: AggregationConfig) -> list[np.ndarray]:
    """Mean over sequences of the mean over their tokens. Source: GRPO (arXiv 2402.03300), eq. 3."""
    sequences = sum(map(len, lengths))
    return [1.0 / (sequences * n) for n in lengths]


def sequence_sum(lengths: Lengths, cfg: AggregationConfig) -> list[np.ndarray]:
    """Mean over sequences of the sum over their tokens.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2, except for a constant.
    """
    sequences = sum(map(len, lengths))
    return [np.full(len(n), 1.0 / sequences) for n in lengths]


AGGREGATIONS: dict[str, AggregationFunction] = {
    "group_tokens": group_tokens,
    "batch_tokens": batch_tokens,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
