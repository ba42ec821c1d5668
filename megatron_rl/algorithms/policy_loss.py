"""Policy losses: PPO clipping, CISPO, REINFORCE, supervised. Pure; used by trainer ranks.

A policy loss is `f(tokens, advantages, config) -> PolicyLoss`, of values to maximise: the loss is
minus their weighted sum. The importance ratio r is in `importance_ratio.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.algorithms.importance_ratio import importance_ratios
from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.config.algorithm import PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(NamedTuple):
    """Values per token [tokens], and sums over real tokens to report, by name."""

    values: Tensor
    sums: dict[str, Tensor]


PolicyLossFunction = Callable[[Tokens, "Tensor", PolicyLossConfig], PolicyLoss]
CLIPPED_LOW, CLIPPED_HIGH = "clip_fraction_low", "clip_fraction_high"


def clipped(tokens: Tokens, advantages: Tensor, cfg: PolicyLossConfig) -> PolicyLoss:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = policy / old, of tokens or sequences.

    With dual_clip c, at least c A where A < 0.
    Source: Magistral (arXiv 2506.10910), section 2.1; level "sequence": GSPO (arXiv 2507.18071),
    eq. 5 and 7, and section 4.3 for tokens with their own A; dual_clip: arXiv 1912.09729, eq. 5.
    """
    ratio = importance_ratios(tokens, cfg)
    free = ratio * advantages
    values = free.minimum(ratio.clamp(1 - cfg.eps_low, 1 + cfg.eps_high) * advantages)
    if cfg.dual_clip:
        is_bounded = (advantages < 0) & (values < cfg.dual_clip * advantages)
        values = (cfg.dual_clip * advantages).where(is_bounded, values)
    is_cut = (free > values) & tokens.is_real
    return PolicyLoss(
        values,
        {
            CLIPPED_LOW: (is_cut & (ratio < 1)).sum(),
            CLIPPED_HIGH: (is_cut & (ratio > 1)).sum(),
        },
    )


def reinforce(tokens: Tokens, advantages: Tensor, cfg: PolicyLossConfig) -> PolicyLoss:
    """A log pi. Source: Williams, Machine Learning 8 (1992)."""
    return PolicyLoss(advantages * tokens.logprobs, {})


def cispo(tokens: Tokens, advantages: Tensor, cfg: PolicyLossConfig) -> PolicyLoss:
    """constant(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: every token keeps a gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5.
    """
    ratio = importance_ratios(tokens, cfg).detach()
    bounded = ratio.clamp(1 - cfg.eps_low, 1 + cfg.eps_high)
    return PolicyLoss(
        bounded * advantages * tokens.logprobs,
        {
            CLIPPED_LOW: ((ratio < bounded) & tokens.is_real).sum(),
            CLIPPED_HIGH: ((ratio > bounded) & tokens.is_real).sum(),
        },
    )


def supervised(tokens: Tokens, advantages: Tensor, cfg: PolicyLossConfig) -> PolicyLoss:
    """log pi: maximum likelihood; ignores the advantages."""
    return PolicyLoss(tokens.logprobs, {})


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "clipped": clipped,
    "reinforce": reinforce,
    "cispo": cispo,
    "supervised": supervised,
}
