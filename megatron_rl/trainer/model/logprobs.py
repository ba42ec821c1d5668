"""Logprobs of given tokens from hidden states: output layer and softmax, some rows at a time.

Runs in trainer ranks of the last pipeline stage. A pass computes and reduces the logits of some
rows; the next pass overwrites them. The backward pass computes all logits again, except those of
the last pass, which are still in memory. Row i of the hidden states predicts target i.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.backend.products import add_product, note_added, write_product
from megatron_rl.backend.softmax import (
    Bonus,
    Divergence,
    is_read_only,
    pair_sums,
    softmax_gradient,
    softmax_sums,
)

BYTES = 12
"""Memory of a pass per logit, in plain torch: the logit and its exponential as float32, and the
rounded factors of bfloat16 products."""
BYTES_WITH_LOOPS = {torch.float32: 5, torch.bfloat16: 4}
"""The same with our loops, which store the logit alone: it, its product before rounding, and some
more for values of whole rows."""

BYTES_WIDENED_WITH_LOOPS = 8
"""The same for float32 logits of bfloat16 factors: the logit, its rounded gradient, and copies of
factors where the CPU has no product for them."""
BYTES_WITH_REFERENCE = 20
"""The same where the reference's logits are computed with the policy's."""


class TokenLogprobs(NamedTuple):
    """Per-token results, equal on every tensor-parallel rank."""

    logprobs: Tensor
    """[tokens] float32, differentiable."""
    entropy: Tensor
    """[tokens] float32 in nats; differentiable if the layer says so."""
    reference_kl: Tensor | None = None
    """[tokens] float32 in nats, differentiable: KL of the softmax to the reference's, where the
    layer has one."""


class LogitMemory:
    """Memory for the logits of one pass at a time, reused by the next microbatch.

    New memory would cost the CPU a tenth of the product's time, as the system clears it first.
    """

    def __init__(self) -> None:
        self.uses = 0
        """Once this has grown, the values of an earlier use are overwritten."""
        self._memory: Tensor | None = None

    def take(self, like: Tensor, dtype: torch.dtype, rows: int, ids: int) -> Tensor:
        """[rows, ids] uninitialised, of that dtype on the device of `like`."""
        self.uses += 1
        size = rows * ids
        kept = self._memory
        if kept is None or kept.numel() < size or kept.dtype is not dtype:
            # Free the smaller one first, as two at once would cost memory.
            self._memory = kept = None
            self._memory = kept = like.new_empty(size, dtype=dtype)
        return kept[:size].view(rows, ids)

    def free(self) -> None:
        """Give the memory back, between passes."""
        self.uses += 1
        self._memory = None


@dataclass(frozen=True)
class ReferenceLayer:
    """The reference's output layer and its input for one microbatch, for the exact KL.

    The trainer keeps the hidden states, as the logits would be tokens x ids values.
    """

    hidden: Tensor  # [tokens, hidden], rows as in the policy's hidden states
    weight: Tensor  # [padded vocabulary / ranks, hidden], this rank's rows

    def to(self, device: torch.device) -> Self:
        """The same on another device; the host waits for no copy from pinned memory."""
        hidden, weight = (t.to(device, non_blocking=True) for t in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight)

    def logits(self, span: slice, ids: int, memory: Tensor) -> Tensor:
        """[rows of the span, ids] for this rank's first ids, written to `memory`."""
        rows = self.hidden[span]
        logits = memory[: len(rows)]
        write_product(logits, rows, self.weight[:ids])
        return logits


