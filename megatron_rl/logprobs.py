"""Log-probabilities of given tokens under vocabulary-parallel logits.

Runs in trainer ranks. The only place that turns "predicts next" rows into "is this token" values
is `collate.py`; here row i of the logits is already the one that predicts target i.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_TOKENS = 1024


class TokenLogprobs(NamedTuple):
    """Per-token results, equal on every tensor-parallel rank."""

    logprobs: Tensor
    """[tokens] float32, differentiable."""
    entropy: Tensor
    """[tokens] float32 in nats, not differentiable."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float,
) -> TokenLogprobs:
    """Logprob of targets[i] and entropy of row i under softmax(logits / temperature).

    logits: [tokens, padded vocabulary / ranks of group], this rank's columns; targets: [tokens]
    int64, global ids below vocab_size. Columns from vocab_size on are padding and count as -inf.
    """
    logprobs, entropy = _VocabParallelLogprobs.apply(
        logits, targets, vocab_size, group, temperature
    )
    return TokenLogprobs(logprobs, entropy)


def _chunk(logits: Tensor, start: int, n_true: int, temperature: float) -> Tensor:
    """Rows of one chunk as a float32 copy, scaled, with padded columns at -inf."""
    rows = logits[start : start + CHUNK_TOKENS].to(torch.float32, copy=True)
    if temperature != 1.0:
        rows /= temperature
    rows[:, n_true:] = float("-inf")
    return rows


class _VocabParallelLogprobs(torch.autograd.Function):
    """Chunked over tokens, so that no float32 copy of all logits ever exists."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        n_tokens, n_columns = logits.shape
        first_column = group.rank() * n_columns
        n_true = max(0, min(n_columns, vocab_size - first_column))
        local = targets - first_column
        is_local = (local >= 0) & (local < n_columns)
        local = local.clamp(0, n_columns - 1)

        maxima = logits.new_full((n_tokens,), float("-inf"), dtype=torch.float32)
        if n_true:
            maxima = logits[:, :n_true].amax(dim=-1).float() / temperature
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)

        # Rows: sum of exp, sum of exp * logit, logit of the target; all relative to the maximum.
        sums = torch.zeros(3, n_tokens, dtype=torch.float32, device=logits.device)
        for start in range(0, n_tokens, CHUNK_TOKENS):
            span = slice(start, start + CHUNK_TOKENS)
            rows = _chunk(logits, start, n_true, temperature)
            rows -= maxima[span, None]
            sums[2, span] = rows.gather(1, local[span, None])[:, 0].masked_fill(~is_local[span], 0)
            exps = rows.exp()
            sums[0, span] = exps.sum(-1)
            # exp(-inf) * -inf would be NaN: padded columns add nothing.
            sums[1, span] = (exps[:, :n_true] * rows[:, :n_true]).sum(-1)
        dist.all_reduce(sums, group=group)

        log_z = sums[0].log()
        ctx.save_for_backward(logits, local, is_local, maxima + log_z)
        ctx.n_true, ctx.temperature = n_true, temperature
        entropy = log_z - sums[1] / sums[0]
        ctx.mark_non_differentiable(entropy)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, is_local, log_z = ctx.saved_tensors
        out = torch.empty_like(logits)
        for start in range(0, len(logits), CHUNK_TOKENS):
            span = slice(start, start + CHUNK_TOKENS)
            rows = _chunk(logits, start, ctx.n_true, ctx.temperature)
            softmax = rows.sub_(log_z[span, None]).exp_()
            slope = grad[span, None] / ctx.temperature
            rows = softmax.mul_(-slope)
            rows.scatter_add_(1, local[span, None], slope * is_local[span, None])
            out[span] = rows
        return out, None, None, None, None
