"""Softmax over rows of logits that never leave their dtype: its sums, and its gradient in place.

Used by trainer ranks of the last pipeline stage. On the CPU the loops are `kernels/softmax.cpp`;
elsewhere, and for the KL of two softmaxes, plain torch, in float32.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.backend.cpu.loops import is_bfloat16, library_for, pointer

SOURCE = "softmax"


class Sums(NamedTuple):
    """Of each row, [rows] float32 each. All but the first are relative to the first."""

    maxima: Tensor
    """The largest logit, divided by the temperature as all of them."""
    exps: Tensor
    """Sum of exp(logit)."""
    weighted: Tensor
    """Sum of exp(logit) * logit."""
    chosen: Tensor
    """The target's logit."""


class Bonus(NamedTuple):
    """Of each row, [rows] float32: what the loss gains with its entropy, and the entropy."""

    slopes: Tensor
    entropy: Tensor

    def rows(self, span: slice) -> "Bonus":
        """Of some rows."""
        return Bonus(self.slopes[span], self.entropy[span])


class PairSums(NamedTuple):
    """Of each row of two softmaxes, this one's and another's, [rows] float32 each."""

    maxima: Tensor
    """This one's largest logit, divided by the temperature as all of them."""
    gaps: Tensor
    """Sum of exp(logit - maximum) * (logit - the other's logit)."""
    other_maxima: Tensor
    other_exps: Tensor
    """Sum of the other's exp(logit - maximum)."""


class Divergence(NamedTuple):
    """Of each row: what the loss gains with KL(this softmax || another), and what that is of."""

    slopes: Tensor  # [rows] float32
    kl: Tensor  # [rows] float32, nats
    others: Tensor  # [rows, ids] logits of the other, which are lost
    other_log_z: Tensor  # [rows] float32


def is_read_only(logits: Tensor) -> bool:
    """Whether `softmax_sums` leaves tensors of this device and dtype as they are."""
    return library_for(SOURCE, logits) is not None


def softmax_sums(logits: Tensor, targets: Tensor, temperature: float) -> Sums:
    """What logprobs and entropy are made of.

    logits: [rows, ids], which are lost unless `is_read_only`; targets: [rows] int64.
    """
    loops = library_for(SOURCE, logits)
    if loops is None:
        rows = _divided(logits, temperature)
        maxima = rows.amax(-1)
        rows -= maxima[:, None]
        chosen = rows.gather(1, targets[:, None])[:, 0]
        exps = rows.exp()
        return Sums(maxima, exps.sum(-1), exps.mul_(rows).sum(-1), chosen)
    found = Sums(*torch.empty(4, len(logits)))
    loops.softmax_sums(
        *map(pointer, (logits, targets.contiguous(), *found)),
        *map(ctypes.c_long, logits.shape),
        ctypes.c_float(1 / temperature),
        is_bfloat16(logits),
    )
    return found


def pair_sums(logits: Tensor, others: Tensor, temperature: float) -> PairSums:
    """What KL(softmax(logits / temperature) || softmax(others / temperature)) is made of.

    logits, others: [rows, ids] of one dtype; the others are lost.
    """
    tops, other_tops = logits.amax(-1).float(), others.amax(-1).float()
    # Not one sum less the other: policies are near one another, and these sums are large.
    gaps = logits.to(torch.float32, copy=True).sub_(others)
    exps = logits.to(torch.float32, copy=True).sub_(tops[:, None]).div_(temperature).exp_()
    gaps.mul_(exps)
    del exps
    gaps = gaps.sum(-1).div_(temperature)
    other_exps = others.float().sub_(other_tops[:, None]).div_(temperature).exp_().sum(-1)
    return PairSums(tops / temperature, gaps, other_tops / temperature, other_exps)


def softmax_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    log_z: Tensor,
    slopes: Tensor,
    target_slopes: Tensor,
    bonus: Bonus | None = None,
    divergence: Divergence | None = None,
) -> Tensor:
    """-slope * softmax(logits / temperature), plus the target's slope at the target.

    log_z, slopes, target_slopes: [rows] float32. In the dtype of the logits, which are lost.
    bonus adds slope * -softmax * (log softmax + entropy). divergence adds slope * softmax * (log
    softmax - the other's - KL).
    """
    loops = library_for(SOURCE, logits)
    if loops is None or divergence is not None:
        rows = _divided(logits, temperature)
        rows.sub_(log_z[:, None])
        along = None
        if bonus is not None:
            along = (rows + bonus.entropy[:, None]).mul_(bonus.slopes[:, None])
        if divergence is not None:
            along = _along_divergence(rows, divergence, temperature, along)
        if along is None:
            rows.exp_().mul_(-slopes[:, None])
        else:
            rows.exp_().mul_(along.add_(slopes[:, None]).neg_())
        rows.scatter_add_(1, targets[:, None], target_slopes[:, None])
        return rows.to(logits.dtype)
    extra = bonus or Bonus(torch.zeros_like(slopes), slopes)
    values = [v.contiguous() for v in (targets, log_z, slopes, target_slopes, *extra)]
    loops.softmax_gradient(
        *map(pointer, (logits, *values)),
        *map(ctypes.c_long, logits.shape),
        ctypes.c_float(1 / temperature),
        is_bfloat16(logits),
    )
    return logits


def _along_divergence(
    log_softmax: Tensor, divergence: Divergence, temperature: float, along: Tensor | None
) -> Tensor:
    """-slope * (log softmax - the other's - KL) [rows, ids] float32, added to what there is."""
    slopes, kl, others, other_log_z = divergence
    gaps = _divided(others, temperature)
    gaps.sub_(log_softmax).add_((kl - other_log_z)[:, None]).mul_(slopes[:, None])
    return gaps if along is None else along.add_(gaps)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """In float32, in the same memory if they are."""
    rows = logits.float()
    return rows if temperature == 1.0 else rows.div_(temperature)