@dataclass(frozen=True)
class OutputLayer:
    """The projection from hidden states to the vocabulary, cut by rows over a group's ranks."""

    weight: Tensor  # [padded vocabulary / ranks, hidden], this rank's rows
    vocab_size: int  # ids from here on are padding: they count as -inf, and are never computed
    group: dist.ProcessGroup
    temperature: float  # logits are divided by it
    chunk_tokens: int  # extra memory is below chunk_tokens * padded vocabulary / ranks * 4 bytes
    gradient: Tensor | None = None
    """Where the backward pass adds the weight's gradient, float32; None: autograd does."""
    is_sole_user: bool = False
    """Whether no other layer has a gradient of the weight that Megatron's hooks wait for."""
    differentiates_entropy: bool = False
    reference: ReferenceLayer | None = None
    """For the KL to a reference; its vocabulary is cut and padded the same way."""
    logits_dtype: torch.dtype | None = None
    """Dtype that logits are rounded to before the softmax; None: the dtype of the weight."""
    memory: LogitMemory = field(default_factory=LogitMemory)
    """Shared by the microbatches of a step."""

    @property
    def first_id(self) -> int:
        """Token id of this rank's first row."""
        return self.group.rank() * len(self.weight)

    @property
    def true_weight(self) -> Tensor:
        """This rank's rows without the padding; there may be none."""
        return self.weight.detach()[: max(0, self.vocab_size - self.first_id)]

    def spans(self, hidden: Tensor) -> list[slice]:
        """The rows of each pass; none for a rank that holds only padding.

        The first pass is the short one: the logits of the last need not be computed again.
        """
        size = self.pass_rows(hidden)
        n_tokens = len(hidden) if self.true_weight.numel() else 0
        ends = range(n_tokens, 0, -size)
        return [slice(max(0, end - size), end) for end in reversed(ends)]

    def pass_rows(self, hidden: Tensor) -> int:
        """Rows of a full pass."""
        n_bytes = BYTES
        if is_read_only(hidden):
            is_widened = self.logits_dtype not in (None, hidden.dtype)
            n_bytes = BYTES_WIDENED_WITH_LOOPS if is_widened else BYTES_WITH_LOOPS[hidden.dtype]
        if self.reference is not None:
            n_bytes = BYTES_WITH_REFERENCE
        return max(1, self.chunk_tokens * 4 // n_bytes)

    def take_memory(self, hidden: Tensor) -> Tensor:
        """Memory for the logits of one pass; the reference's follow the policy's."""
        rows = self.pass_rows(hidden) * (1 if self.reference is None else 2)
        dtype = self.logits_dtype or hidden.dtype
        return self.memory.take(hidden, dtype, rows, len(self.true_weight))

    def logits(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """[rows, this rank's ids] of a pass, written to `memory`."""
        logits = memory[: len(hidden)]
        write_product(logits, hidden, self.true_weight)
        return logits

    def reference_logits(self, span: slice, memory: Tensor) -> Tensor:
        """[rows of the span, this rank's ids] of the reference, in the second half of `memory`."""
        assert self.reference is not None
        return self.reference.logits(span, len(self.true_weight), memory[len(memory) // 2 :])


class DivergenceSums:
    """Sums for KL(policy || reference) over this rank's ids, filled span by span."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """A rank that holds only padding fills nothing, and adds nothing."""
        lowest = torch.finfo(torch.float32).min
        self._maxima = torch.full((2, tokens), lowest, dtype=torch.float32, device=device)
        self._sums = torch.zeros(2, tokens, dtype=torch.float32, device=device)

    def fill(self, span: slice, logits: Tensor, others: Tensor, temperature: float) -> None:
        """Add some rows. logits: the policy's; others: the reference's, which are overwritten."""
        found = pair_sums(logits, others, temperature)
        self._maxima[:, span] = torch.stack([found.maxima, found.other_maxima])
        self._sums[:, span] = torch.stack([found.gaps, found.other_exps])

    def reduced(
        self, policy_maxima: Tensor, policy_exps: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """(KL in nats, log of the reference's softmax denominator), [tokens] float32 each.

        policy_maxima, policy_exps: the policy's softmax sums over the whole group. Equal on every
        rank of the group.
        """
        own, others = self._maxima
        maxima = others.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums = self._sums * torch.stack([own - policy_maxima, others - maxima]).exp()
        dist.all_reduce(sums, group=group)
        gaps, exps = sums
        # Each difference is between numbers of similar size, for accuracy.
        shift = (maxima - policy_maxima) + (exps.log() - policy_exps.log())
        return gaps / policy_exps + shift, maxima + exps.log()


def token_logprobs(hidden: Tensor, targets: Tensor, layer: OutputLayer) -> TokenLogprobs:
    """Logprob of targets[i] and entropy under softmax(logits of hidden[i] / temperature).

    hidden: [tokens, hidden], equal on all ranks of the group; its gradient is this rank's part of
    the sum over the group. targets: [tokens] int64, global ids below vocab_size.
    """
    return TokenLogprobs(
        *_Logprobs.apply(hidden.to(layer.weight.dtype), layer.weight, targets, layer)
    )


class _Logprobs(torch.autograd.Function):
    """d logprob / d logit = (is target - softmax) / temperature.

    d entropy / d logit = -softmax * (log softmax + entropy) / temperature.
    d kl / d logit = softmax * (log softmax - log softmax of the reference - kl) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layer: OutputLayer
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        n_ids = len(layer.true_weight)
        hidden = hidden.contiguous()
        local = targets - layer.first_id
        is_local = (local >= 0) & (local < n_ids)
        local = local.clamp(0, max(n_ids - 1, 0))

        # Per row: largest logit; then, relative to it, sum of exp, sum of exp * logit, and the
        # target's logit. A rank that holds only padding adds nothing.
        n_tokens = len(hidden)
        lowest = torch.finfo(torch.float32).min
        maxima = torch.full((n_tokens,), lowest, dtype=torch.float32, device=hidden.device)
        sums = torch.zeros(3, n_tokens, dtype=torch.float32, device=hidden.device)
        memory = layer.take_memory(hidden)
        pairs = None if layer.reference is None else DivergenceSums(n_tokens, hidden.device)
        for span in layer.spans(hidden):
            logits = layer.logits(hidden[span], memory)
            if pairs is not None:
                # First, as the sums below may overwrite the logits.
                others = layer.reference_logits(span, memory)
                pairs.fill(span, logits, others, layer.temperature)
            maxima[span], *parts = softmax_sums(logits, local[span], layer.temperature)
            sums[:, span] = torch.stack(parts)
        own = maxima.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=layer.group)
        shift = own - maxima
        sums[2] = (sums[2] + shift).masked_fill(~is_local, 0)
        sums[1] = shift.exp() * (sums[1] + shift * sums[0])
        sums[0] *= shift.exp()
        dist.all_reduce(sums, group=layer.group)

        log_z = sums[0].log()
        entropy = log_z - sums[1] / sums[0]
        pair = () if pairs is None else pairs.reduced(maxima, sums[0], layer.group)
        ctx.save_for_backward(hidden, local, is_local, maxima + log_z, entropy, *pair)
        ctx.layer = layer
        # The logits of the last pass are still there, unless the sums overwrote them.
        ctx.uses = layer.memory.uses if is_read_only(hidden) else None
        if not layer.differentiates_entropy:
            ctx.mark_non_differentiable(entropy)
        return sums[2] - log_z, entropy, pair[0] if pair else None

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_entropy: Tensor, grad_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, local, is_local, log_z, entropy, *pair = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        weight = layer.true_weight
        slope = grad / layer.temperature
        bonus = None
        if layer.differentiates_entropy:
            bonus = Bonus(grad_entropy / layer.temperature, entropy)
        grad_hidden = torch.zeros_like(hidden)
        # Parts of a sum are float32, as Megatron's gradient buffers are.
        grad_weight = layer.gradient
        if grad_weight is None:
            grad_weight = torch.zeros_like(layer.weight, dtype=torch.float32)
        # The last pass comes first, as its logits may still be in memory.
        is_there = ctx.uses == layer.memory.uses
        memory = layer.take_memory(hidden)
        for span in reversed(layer.spans(hidden)):
            part = hidden[span]
            logits = memory[: len(part)] if is_there else layer.logits(part, memory)
            is_there = False
            divergence = None
            if pair:
                others = layer.reference_logits(span, memory)
                kl_slope = grad_kl[span] / layer.temperature
                divergence = Divergence(kl_slope, pair[0][span], others, pair[1][span])
            rows = softmax_gradient(
                logits,
                local[span],
                layer.temperature,
                log_z=log_z[span],
                slopes=slope[span],
                target_slopes=(slope * is_local)[span],
                bonus=bonus and bonus.rows(span),
                divergence=divergence,
            )
            # Float32 logits have float32 gradients; both products take the factors' dtype.
            rows = rows.to(weight.dtype)
            torch.mm(rows, weight, out=grad_hidden[span])
            add_product(grad_weight[: len(weight)], rows, part)
        handed_on = None
        if layer.gradient is None:
            handed_on = grad_weight
        elif layer.is_sole_user:
            handed_on = note_added(layer.weight)
        return grad_hidden, handed_on, None, None
