"""Maps Hugging Face tensors to Megatron's parameters, as slices.

Used by trainer ranks to load, export and plan exchanges; pure functions of sizes, which need no
torch. `entries.py` says of what a layer is made, `shape.py` reads config.json, `engine_layout.py`
knows where SGLang keeps its tensors, and `local_names.py` finds a rank's own by the names used
here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from megatron_rl.weights.layout.entries import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    layer_entries,
)
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.place import Entry, Place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Slice


@functools.lru_cache(maxsize=64)
def untrained(shape: ModelShape) -> frozenset[str]:
    """HF names of the float32 tensors that are loaded and exported, but never trained."""
    return frozenset(
        name.format(layer=layer)
        for layer in range(shape.layers)
        for entry in layer_entries(shape, layer)
        if not entry.is_trained
        for name in entry.hf
    )


def trained_slices(shape: ModelShape, place: Place) -> list[Slice]:
    """As `trainer_slices`, of what training changes: all that weight syncs send."""
    kept = untrained(shape)
    return [part for part in trainer_slices(shape, place) if part.hf not in kept]


def trainer_slices(shape: ModelShape, place: Place) -> list[Slice]:
    """Slices of the parameters that the rank owns, in the order of `hf_shapes`.

    A tensor that tensor ranks replicate is in the slices of each. A tied output matrix on the
    last of several stages is a copy: see `copy_slices`.
    """
    stage = place.pipeline
    slices: list[Slice] = []
    if stage.rank == 0:
        slices += _single(EMBEDDING, shape, place)
    slices += _layer_slices(shape, place)
    if stage.rank == stage.size - 1:
        slices += _single(FINAL_NORM, shape, place)
        if not shape.is_tied:
            slices += _single(OUTPUT, shape, place)
    return slices


def copy_slices(shape: ModelShape, place: Place) -> list[Slice]:
    """Slices of parameters that copy another stage's: loaded, never exported."""
    # On a single stage the output layer uses the embedding's own parameter.
    is_last = 0 < place.pipeline.rank == place.pipeline.size - 1
    return list(_single(TIED_OUTPUT, shape, place)) if shape.is_tied and is_last else []


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every HF tensor of the model, in a fixed order."""
    found: dict[str, tuple[int, ...]] = {}

    def add(entry: Entry, **numbers: int) -> None:
        for name, size in zip(entry.hf, entry.hf_shapes(shape), strict=True):
            found[name.format(**numbers)] = size

    add(EMBEDDING)
    for layer in range(shape.layers):
        for entry, expert in _of_layer(shape, layer, range(shape.experts)):
            add(entry, layer=layer, expert=expert)
    add(FINAL_NORM)
    if not shape.is_tied:
        add(OUTPUT)
    return found


def file_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The same of the files, which may hold all experts of a layer in one tensor of each kind."""
    if not FAMILIES[shape.architecture].fuses_experts:
        return hf_shapes(shape)
    found: dict[str, tuple[int, ...]] = {}
    for name, size in hf_shapes(shape).items():
        block, mark, _ = name.partition(".experts.")
        found |= fused_shapes(f"{block}.experts", shape) if mark else {name: size}
    return found


def fused_shapes(block: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors that hold all experts of a layer (`fused_experts.py`)."""
    count, hidden, units = shape.experts, shape.hidden, shape.moe_ffn
    found: dict[str, tuple[int, ...]] = {
        f"{block}.gate_up_proj": (count, hidden, 2 * units),
        f"{block}.down_proj": (count, units, hidden),
    }
    if shape.has_biases:
        found[f"{block}.gate_up_proj_bias"] = count, 2 * units
        found[f"{block}.down_proj_bias"] = count, hidden
    return found


def _of_layer(shape: ModelShape, layer: int, experts: range) -> Iterator[tuple[Entry, int]]:
    """Entries of a layer, those of experts once for each; the number matters to them alone."""
    entries = layer_entries(shape, layer)
    yield from ((entry, 0) for entry in entries if not entry.is_expert)
    for expert in experts:
        yield from ((entry, expert) for entry in entries if entry.is_expert)


def _layer_slices(shape: ModelShape, place: Place) -> Iterator[Slice]:
    experts = place.expert.of(shape.experts)
    # The same in all layers of a kind and in all experts; computing it for each takes seconds for
    # large models.
    pieces = {
        entry.megatron: entry.pieces(shape, place)
        for layer in (0, shape.layers - 1)
        for entry in layer_entries(shape, layer)
    }
    # `number` is the layer's among those of the rank, `layer` its number in the model.
    for number, layer in enumerate(place.layers(shape.layers)):
        for entry, expert in _of_layer(shape, layer, experts):
            local = entry.megatron.format(layer=number, expert=expert - experts.start)
            names = [name.format(layer=layer, expert=expert) for name in entry.hf]
            for source, *area in pieces[entry.megatron]:
                yield _slice(names[source], local, area)


def _single(entry: Entry, shape: ModelShape, place: Place) -> Iterator[Slice]:
    for source, *area in entry.pieces(shape, place):
        yield _slice(entry.hf[source], entry.megatron, area)


def _slice(hf: str, local: str, area: Sequence[int]) -> Slice:
    row, column, rows, columns, local_row, local_column = area
    return Slice(hf, row, column, rows, columns, local, local_row, local_column)
