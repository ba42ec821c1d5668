"""KL(policy || reference) as a penalty with exact gradients. Pure; used by trainer ranks.

l_t = log(policy / reference) of token t; KL_t = KL of the policy's next-token distribution at the
position of t to the reference's. docs/algorithms.md compares other forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.config.algorithm import KlConfig

if TYPE_CHECKING:
    from torch import Tensor


def kl_advantages(tokens: Tokens, cfg: KlConfig) -> Tensor:
    """The KL penalty's part of each token's advantage [tokens], without gradient.

    horizon "to_go": -beta (sum_{s >= t} l_s - b), b the mean of the sums over the other sequences
    of the group; in expectation under the policy the exact gradient of the sequences' KL. Tokens of
    reference answers have none. "token": -beta l_t, which is that of each position's own KL, at the
    places that the policy visits. estimator "exact": -beta sum_{s > t} KL_s, what the choice of t
    does to later positions. Without a baseline: that of the group would add variance here, and cost
    a pass.
    """
    if cfg.is_exact:
        later = tokens.with_constant_policy().reference_kl
        assert later is not None
        return -cfg.coefficient * (tokens.segments.to_go(later) - later)
    ratios = tokens.with_constant_policy().reference_log_ratios
    if cfg.horizon == "token":
        return -cfg.coefficient * ratios
    segments = tokens.segments
    baseline = segments.mean_of_others(segments.sum(ratios))
    found = -cfg.coefficient * (segments.to_go(ratios) - segments.spread(baseline))
    # A baseline changes no expected gradient of sampled tokens, but that of a reference answer.
    return found.masked_fill(tokens.is_gold, 0.0)


def forward_kl(ratios: Tensor, max_log_ratio: float) -> Tensor:
    """exp(-l) - 1 + l of log ratios l; as if l were -max_log_ratio where it is below that."""
    bounded = ratios.clamp_min(-max_log_ratio)
    return (-bounded).exp() - 1 + bounded


def kl_loss(tokens: Tokens, cfg: KlConfig, max_log_ratio: float) -> Tensor:
    """[] the KL penalty's part of the loss; a sequence has its tokens' weight.

    k2: beta / 2 (sum_t l_t)^2 of a sequence, whose expected gradient on-policy is that of
    KL(policy || reference). forward_kl: beta (exp(-l_t) - 1 + l_t), that of KL(reference || policy)
    at the places visited. exact: beta KL_t, each position's own; `kl_advantages` has the rest.
    """
    if cfg.is_exact:
        assert tokens.reference_kl is not None
        return cfg.coefficient * (tokens.weights * tokens.reference_kl).sum()
    ratios = tokens.reference_log_ratios
    if cfg.estimator == "forward_kl":
        return cfg.coefficient * (tokens.weights * forward_kl(ratios, max_log_ratio)).sum()
    segments = tokens.segments
    weights = segments.mean(tokens.weights)
    return cfg.coefficient * (weights * segments.sum(ratios).square() / 2).sum()
