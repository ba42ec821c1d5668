"""Logprobs of given tokens from hidden states: output layer and softmax, some rows at a time.

Runs in trainer ranks of the last pipeline stage. No [tokens, vocabulary] tensor ever exists: a pass
computes the logits of a few rows, reduces them and drops them, and the backward pass computes them
again. The only place that turns "predicts next" rows into "is this token" values is `collate.py`;
here row i of the hidden states is already the one that predicts target i.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.backend.products import add_product
from megatron_rl.backend.softmax import softmax_gradient, softmax_sums

COPIES = 3
"""Float32 copies of a pass's logits that memory is kept for: the logits, and without loops their
exponentials, and the rounded copies and products that bfloat16 needs."""


class TokenLogprobs(NamedTuple):
    """Per-token results, equal on every tensor-parallel rank."""

    logprobs: Tensor
    """[tokens] float32, differentiable."""
    entropy: Tensor
    """[tokens] float32 in nats, not differentiable."""


@dataclass(frozen=True)
class OutputLayer:
    """The projection from hidden states to the vocabulary, cut by rows over a group's ranks."""

    weight: Tensor  # [padded vocabulary / ranks, hidden], this rank's rows
    vocab_size: int  # ids from here on are padding: they count as -inf, and are never computed
    group: dist.ProcessGroup
    temperature: float  # logits are divided by it
    chunk_tokens: int  # extra memory is below chunk_tokens * padded vocabulary / ranks * 4 bytes
    gradient: Tensor | None = None
    """Where the backward pass adds the weight's gradient, float32; None: autograd hands it on."""
    is_sole_user: bool = False
    """Whether nothing else hands on a gradient of the weight, for Megatron's hooks to wait for."""

    @property
    def first_id(self) -> int:
        """Token id of this rank's first row."""
        return self.group.rank() * len(self.weight)

    @property
    def true_weight(self) -> Tensor:
        """This rank's rows without the padding; there may be none."""
        return self.weight.detach()[: max(0, self.vocab_size - self.first_id)]

    def spans(self, n_tokens: int) -> Iterator[slice]:
        """Rows of one pass after the other."""
        size = max(1, self.chunk_tokens // COPIES)
        return (slice(start, start + size) for start in range(0, n_tokens, size))

    def logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Of one pass after the other: its rows, and [rows, this rank's ids] in the same memory."""
        weight = self.true_weight.t()
        memory = None
        for span in self.spans(len(hidden)) if weight.numel() else ():
            if memory is None:
                memory = hidden.new_empty(len(hidden[span]), weight.shape[1])
            part = hidden[span]
            yield span, torch.mm(part, weight, out=memory[: len(part)])


def token_logprobs(hidden: Tensor, targets: Tensor, layer: OutputLayer) -> TokenLogprobs:
    """Logprob of targets[i] and entropy under softmax(logits of hidden[i] / temperature).

    hidden: [tokens, hidden], equal on all ranks of the group; its gradient is this rank's part of
    the sum over the group. targets: [tokens] int64, global ids below vocab_size.
    """
    logprobs, entropy = _Logprobs.apply(hidden.to(layer.weight.dtype), layer.weight, targets, layer)
    return TokenLogprobs(logprobs, entropy)


class _Logprobs(torch.autograd.Function):
    """d logprob / d logit = (is target - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layer: OutputLayer
    ) -> tuple[Tensor, Tensor]:
        n_ids = len(layer.true_weight)
        hidden = hidden.contiguous()
        local = targets - layer.first_id
        is_local = (local >= 0) & (local < n_ids)
        local = local.clamp(0, max(n_ids - 1, 0))

        # Of each row: largest logit; then, relative to it, sum of exp, sum of exp * logit, and the
        # target's logit. A rank that holds padding alone adds nothing.
        n_tokens = len(hidden)
        lowest = torch.finfo(torch.float32).min
        maxima = torch.full((n_tokens,), lowest, dtype=torch.float32, device=hidden.device)
        sums = torch.zeros(3, n_tokens, dtype=torch.float32, device=hidden.device)
        for span, logits in layer.logits(hidden):
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
        ctx.save_for_backward(hidden, local, is_local, maxima + log_z)
        ctx.layer = layer
        entropy = log_z - sums[1] / sums[0]
        ctx.mark_non_differentiable(entropy)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, local, is_local, log_z = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        weight = layer.true_weight
        slope = grad / layer.temperature
        grad_hidden = torch.zeros_like(hidden)
        # Parts of a sum: in float32, as Megatron's gradient buffers are.
        grad_weight = layer.gradient
        if grad_weight is None:
            grad_weight = torch.zeros_like(layer.weight, dtype=torch.float32)
        for span, logits in layer.logits(hidden):
            rows = softmax_gradient(
                logits,
                local[span],
                layer.temperature,
                log_z=log_z[span],
                slopes=slope[span],
                target_slopes=(slope * is_local)[span],
            )
            torch.mm(rows, weight, out=grad_hidden[span])
            add_product(grad_weight[: len(weight)], rows, hidden[span])
        handed_on = None
        if layer.gradient is None:
            handed_on = grad_weight
        elif layer.is_sole_user:
            # As Megatron's own layers do: the hook is called, and leaves this one out.
            layer.weight.grad_added_to_main_grad = True
            handed_on = torch.empty_like(layer.weight)
        return grad_hidden, handed_on, None, None
