"""Writes a Megatron checkpoint (torch_dist) chunk by chunk, without building the model.

A chunk is an HF tensor if that is one run of rows of a parameter, else a whole parameter of one
layer or expert. torch's storage writer requests each chunk when it writes it; several files are
written as if each were a rank's.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.hf_folder import bucketed
from megatron_rl.weights.folders.megatron_folder import Block, model_blocks
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Piece, as_matrix

_COMMON = "common.pt"
_KIND = "metadata.json"
_TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""megatron.core.dist_checkpointing.core.CheckpointingConfig, without loading all of Megatron."""


class Tensors(Protocol):
    """Tensors by their HF names."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""

    def read(self, name: str) -> Tensor:
        """A tensor."""


def write_checkpoint(
    folder: Path, shape: ModelShape, tensors: Tensors, *, shard_bytes: int
) -> None:
    """Fill `folder`, which is empty; a file exceeds `shard_bytes` only when one chunk does.

    Holds a chunk, the HF tensors of which it is made, and at most a file's chunks. Raises
    InputError when tensors that Megatron stacks differ in dtype.
    """
    dtypes = _dtypes(shape, tensors)
    planner = _Planner(tensors)

    def bytes_of(chunk: _Chunk) -> int:
        return chunk.area.sizes.numel() * dtypes[chunk.block.key].itemsize

    plans = [
        SavePlan([planner.add(chunk, dtypes[chunk.block.key]) for chunk in chunks])
        for chunks in bucketed(_chunks(shape), bytes_of, shard_bytes)
    ]
    plans, metadata = planner.create_global_plan(plans)
    # On a CUDA host torch would otherwise read ahead.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])
    torch.save({}, folder / _COMMON)
    (folder / _KIND).write_text(json.dumps(_TORCH_DIST))


@dataclass(frozen=True)
class _Chunk:
    """Some pieces of a block that together are a run of its rows."""

    block: Block
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> range:
        """Rows of the block."""
        return range(
            min(piece.local_row for piece in self.pieces),
            max(piece.local_row + piece.rows for piece in self.pieces),
        )

    @property
    def area(self) -> ChunkStorageMetadata:
        """Where it lies in the checkpoint's tensor."""
        lead, columns = self.block.lead, self.block.size[1:]
        return ChunkStorageMetadata(
            torch.Size((*lead, self.rows.start, *(0 for _ in columns))),
            torch.Size((*(1 for _ in lead), len(self.rows), *columns)),
        )

    def fill(self, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
        """The chunk's content, of the area's shape, in new memory."""
        content = torch.empty(self.area.sizes, dtype=dtype)
        # A vector's matrix has one column; as_matrix would take a row of stacked ones for it.
        target = content.view(len(self.rows), -1)
        for source in sorted({piece.source for piece in self.pieces}):
            matrix = as_matrix(read(self.block.hf[source]))
            for piece in self.pieces:
                if piece.source == source:
                    first = piece.local_row - self.rows.start
                    target[first : first + piece.rows] = matrix[piece.row : piece.row + piece.rows]
        return content


def _chunks(shape: ModelShape) -> Iterator[_Chunk]:
    for block in model_blocks(shape):
        if len(block.pieces) == len(block.hf):
            yield from (_Chunk(block, (piece,)) for piece in block.pieces)
        else:
            yield _Chunk(block, block.pieces)


def _dtypes(shape: ModelShape, tensors: Tensors) -> dict[str, torch.dtype]:
    """Checkpoint tensor -> its dtype."""
    found: dict[str, tuple[torch.dtype, str]] = {}
    for block in model_blocks(shape):
        for name in block.hf:
            dtype, other = found.setdefault(block.key, (tensors.dtype_of(name), name))
            if tensors.dtype_of(name) != dtype:
                raise InputError(
                    f"{name} is {tensors.dtype_of(name)} and {other} is {dtype}, but Megatron "
                    "stacks them: ask for one dtype with --dtype"
                )
    return {key: dtype for key, (dtype, _) in found.items()}


class _Planner(DefaultSavePlanner):
    """Makes each chunk when it is written."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._chunks: dict[MetadataIndex, tuple[_Chunk, torch.dtype]] = {}

    def add(self, chunk: _Chunk, dtype: torch.dtype) -> WriteItem:
        """Metadata of a chunk for the storage writer."""
        area = chunk.area
        index = MetadataIndex(chunk.block.key, area.offsets)
        self._chunks[index] = (chunk, dtype)
        size = torch.Size(chunk.block.full_size)
        data = TensorWriteData(area, TensorProperties(dtype=dtype), size)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The content of a chunk."""
        chunk, dtype = self._chunks[write_item.index]
        return chunk.fill(self._tensors.read, dtype)
