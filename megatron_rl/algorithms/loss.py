"""Policy losses: pure functions of tensors, a weighted sum over tokens.

Runs in trainer ranks on the last pipeline stage. Each token carries its own weight, so the loss of
a minibatch is a plain sum: the same for every split into microbatches and ranks. Nothing but the
types needs torch: the launcher looks names up in LOSSES, and does without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.config.tree import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """Completion tokens of one microbatch, all sequences concatenated."""

    trainer_logprobs: Tensor  # [tokens] float32, differentiable
    old_logprobs: Tensor  # [tokens] float32, as loss.old_logprobs says
    advantages: Tensor  # [tokens] float32, the sequence's advantage at each of its tokens
    weights: Tensor  # [tokens] float32, loss weight; they sum to 1 over the minibatch


class LossOutput(NamedTuple):
    """The scalar to differentiate, and what to report."""

    loss: Tensor
    """[] float32: this microbatch's part of the minibatch's loss."""
    clipped_tokens: Tensor
    """[] float32: tokens whose gradient the clipping removed."""


LossFunction = Callable[[LossInputs, LossConfig], LossOutput]


def clipped_loss(inputs: LossInputs, cfg: LossConfig) -> LossOutput:
    """Clipped surrogate with clip-higher, no KL term, no reference model.

    -sum_t w_t * min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t) with
    r_t = exp(trainer - old logprob).
    Source: Magistral (arXiv 2506.10910), section 2.1.
    """
    ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
    free = ratio * inputs.advantages
    clipped = ratio.clamp(1 - cfg.eps_low, 1 + cfg.eps_high) * inputs.advantages
    loss = -(inputs.weights * free.minimum(clipped)).sum()
    return LossOutput(loss, (free > clipped).sum().float())


def reinforce_loss(inputs: LossInputs, cfg: LossConfig) -> LossOutput:
    """-sum_t w_t * A_t * logprob_t: on-policy gradient without correction for staleness."""
    loss = -(inputs.weights * inputs.advantages * inputs.trainer_logprobs).sum()
    return LossOutput(loss, loss.new_zeros(()))


def supervised_loss(inputs: LossInputs, cfg: LossConfig) -> LossOutput:
    """-sum_t w_t * logprob_t: cross-entropy of response tokens."""
    loss = -(inputs.weights * inputs.trainer_logprobs).sum()
    return LossOutput(loss, loss.new_zeros(()))


LOSSES: dict[str, LossFunction] = {
    "clipped": clipped_loss,
    "reinforce": reinforce_loss,
    "supervised": supervised_loss,
}
