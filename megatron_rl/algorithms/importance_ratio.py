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

from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.config.algorithm import CorrectionConfig, PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor

CorrectionFunction = Callable[["Tensor", CorrectionConfig], "Tensor"]


def importance_ratios(tokens: Tokens, cfg: PolicyLossConfig) -> Tensor:
    """[tokens] policy / old: each token's ratio, or its sequence's; differentiable by own logprobs.

    The gradient of a token's ratio is ratio * gradient of its own logprob, at both levels. So each
    token learns its own advantage, and equal advantages give the gradient of the sequence's ratio.
    Log ratios are cut at +-cfg.max_log_ratio. Source of level "sequence": GSPO-token (arXiv
    2507.18071, section 4.3).
    """
    log_ratios = tokens.logprobs - tokens.old_logprobs
    if cfg.level == "sequence":
        slopes = tokens.logprobs - tokens.logprobs.detach()  # 0, with the gradient of the logprobs
        log_ratios = _sequence_means(log_ratios.detach(), tokens) + slopes
    return bounded_exp(log_ratios, cfg.max_log_ratio)


def behaviour_ratios(tokens: Tokens, cfg: CorrectionConfig, max_log_ratio: float) -> Tensor:
    """[tokens] (proximal or current policy) / generator's, without gradient.

    Log ratios are cut at +-max_log_ratio.
    """
    proximal = tokens.proximal_logprobs
    trained = tokens.logprobs.detach() if proximal is None else proximal
    log_ratios = trained - tokens.generator_logprobs
    if cfg.level == "sequence":
        log_ratios = _sequence_means(log_ratios, tokens)
    return bounded_exp(log_ratios, max_log_ratio)


def _sequence_means(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    """[tokens] mean over the sampled tokens of the sequence; 0 for tokens of reference answers."""
    segments = tokens.segments
    is_sampled = (~tokens.is_gold).to(log_ratios.dtype)
    counts = segments.sum(is_sampled).clamp_min(1.0)
    means = segments.sum(log_ratios.masked_fill(tokens.is_gold, 0.0)) / counts
    return segments.spread(means).masked_fill(tokens.is_gold, 0.0)


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
