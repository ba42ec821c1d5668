"""Families whose files have some projections one below the other. Pure functions of sizes.

Used by trainer ranks and engines. Rows of `qkv_proj` are queries, then keys, then values; those of
`gate_up_proj` are gate, then up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_rl.weights.layout.place import Entry
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Piece, Share, Slice


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
