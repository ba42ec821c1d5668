"""The loss of a configuration: policy loss, correction, KL and entropy bonus.

Used by trainer ranks. A loss is a sum over tokens with a weight each, so every split into
microbatches and ranks has the same loss. Sequences are whole in each microbatch; values of whole
groups are computed before the gradient (`needs_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.algorithms.importance_ratio import (
    CORRECTIONS,
    CorrectionFunction,
    behaviour_ratios,
)
from megatron_rl.algorithms.kl import forward_kl, kl_advantages, kl_loss
from megatron_rl.algorithms.policy_loss import POLICY_LOSSES, PolicyLossFunction
from megatron_rl.algorithms.shaping import SHAPINGS, ShapingFunction, needs_groups
from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.lookup import find_function

if TYPE_CHECKING:
    from torch import Tensor


OWN_SUMS = frozenset({
    "loss", "entropy", "tokens", "padded_tokens", "filling", "advantage", "advantage_square",
    "correction_changed", "behaviour_ratio", "behaviour_ratio_square", "gold_logprob",
    "gold_tokens",
})  # fmt: skip
"""Sums from which `trainer/metrics.py` makes its metrics: no policy loss may use these names."""


class LossOutput(NamedTuple):
    """The scalar to differentiate, and what to report."""

    loss: Tensor
    """[] float32: the microbatch's part of the minibatch's loss."""
    sums: dict[str, Tensor]
    """By name [], over real tokens; the same names for every microbatch."""


@dataclass(frozen=True)
class Objective:
    """The function that an update minimises."""

    cfg: AlgorithmConfig
    policy_loss: PolicyLossFunction
    correction: CorrectionFunction | None = None
    shaping: ShapingFunction | None = None

    @property
    def needs_proximal(self) -> bool:
        """Whether it reads the trainer's logprobs from before the batch's first update."""
        return self.cfg.policy_loss.old_logprobs == "recompute"

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the reference policy's logprobs."""
        return self.cfg.needs_reference

    @property
    def needs_groups(self) -> bool:
        """Whether advantages depend on the logprobs of whole groups."""
        has_baseline = self.cfg.kl.placement == "reward" and self.cfg.kl.horizon == "to_go"
        return has_baseline or needs_groups(self.shaping, self.cfg.shaping)

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the entropy is differentiated."""
        return self.cfg.entropy.coefficient > 0

    def advantages(self, tokens: Tokens) -> Tensor:
        """[tokens], without gradient: the queue's advantages, with shaping and KL."""
        found = tokens.advantages
        if self.shaping is not None:
            found = self.shaping(tokens, self.cfg.shaping).detach()
        if self.cfg.kl.adds_to_advantages:
            found = found + kl_advantages(tokens, self.cfg.kl)
        return found

    def loss(self, tokens: Tokens, advantages: Tensor, entropy: Tensor) -> LossOutput:
        """-sum_t w_t f_t policy_loss_t + KL - c sum_t w_t entropy_t, f the correction.

        entropy: [tokens] in nats, differentiable where `has_entropy_bonus`.
        """
        bound = self.cfg.policy_loss.max_log_ratio
        values, sums = self.policy_loss(tokens, advantages, self.cfg.policy_loss)
        if self.correction is not None:
            ratios = behaviour_ratios(tokens, self.cfg.correction, bound)
            factors = self.correction(ratios, self.cfg.correction)
            values = factors * values
            sums = sums | _correction_sums(ratios, factors, tokens.is_real)
        loss = -(tokens.weights * values).sum()
        if self.cfg.kl.placement == "loss":
            loss = loss + kl_loss(tokens, self.cfg.kl, bound)
        if self.has_entropy_bonus:
            loss = loss - self.cfg.entropy.coefficient * (tokens.weights * entropy).sum()
        if self.needs_reference:
            sums = sums | _reference_sums(tokens, bound)
        if self.cfg.kl.is_exact:
            reference_kl = tokens.with_constant_policy().reference_kl
            assert reference_kl is not None
            sums = sums | {"reference_kl": reference_kl.sum()}
        if self.cfg.used_gold is not None:
            sums = sums | _gold_sums(tokens)
        if self.cfg.learns_value or self.cfg.has_soft_value:
            assert tokens.values is not None
            sums = sums | {"value_mean": _sum_where(tokens.is_real, tokens.values)}
        if self.cfg.has_soft_value:
            assert tokens.effective_shares is not None
            shares = _sum_where(tokens.is_real, tokens.effective_shares)
            sums = sums | {"soft_value_effective_share": shares}
        return LossOutput(loss, sums | _advantage_sums(tokens, advantages))


def _correction_sums(ratios: Tensor, factors: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    return {
        "correction_changed": ((factors != ratios) & is_real).sum(),
        "behaviour_ratio": _sum_where(is_real, ratios),
        "behaviour_ratio_square": _sum_where(is_real, ratios.square()),
    }


def _reference_sums(tokens: Tokens, bound: float) -> dict[str, Tensor]:
    ratios = tokens.with_constant_policy().reference_log_ratios
    return {"reference_k1": ratios.sum(), "reference_k3": forward_kl(ratios, bound).sum()}


def _gold_sums(tokens: Tokens) -> dict[str, Tensor]:
    logprobs = _sum_where(tokens.is_gold, tokens.logprobs.detach())
    return {"gold_logprob": logprobs, "gold_tokens": tokens.is_gold.sum()}


def _advantage_sums(tokens: Tokens, advantages: Tensor) -> dict[str, Tensor]:
    return {
        "advantage": _sum_where(tokens.is_real, advantages),
        "advantage_square": _sum_where(tokens.is_real, advantages.square()),
    }


def _sum_where(is_counted: Tensor, values: Tensor) -> Tensor:
    """[] sum of some tokens' values. Indexing by a mask would wait for the device."""
    return values.masked_fill(~is_counted, 0).sum()


def find_objective(cfg: AlgorithmConfig) -> Objective:
    """The objective of a configuration. Raises InputError for an unknown name."""
    return Objective(
        cfg,
        find_function(POLICY_LOSSES, cfg.policy_loss.name, key="algorithm.policy_loss.name"),
        find_function(CORRECTIONS, cfg.correction.name, key="algorithm.correction.name"),
        find_function(SHAPINGS, cfg.shaping.name, key="algorithm.shaping.name"),
    )
