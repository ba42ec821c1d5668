"""Importance ratios, and corrections for tokens that another policy sampled. Pure; trainer ranks.

The only file that makes ratios of probabilities:

- `importance_ratios`: policy in training / old policy, differentiable, for `policy_loss.py`;
- `behaviour_ratios`: proximal or current policy / generator's, constant, for the corrections here;
- `bounded_exp`: what both end with, and the trainer's mismatch.

A correction is `f(ratios, config) -> factors` of behaviour ratios, both [tokens] without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import CorrectionConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor

CorrectionFunction = Callable[["Tensor", CorrectionConfig], "Tensor"]


def importance_ratios(tokens: Tokens, cfg: PolicyLossConfig) -> Tensor:
    """[tokens] policy / old, differentiable: each token's, or its sequence's geometric mean.

    Log ratios are cut at +-cfg.max_log_ratio.
    """
    log_ratios = tokens.logprobs - tokens.old_logprobs
    return _ratios(log_ratios, tokens.segments, cfg.level, cfg.max_log_ratio)


def behaviour_ratios(tokens: Tokens, cfg: CorrectionConfig, max_log_ratio: float) -> Tensor:
    """[tokens] (proximal or current policy) / generator's, without gradient.

    Log ratios are cut at +-max_log_ratio.
    """
    proximal = tokens.proximal_logprobs
    trained = tokens.logprobs.detach() if proximal is None else proximal
    log_ratios = trained - tokens.generator_logprobs
    return _ratios(log_ratios, tokens.segments, cfg.level, max_log_ratio)


def _ratios(log_ratios: Tensor, segments: Segments, level: str, bound: float) -> Tensor:
    if level == "sequence":
        log_ratios = segments.spread(segments.mean(log_ratios))
    return bounded_exp(log_ratios, bound)


def bounded_exp(log_ratios: Tensor, bound: float) -> Tensor:
    """exp of log ratios cut at +-bound; without gradient beyond it."""
    return log_ratios.clamp(-bound, bound).exp()


def truncated(ratios: Tensor, cfg: CorrectionConfig) -> Tensor:
    """min(ratio, high). Source: LlamaRL (arXiv 2505.24034), AIPO."""
    return ratios.clamp_max(cfg.high)


def masked(ratios: Tensor, cfg: CorrectionConfig) -> Tensor:
    """The ratio between low and high, else 0. Source: IcePop (arXiv 2510.18855)."""
    return ratios.masked_fill((ratios < cfg.low) | (ratios > cfg.high), 0.0)


CORRECTIONS: dict[str, CorrectionFunction | None] = {
    "none": None,
    "truncated": truncated,
    "masked": masked,
}
