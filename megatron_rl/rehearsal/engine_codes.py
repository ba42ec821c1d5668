"""FP8 tensors of TransformerEngine by shape: codes of one byte, their scales, and gathered codes.

Used by rehearsed ranks, through `engine_fp8_products.py`. Written after transformer-engine 2.12.0
(tensor/float8_tensor.py, tensor/float8_blockwise_tensor.py, distributed.py) on a GPU whose FP8
products need both factors by rows, as Hopper's do: a transposed product needs transposed codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_rl.backend.fp8 import BLOCK
from megatron_rl.rehearsal.engine_fp8 import Float8BlockScaling, Float8CurrentScaling, Recipe

_SCALE_MULTIPLE = 4
"""Scales of blocks are padded to it, as products ask for it."""


@dataclass
class Codes:
    """A tensor of [positions, width] in FP8: by rows, transposed, or both."""

    rows: Tensor | None = None
    """[positions, width] uint8."""
    row_scales: Tensor | None = None
    columns: Tensor | None = None
    """[width, positions] uint8."""
    column_scales: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """All of them, to be saved; `Codes(*tensors)` is the same again."""
        return [self.rows, self.row_scales, self.columns, self.column_scales]

    def without_rows(self) -> "Codes":
        """What the gradient of a weight needs."""
        return replace(self, rows=None, row_scales=None)

    def without_columns(self) -> "Codes":
        """What a product forward needs."""
        return replace(self, columns=None, column_scales=None)

    def add_columns(self) -> None:
        """Transpose the codes of a tensor that has one scale, if they are not there."""
        if self.columns is None:
            assert self.rows is not None
            self.columns = self.rows.new_zeros(*reversed(self.rows.shape))
            self.column_scales = self.row_scales


@dataclass(frozen=True)
class Quantizer:
    """How a layer quantises one of its tensors."""

    recipe: Recipe
    is_weight: bool = False
    """Blocks are squares, and not 128 elements of a row or column."""
    group: dist.ProcessGroup | None = None
    """Ranks that have other rows of the tensor. A single scale is that of all rows."""

    @property
    def has_blocks(self) -> bool:
        """Whether each block has a scale, and not the whole tensor."""
        return isinstance(self.recipe, Float8BlockScaling)

    def can_gather(self, tensor: Tensor) -> bool:
        """Whether ranks can exchange the codes of [positions, width]: whole blocks alone."""
        return not (self.has_blocks and any(size % BLOCK for size in tensor.shape))

    def quantize(
        self, tensor: Tensor, *, rows: bool, columns: bool, splits: Sequence[int] = ()
    ) -> Codes:
        """Codes of [positions, width]. splits: positions of each expert, which have own scales."""
        if self.group is not None and isinstance(self.recipe, Float8CurrentScaling):
            maximum = tensor.new_zeros(1, dtype=torch.float32)
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self.group)
        found = self.empty(tensor, *tensor.shape, rows=rows, columns=columns, splits=splits)
        fill(found)
        return found

    def empty(
        self,
        like: Tensor,
        positions: int,
        width: int,
        *,
        rows: bool,
        columns: bool,
        splits: Sequence[int] = (),
    ) -> Codes:
        """As `quantize`, on the device of another tensor, and not filled."""

        def codes(*sizes: int) -> Tensor:
            return like.new_empty(*sizes, dtype=torch.uint8)

        parts = splits or [positions]
        found = Codes()
        if rows:
            found.rows = codes(positions, width)
            found.row_scales = self._scales(like, parts, width, by_columns=False)
        if columns:
            found.columns = codes(width, positions)
            found.column_scales = (
                found.row_scales
                if rows and not self.has_blocks
                else self._scales(like, parts, width, by_columns=True)
            )
        return found

    def _scales(
        self, like: Tensor, parts: Sequence[int], width: int, *, by_columns: bool
    ) -> Tensor:
        """float32; of several parts, behind each other."""
        count = len(parts)
        if self.has_blocks:
            sizes = [self._scale_shape(part, width, by_columns=by_columns) for part in parts]
            if len(sizes) == 1:
                return like.new_empty(*sizes[0], dtype=torch.float32)
            count = sum(first * second for first, second in sizes)
        return like.new_empty(count, dtype=torch.float32)

    def _scale_shape(self, positions: int, width: int, *, by_columns: bool) -> tuple[int, int]:
        if self.is_weight:
            sides = -(-positions // BLOCK), -(-width // BLOCK)
            first, second = reversed(sides) if by_columns else sides
        elif by_columns:
            first, second = -(-positions // BLOCK), width
        else:
            first, second = -(-width // BLOCK), positions
        return first, second + -second % _SCALE_MULTIPLE


def fill(codes: Codes) -> None:
    """One kernel quantises a tensor, by rows, by columns or both."""
    filled = codes.columns if codes.rows is None else codes.rows
    assert filled is not None
    filled.zero_()


def quantized_weight(
    held: Codes | None, weight: Tensor, recipe: Recipe, *, with_columns: bool, is_first: bool
) -> Codes:
    """A weight's codes, filled again in the first microbatch; those held stay."""
    quantizer = Quantizer(recipe, is_weight=True)
    if held is not None and is_first and not with_columns:
        held = held.without_columns()
    if held is None or (with_columns and held.columns is None):
        return quantizer.quantize(weight, rows=True, columns=with_columns)
    if is_first:
        fill(held)
    return held


def gather_codes(
    shard: Codes,
    group: dist.ProcessGroup,
    quantizer: Quantizer,
    *,
    rows: bool,
    columns: bool,
    is_async: bool = False,
) -> tuple[Codes, list[Tensor]]:
    """All ranks' positions, and what the gather needs until it has ended.

    Codes with one scale are gathered by rows and then transposed; blocks with their scales, in one
    call.
    """
    if not quantizer.has_blocks:
        assert shard.rows is not None
        positions, width = shard.rows.shape
        whole = quantizer.empty(
            shard.rows, positions * group.size(), width, rows=True, columns=columns
        )
        dist.all_gather_into_tensor(whole.rows, shard.rows, group=group, async_op=is_async)
        return whole, []
    given = shard.rows if rows else shard.columns
    assert given is not None
    positions, width = given.shape if rows else reversed(given.shape)
    whole = quantizer.empty(given, positions * group.size(), width, rows=rows, columns=columns)
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    if rows:
        # What ranks send lies behind each other, and is put in order afterwards.
        pairs += [(_like(shard.row_scales, group), shard.row_scales), (whole.rows, shard.rows)]
    if columns:
        pairs += [(whole.column_scales, shard.column_scales),
                  (_like(shard.columns, group), shard.columns)]  # fmt: skip
    with _coalescing_manager(group, async_ops=is_async):
        for target, source in pairs:
            dist.all_gather_into_tensor(target, source, group=group)
    return whole, [target for target, _ in pairs if target is not None]


def _like(shard: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    assert shard is not None
    return shard.new_empty(len(shard) * group.size(), *shard.shape[1:])
