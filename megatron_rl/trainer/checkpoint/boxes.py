"""A run of a parameter's elements as boxes of the whole tensor. Runs in trainer ranks.

The distributed optimizer gives each data-parallel rank a run of every parameter's elements, one
after the other in memory. Checkpoints hold boxes: rectangular parts of a whole tensor at an offset.
A run of a matrix is at most three of them: the end of a row, whole rows, the beginning of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of this rank's shard of a parameter that is also a box of the whole tensor."""

    start: int
    """First element, in the order of the shard in memory; the others follow it."""
    size: Sizes
    of: ShardedTensor
    """Without data: the tensor that the shard is a box of itself."""
    offset: Sizes
    """In the whole tensor."""

    @property
    def end(self) -> int:
        """One after the last element."""
        return self.start + prod(self.size)

    def sharded(self, key: str, run: Tensor, run_start: int) -> ShardedTensor:
        """Its elements out of a run of the shard's, sharing their memory.

        run: [elements] from element `run_start` of the shard on.
        """
        data = run[self.start - run_start : self.end - run_start].view(self.size)
        return ShardedTensor(
            key,
            data,
            data.dtype,
            local_shape=self.size,
            global_shape=self.of.global_shape,
            global_offset=self.offset,
            axis_fragmentations=None,
            # The last part numbers data-parallel replicas; only this replica has the box.
            replica_id=(*self.of.replica_id[:-1], 0),
            allow_shape_mismatch=self.of.allow_shape_mismatch,
        )


def boxes_of(
    owner: ShardedTensor | ShardedTensorFactory, shape: torch.Size, start: int, end: int
) -> list[Box]:
    """Elements [start, end) of a rank's shard of a parameter; in their order.

    owner: the parameter in the model's sharded state. shape: of the shard.
    """
    boxes = []
    for part, first in _parts(owner, shape):
        last = first + prod(part.local_shape)
        low, high = max(start, first), min(end, last)
        for corner, size in runs_as_boxes(part.local_shape, low - first, high - first):
            # Where experts have their own axis, the shard has none.
            lead = len(part.global_shape) - len(corner)
            inner = (*(0 for _ in range(lead)), *corner)
            offset = tuple(a + b for a, b in zip(part.global_offset, inner, strict=True))
            at = first + sum(
                place * prod(part.local_shape[axis + 1 :]) for axis, place in enumerate(corner)
            )
            boxes.append(Box(at, (*(1 for _ in range(lead)), *size), part, offset))
    return boxes


def _parts(
    owner: ShardedTensor | ShardedTensorFactory, shape: torch.Size
) -> Iterator[tuple[ShardedTensor, int]]:
    """Tensors that a shard is kept as, and the first element of each: gate and up are two."""
    if isinstance(owner, ShardedTensor):
        yield owner.without_data(), 0
        return
    # On "meta" nothing is allocated, but a view knows where it lies.
    whole = torch.empty(shape, device="meta")
    built = owner.build_fn(owner.key, whole, owner.replica_id, None)
    for part in nested_values({"": built}):
        assert part.data.is_contiguous(), f"{owner.key} is not kept in the order of its memory"
        yield part.without_data(), part.data.storage_offset()


def runs_as_boxes(shape: Sizes, start: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    """(corner, size) of boxes that hold elements [start, end) of a tensor, in their order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    (row, low), (last, high) = divmod(start, inner), divmod(end, inner)
    if low:
        stop = high if row == last else inner
        yield from _in_row(row, shape, low, stop)
        row += 1
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
    if row <= last:
        yield from _in_row(last, shape, 0, high)


def _in_row(row: int, shape: Sizes, start: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    for corner, size in runs_as_boxes(shape[1:], start, end):
        yield (row, *corner), (1, *size)
