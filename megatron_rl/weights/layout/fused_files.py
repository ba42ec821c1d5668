"""Families whose files have several projections or experts in one tensor. Pure functions of sizes.

Used by trainer ranks and engines; `folders/fused_experts.py` reads and writes experts. The rows of
`qkv_proj` are queries, keys and values, in this order. The rows of `gate_up_proj` are those of
gate, then those of up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.place import Entry
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Piece, Share, Slice

if TYPE_CHECKING:
    from torch import Tensor


def file_place(shape: ModelShape, hf: str) -> tuple[str, int]:
    """The tensor of the files that holds the projection `hf`, and the row where it begins."""
    module, _, kind = hf.rpartition(".")
    block, _, projection = module.rpartition(".")
    queries, keys = (heads * shape.head_dim for heads in (shape.heads, shape.kv_heads))
    places = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", queries),
        "v_proj": ("qkv_proj", queries + keys),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", shape.ffn),
    }
    if not shape.has_fused_files or projection not in places:
        return hf, 0
    name, row = places[projection]
    return f"{block}.{name}.{kind}", row


def slices_in_files(shape: ModelShape, parts: Iterable[Slice]) -> list[Slice]:
    """Slices of projections, as slices of the tensors that files have."""
    found = ((part, *file_place(shape, part.hf)) for part in parts)
    return [part._replace(hf=name, row=part.row + row) for part, name, row in found]


def entry_in_files(shape: ModelShape, entry: Entry) -> Entry:
    """An entry of projections, as one of the tensor that files have."""
    places = [file_place(shape, hf) for hf in entry.hf]
    if places == [(hf, 0) for hf in entry.hf]:
        return entry

    def layout(fused: Sequence[tuple[int, int]], share: Share, shape: ModelShape) -> list[Piece]:
        sizes = [(rows, columns) for rows, columns in entry.hf_shapes(shape)]
        return [
            piece._replace(source=0, row=piece.row + places[piece.source][1])
            for piece in entry.layout(sizes, share, shape)
        ]

    def size(shape: ModelShape) -> list[tuple[int, ...]]:
        return [(sum(rows for rows, _ in entry.hf_shapes(shape)), shape.hidden)]

    return replace(entry, hf=(places[0][0],), layout=layout, hf_shapes=size)


def each_expert(name: str, tensor: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Split a file's tensor of all experts into their weights; pass any other tensor on."""
    block, mark, part = name.rpartition(".experts.")
    words = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(part)
    if not mark or words is None:
        yield name, tensor
        return
    matrices = tensor if is_plain(tensor.shape, part, shape) else tensor.mT
    places = expert_places(shape)
    for expert, matrix in enumerate(matrices):
        for word in words:
            yield f"{block}.experts.{expert}.{word}_proj.weight", matrix[places[word]]


def is_plain(size: Sequence[int], part: str, shape: ModelShape) -> bool:
    """Whether a file's tensor of all experts is not transposed. part: the end of its name."""
    if FAMILIES[shape.architecture].pairs_units:
        return False
    is_down = part.endswith("down_proj")
    rows, columns = (shape.hidden, shape.moe_ffn) if is_down else (2 * shape.moe_ffn, shape.hidden)
    return tuple(size[1:]) == (rows, columns)


def expert_places(shape: ModelShape) -> dict[str, slice]:
    """Where an expert's gate, up and down lie among the outputs of the fused tensors."""
    if FAMILIES[shape.architecture].pairs_units:
        pair = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    else:
        pair = {"gate": slice(shape.moe_ffn), "up": slice(shape.moe_ffn, None)}
    return pair | {"down": slice(None)}
