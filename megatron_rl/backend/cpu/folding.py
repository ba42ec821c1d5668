"""Positions that packed sequences have in common, computed once: spread out for attention alone.

Used by trainer ranks on the CPU. The rollouts of a group begin with the same prompt, and what a
causal model computes of it does not depend on what follows. So the model takes each prompt once
(`trainer/model/shared_prompts.py`), and attention, the only part in which positions meet, sees the
sequences end to end as ever. Gradients of a prompt's positions are the sums over its rollouts.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl.backend.cpu.loops import is_bfloat16, library, pointer

SOURCE = "pointwise"


@dataclass(frozen=True)
class Folding:
    """Which rows of sequences laid end to end are the same position of the model."""

    positions: Tensor
    """[rows] int64: the position of each row; every position has one row or more."""
    rows: Tensor
    """[positions] int64: one row of each position."""

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """Rows in the order of their positions, and where in it each position begins, and ends."""
        counts = torch.bincount(self.positions, minlength=len(self.rows))
        bounds = torch.zeros(len(self.rows) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=bounds[1:])
        return self.positions.argsort(stable=True), bounds

    def unfold(self, values: Tensor) -> Tensor:
        """[rows, width] of [positions, width]; gradients are summed in float32."""
        return _Unfold.apply(values, self)

    def fold(self, values: Tensor) -> Tensor:
        """[positions, width] of [rows, width], whose rows of one position are equal."""
        return _Fold.apply(values, self)


@dataclass
class FoldedSeqParams(PackedSeqParams):
    """Of sequences that the model sees folded; the lengths are those of whole sequences."""

    lengths: tuple[int, ...] = ()
    """Of each sequence, in host memory: reading the device's bounds would wait for the device."""
    folding: Folding | None = None


def folding_of(packed_seq_params: PackedSeqParams | None) -> Folding | None:
    """How the positions are folded; None: they are not."""
    return getattr(packed_seq_params, "folding", None)


class _Unfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, folding: Folding) -> Tensor:
        ctx.folding = folding
        return values.index_select(0, folding.positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order, bounds = ctx.folding.members
        grad = grad.contiguous()
        total = grad.new_empty(len(bounds) - 1, *grad.shape[1:])
        library(SOURCE).sum_rows(
            *map(pointer, (grad, order, bounds, total)),
            ctypes.c_long(len(total)),
            total[0].numel(),
            is_bfloat16(grad),
        )
        return total, None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, folding: Folding) -> Tensor:
        ctx.folding = folding
        return values.index_select(0, folding.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        folding: Folding = ctx.folding
        # One row stands for its position: the others, equal to it, lead nowhere.
        spread = grad.new_zeros(len(folding.positions), *grad.shape[1:])
        spread[folding.rows] = grad
        return spread, None
