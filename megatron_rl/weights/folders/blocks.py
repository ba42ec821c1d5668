"""What a Megatron checkpoint holds: its tensors in blocks, and the HF tensors of each block.

Used by trainer ranks and by conversions; pure functions of sizes. A checkpoint stacks the layers
of a model, and the experts of a layer, along leading axes; it knows no tensor, pipeline or expert
ranks, and neither do blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.tensor_shards import Piece
from megatron_rl.weights.layout.trainer_layout import (
    ARCHITECTURES,
    EMBEDDING,
    ENGINE_NAMES,
    FINAL_NORM,
    OUTPUT,
    PADDED,
    Entry,
    Place,
)

_KEYS = {ours: engine for engine, ours in ENGINE_NAMES.items()}
_MIXTURE_KEYS = {ours: key for ours, key in _KEYS.items() if ".linear_fc1." not in key}
"""No norm is fused into experts."""


@dataclass(frozen=True)
class Block:
    """One Megatron parameter of one layer or expert, undivided."""

    key: str
    """Name of the checkpoint's tensor; the block is `tensor[lead]`."""
    lead: tuple[int, ...]
    """Layer and expert; layer; or neither."""
    lead_size: tuple[int, ...]
    """How many there are."""
    size: tuple[int, ...]
    hf: tuple[str, ...]
    hf_sizes: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]
    """Which part of the block, seen as a matrix, is which part of which HF tensor."""

    @property
    def full_size(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return (*self.lead_size, *self.size)

    @property
    def may_be_padded(self) -> bool:
        """Whether the checkpoint may hold more rows, which belong to no HF tensor."""
        return self.key in PADDED

    @cached_property
    def pieces_of(self) -> dict[str, list[Piece]]:
        """HF tensor -> the pieces that are parts of it."""
        found: dict[str, list[Piece]] = {name: [] for name in self.hf}
        for piece in self.pieces:
            found[self.hf[piece.source]].append(piece)
        return found


def model_blocks(shape: ModelShape) -> Iterator[Block]:
    """All blocks of a model, so that their HF tensors come nearly in the order of `hf_shapes`."""
    yield _Kind(EMBEDDING, shape).block(shape, 0, 0)
    kinds = [_Kind(entry, shape) for entry in ARCHITECTURES[shape.architecture]]
    for layer in range(shape.layers):
        yield from (kind.block(shape, layer, 0) for kind in kinds if not kind.entry.is_expert)
        for expert in range(shape.experts):
            yield from (kind.block(shape, layer, expert) for kind in kinds if kind.entry.is_expert)
    yield _Kind(FINAL_NORM, shape).block(shape, 0, 0)
    if not shape.is_tied:
        yield _Kind(OUTPUT, shape).block(shape, 0, 0)


class _Kind:
    """What the blocks of one entry have in common."""

    def __init__(self, entry: Entry, shape: ModelShape) -> None:
        self.entry = entry
        self.key = _checkpoint_key(entry.megatron, _MIXTURE_KEYS if shape.experts else _KEYS)
        self.pieces = tuple(entry.pieces(shape, Place()))
        self.hf_sizes = tuple(entry.hf_shapes(shape))
        rows = max(piece.local_row + piece.rows for piece in self.pieces)
        columns = max(piece.local_column + piece.columns for piece in self.pieces)
        self.size = (rows,) if len(self.hf_sizes[0]) == 1 else (rows, columns)

    def block(self, shape: ModelShape, layer: int, expert: int) -> Block:
        """The block of a layer and an expert, if the entry has such."""
        lead: tuple[int, ...] = ()
        lead_size: tuple[int, ...] = ()
        if "{layer}" in self.entry.megatron:
            lead, lead_size = (layer,), (shape.layers,)
        if self.entry.is_expert:
            lead, lead_size = (layer, expert), (shape.layers, shape.experts)
        names = tuple(name.format(layer=layer, expert=expert) for name in self.entry.hf)
        return Block(self.key, lead, lead_size, self.size, names, self.hf_sizes, self.pieces)


def _checkpoint_key(megatron: str, renamed: dict[str, str]) -> str:
    """Megatron's name of a parameter as `GPTModel.sharded_state_dict` spells it."""
    key = megatron.replace(".{layer}", "").replace("local_experts.{expert}", "experts")
    for ours, theirs in renamed.items():
        if key.endswith("." + ours):
            return key.removesuffix(ours) + theirs
    return key
