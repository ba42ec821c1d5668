"""Corrections: factors for tokens that another policy sampled. Pure; used by trainer ranks.

A correction is `f(ratios, config) -> factors`, both [tokens] without gradient; ratios are those of
a policy that the trainer knows to the generator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_rl.algorithms.tokens import Tokens, bounded_exp
from megatron_rl.config.algorithm import CorrectionConfig

if TYPE_CHECKING:
    from torch import Tensor

CorrectionFunction = Callable[["Tensor", CorrectionConfig], "Tensor"]


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


def behaviour_ratios(tokens: Tokens, cfg: CorrectionConfig, max_log_ratio: float) -> Tensor:
    """[tokens] (proximal or current policy) / generator's, without gradient.

    Log ratios are cut at +-max_log_ratio.
    """
    proximal = tokens.proximal_logprobs
    base = tokens.logprobs.detach() if proximal is None else proximal
    log_ratio = base - tokens.generator_logprobs
    if cfg.level == "sequence":
        log_ratio = tokens.segments.spread(tokens.segments.mean(log_ratio))
    return bounded_exp(log_ratio, max_log_ratio)
