"""Shapings: advantages that depend on the policy as it is. Pure; used by trainer ranks.

A shaping is `f(tokens, config) -> [tokens]`, without gradient. One with an attribute
`needs_groups = True` sees all groups of the minibatch whole: the trainer then computes the logprobs
of the minibatch once more, before its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.config.algorithm import ShapingConfig

if TYPE_CHECKING:
    from torch import Tensor

ShapingFunction = Callable[[Tokens, ShapingConfig], "Tensor"]


def needs_groups(function: Any, cfg: ShapingConfig) -> bool:
    """Whether a shaping sees whole groups."""
    if function is regression:
        return cfg.baseline == "group"
    return bool(getattr(function, "needs_groups", False))


def regression(tokens: Tokens, cfg: ShapingConfig) -> Tensor:
    """A - beta (S - b): residual of reward - V = beta log(policy / reference), S over a sequence.

    With credit leave_one_out and b the mean of S over the others of the group, sum_i A_i grad log
    pi(y_i) / n is -1 / beta times the gradient of the group's variance of reward - beta S, halved,
    whoever sampled it: AGRO (arXiv 2503.19612). With credit soft_value and no b it is that of the
    squared residual: SPO (arXiv 2503.05453), DRO (arXiv 2405.19107).
    """
    segments = tokens.segments
    sums = segments.sum(tokens.with_constant_policy().reference_log_ratios)
    if cfg.baseline == "group":
        sums = sums - segments.mean_of_others(sums)
    return tokens.advantages - cfg.temperature * segments.spread(sums)


def cross_entropy(tokens: Tokens, cfg: ShapingConfig) -> Tensor:
    """(q - p) / (1 - p) of a sequence: SPO's loss -(q log p + (1 - q) log(1 - p)).

    q = exp((r - top_reward) / beta) and p = exp((V + beta S - top_reward) / beta). The queue's
    advantage is r - V (credit soft_value). A sequence whose p reaches 1 teaches nothing, as in the
    paper: take a top_reward above what can be earned.
    Source: SPO (arXiv 2503.05453), section 3.2.
    """
    segments, beta = tokens.segments, cfg.temperature
    sums = segments.sum(tokens.with_constant_policy().reference_log_ratios)
    log_q = ((tokens.rewards - cfg.top_reward) / beta).clamp_max(0.0)
    log_p = log_q + segments.spread(sums) - tokens.advantages / beta
    slopes = (log_q.exp() - log_p.exp()) / -log_p.expm1()
    return slopes.masked_fill(log_p >= -1e-6 / beta, 0.0)


SHAPINGS: dict[str, ShapingFunction | None] = {
    "none": None,
    "regression": regression,
    "cross_entropy": cross_entropy,
}
