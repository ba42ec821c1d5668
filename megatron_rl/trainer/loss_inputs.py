"""Inputs of a loss: the completion tokens of microbatches, with all values that the loss reads.

Used by trainer ranks of the last pipeline stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.soft_value import SoftValues
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.trainer.model.collate import MicroBatch
from megatron_rl.trainer.model.logprobs import ReferenceLayer


@dataclass(frozen=True)
class Prepared:
    """Values of a microbatch from before its gradient; per token: [completion tokens]."""

    proximal_logprobs: Tensor | None = None
    """The trainer's own, before the batch's first update."""
    reference_logprobs: Tensor | None = None
    reference_layer: ReferenceLayer | None = None
    """In host memory; hidden states of this context rank's own tokens."""
    features: Tensor | None = None
    """[sequences, hidden + 1] of prompts: the value head's input."""
    soft: SoftValues | None = None
    """One value per sequence, from its whole group."""
    advantages: Tensor | None = None
    """Advantages that depend on the policy and on whole groups; None: the loss computes them."""


def tokens_of(
    batch: MicroBatch,
    logprobs: Tensor,
    prepared: Prepared,
    *,
    version: int,
    reference_kl: Tensor | None = None,
    values: Tensor | None = None,
) -> Tokens:
    """Inputs of one microbatch; logprobs, reference_kl: [completion tokens], of the current policy.

    values: [sequences], of the value head, where prepared.soft has none.
    """
    shares = None
    if prepared.soft is not None:
        values, shares = prepared.soft
    segments = Segments(batch.sequence_of, batch.target_ends, batch.group_of, batch.member_of)
    proximal = prepared.proximal_logprobs
    # No policy sampled a reference answer: its ratios are 1.
    own = logprobs.detach()
    is_real = segments.spread(batch.group_of) >= 0
    if reference_kl is not None:
        reference_kl = reference_kl.masked_fill(~is_real | batch.is_gold, 0.0)
    return Tokens(
        logprobs=logprobs,
        generator_logprobs=own.where(batch.is_gold, batch.generator_logprobs),
        advantages=batch.advantages,
        rewards=batch.rewards,
        weights=batch.weights,
        is_real=is_real,
        lags=version - batch.versions,
        segments=segments,
        is_gold=batch.is_gold,
        proximal_logprobs=None if proximal is None else own.where(batch.is_gold, proximal),
        reference_logprobs=prepared.reference_logprobs,
        reference_kl=reference_kl,
        values=None if values is None else segments.spread(values),
        effective_shares=None if shares is None else segments.spread(shares),
    )


def whole_groups(
    parts: Sequence[Tokens], *, groups: int, members: int, is_alone: bool = False
) -> Tokens:
    """Inputs of all microbatches of a rank; sums over groups span data-parallel ranks.

    is_alone: there are no other ranks.
    """
    segments = Segments(
        sequence_of=_numbered([part.segments.sequence_of for part in parts], parts, "sequences"),
        ends=_numbered([part.segments.ends for part in parts], parts, "tokens"),
        group_of=torch.cat([part.segments.group_of for part in parts]),
        member_of=torch.cat([part.segments.member_of for part in parts]),
        groups=groups,
        members=members,
        add_up=None if is_alone else _sum_over_data_ranks,
    )
    joined = {
        field.name: _joined([getattr(part, field.name) for part in parts])
        for field in fields(Tokens)
        if field.name != "segments"
    }
    return replace(parts[0], segments=segments, **joined)


def _numbered(values: list[Tensor], parts: Sequence[Tokens], what: str) -> Tensor:
    """Numbers within each part as numbers within all parts."""
    counts = [len(p.segments.ends) if what == "sequences" else len(p.weights) for p in parts]
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    return torch.cat([value + first for value, first in zip(values, firsts, strict=True)])


def _joined(values: list[Tensor | None]) -> Tensor | None:
    return None if values[0] is None else torch.cat(values)


def _sum_over_data_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def gather_context(values: Tensor, batch: MicroBatch) -> Tensor:
    """[completion tokens of the microbatch] from this context rank's tokens; differentiable.

    Every context rank then computes the whole loss, whose gradient reaches its own tokens.
    """
    if batch.places is None:
        return values
    return _GatherContext.apply(values, batch.places, len(batch.weights))


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        found = values.new_zeros(count)
        found[places] = values
        dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places], None, None
