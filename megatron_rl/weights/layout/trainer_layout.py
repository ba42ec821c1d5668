"""Maps Hugging Face tensors to Megatron's parameters, as slices.

Used by trainer ranks to load, export and plan exchanges; pure functions of sizes, which need no
torch. The parameters of a layer are put together from groups that families share, such as
attention and a gated MLP, as the family's table in `families/` says. `shape.py` reads its
config.json, `engine_layout.py` knows where SGLang keeps its tensors, and `local_names.py` finds a
rank's own by the names used here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.parallel import stage_layers
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import PROJECTIONS, Experts
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import (
    Layout,
    Piece,
    Share,
    Slice,
    by_columns,
    by_heads,
    by_query_groups,
    by_vocabulary,
    gate_then_up,
    whole,
)

if TYPE_CHECKING:
    from megatron_rl.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Place:
    """Position of a rank among the ranks that divide the model."""

    tensor: Share = Share()
    pipeline: Share = Share()
    expert: Share = Share()
    expert_tensor: Share = Share()
    chunks: int = 1
    """Chunks of the model on each stage, with equal numbers of layers."""
    ends: tuple[int, int] = (0, 0)
    """Layers of the first and of the last stage; 0: as in the stages between them."""

    def layers(self, count: int) -> list[int]:
        """The layers of the rank, of `count`, in the order of its chunks.

        The stages' first chunks come before all second ones, as in the interleaved schedule.
        Source: arXiv 2104.04473, section 2.2.
        """
        if any(self.ends):
            sizes = stage_layers(count, self.pipeline.size, *self.ends)
            first = sum(sizes[: self.pipeline.rank])
            return list(range(first, first + sizes[self.pipeline.rank]))
        # Part p of the model is chunk p // stages of stage p % stages.
        stage, parts = self.pipeline, self.pipeline.size * self.chunks
        firsts = range(stage.rank, parts, stage.size)
        return [layer for part in firsts for layer in Share(part, parts).of(count)]


def like_of(parallel: ParallelConfig) -> Place:
    """Place of rank 0 of a trainer that is not running; its shares have the sizes of all."""
    return Place(
        Share(0, parallel.tensor),
        Share(0, parallel.pipeline),
        Share(0, parallel.expert),
        Share(0, parallel.expert_tensor),
        parallel.virtual_stages,
        (parallel.first_stage_layers, parallel.last_stage_layers),
    )


def place_of(rank: int, world_size: int, like: Place) -> Place:
    """Place of a world rank among shares of the sizes of `like`.

    Megatron's order "tp-cp-ep-dp-pp": tensor ranks stand next to each other, stages farthest apart.
    Experts divide the ranks of a stage anew, those that share one next to each other.
    """
    # Context and data ranks hold the same parameters, so neither appears in a place.
    stage_ranks = world_size // like.pipeline.size
    inside = rank % stage_ranks
    return Place(
        Share(inside % like.tensor.size, like.tensor.size),
        Share(rank // stage_ranks, like.pipeline.size),
        Share(inside // like.expert_tensor.size % like.expert.size, like.expert.size),
        Share(inside % like.expert_tensor.size, like.expert_tensor.size),
        like.chunks,
        like.ends,
    )


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    Names hold `{layer}`, counted over all chunks of the rank, and those of experts `{expert}`,
    counted from the rank's first. Experts have separate tensor ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    hf_shapes: Callable[[ModelShape], list[tuple[int, ...]]]
    is_trained: bool = True
    """False: a float32 buffer, in folders and checkpoints but in no weight sync."""

    @property
    def is_expert(self) -> bool:
        """Whether each expert of a layer has this parameter."""
        return "{expert}" in self.megatron

    def pieces(self, shape: ModelShape, place: Place) -> list[Piece]:
        """The pieces of the rank's parameter."""
        # A vector counts as a matrix of one column: see `slices.py`.
        sizes = [(size[0], size[1] if len(size) > 1 else 1) for size in self.hf_shapes(shape)]
        return self.layout(sizes, place.expert_tensor if self.is_expert else place.tensor, shape)


def _qkv_rows(shape: ModelShape) -> list[int]:
    return [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]


EMBEDDING = Entry(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    by_vocabulary,
    lambda s: [(s.vocab, s.hidden)],
)
FINAL_NORM = Entry(
    "decoder.final_layernorm.weight", ("model.norm.weight",), whole, lambda s: [(s.hidden,)]
)
OUTPUT = Entry(
    "output_layer.weight", ("lm_head.weight",), by_vocabulary, lambda s: [(s.vocab, s.hidden)]
)
TIED_OUTPUT = Entry(OUTPUT.megatron, EMBEDDING.hf, by_vocabulary, EMBEDDING.hf_shapes)
PADDED = frozenset((EMBEDDING.megatron, OUTPUT.megatron))
"""Parameters that may have padding rows."""


def _of_attention(
    megatron: str, hf: str, layout: Layout, size: Callable[[ModelShape], tuple[int, ...]]
) -> Entry:
    """One HF tensor of a layer's attention."""
    return Entry(
        f"decoder.layers.{{layer}}.self_attention.{megatron}.weight",
        (f"model.layers.{{layer}}.self_attn.{hf}.weight",),
        layout,
        lambda s: [size(s)],
    )


_INPUT_NORM = Entry(
    "decoder.layers.{layer}.input_layernorm.weight",
    ("model.layers.{layer}.input_layernorm.weight",),
    whole,
    lambda s: [(s.hidden,)],
)
# Megatron's pre_mlp_layernorm is HF's post_attention_layernorm: both stand between the two blocks.
_MLP_NORM = Entry(
    "decoder.layers.{layer}.pre_mlp_layernorm.weight",
    ("model.layers.{layer}.post_attention_layernorm.weight",),
    whole,
    lambda s: [(s.hidden,)],
)
_ATTENTION = (
    _INPUT_NORM,
    Entry(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.weight" for name in "qkv"),
        by_query_groups,
        lambda s: [(rows, s.hidden) for rows in _qkv_rows(s)],
    ),
    _of_attention("linear_proj", "o_proj", by_columns, lambda s: (s.hidden, s.heads * s.head_dim)),
    _MLP_NORM,
)
_QKV_BIAS = Entry(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.bias" for name in "qkv"),
    by_query_groups,
    lambda s: [(rows,) for rows in _qkv_rows(s)],
)
_QK_NORMS = tuple(
    _of_attention(f"{name}_layernorm", f"{name}_norm", whole, lambda s: (s.head_dim,))
    for name in "qk"
)


_QUERIES = (
    _of_attention("linear_q_proj", "q_proj", by_heads, lambda s: (s.heads * s.head_dim, s.hidden)),
)
_LOW_RANK_QUERIES = (
    _of_attention("linear_q_down_proj", "q_a_proj", whole, lambda s: (s.q_rank, s.hidden)),
    _of_attention("q_layernorm", "q_a_layernorm", whole, lambda s: (s.q_rank,)),
    _of_attention(
        "linear_q_up_proj", "q_b_proj", by_heads, lambda s: (s.heads * s.head_dim, s.q_rank)
    ),
)
_LATENT = (
    _of_attention(
        "linear_kv_down_proj", "kv_a_proj_with_mqa", whole, lambda s: (s.latent_dim, s.hidden)
    ),
    _of_attention("kv_layernorm", "kv_a_layernorm", whole, lambda s: (s.kv_rank,)),
    _of_attention(
        "linear_kv_up_proj", "kv_b_proj", by_heads,
        lambda s: (s.heads * (s.nope_dim + s.value_dim), s.kv_rank),
    ),
    _of_attention(
        "linear_proj", "o_proj", by_columns, lambda s: (s.hidden, s.heads * s.value_dim)
    ),
)  # fmt: skip
"""The projections down to latents are whole on every tensor rank."""


def _attention(shape: ModelShape) -> tuple[Entry, ...]:
    """Attention, with the norms before and behind it."""
    if not shape.kv_rank:
        return _ATTENTION
    queries = _LOW_RANK_QUERIES if shape.q_rank else _QUERIES
    return (_INPUT_NORM, *queries, *_LATENT, _MLP_NORM)


def _gated(
    megatron: str, hf: str, projections: Sequence[str], units: Callable[[ModelShape], int]
) -> tuple[Entry, Entry]:
    """A gated MLP of `units`; `projections` are HF's words for gate, up and down."""
    gate, up, down = (f"{hf}.{name}.weight" for name in projections)
    return (
        Entry(
            f"{megatron}.linear_fc1.weight",
            (gate, up),
            gate_then_up,
            lambda s: [(units(s), s.hidden), (units(s), s.hidden)],
        ),
        Entry(
            f"{megatron}.linear_fc2.weight",
            (down,),
            by_columns,
            lambda s: [(s.hidden, units(s))],
        ),
    )


def _mixture(experts: Experts, shape: ModelShape) -> tuple[Entry, ...]:
    """A router, its experts, and those that see every token."""
    hf = f"model.layers.{{layer}}.{experts.block}"
    router = Entry(
        "decoder.layers.{layer}.mlp.router.weight",
        (f"{hf}.gate.weight",),
        whole,
        lambda s: [(s.experts, s.hidden)],
    )
    local = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
    units = _gated(local, f"{hf}.experts.{{expert}}", experts.projections, lambda s: s.moe_ffn)
    shared = _gated(
        "decoder.layers.{layer}.mlp.shared_experts", f"{hf}.{experts.shared}", PROJECTIONS,
        lambda s: s.shared_ffn,
    )  # fmt: skip
    correction = Entry(
        "decoder.layers.{layer}.mlp.router.expert_bias",
        (f"{hf}.gate.e_score_correction_bias",),
        whole,
        lambda s: [(s.experts,)],
        is_trained=False,
    )
    return (
        router,
        *((correction,) if shape.is_router_corrected else ()),
        *(shared if shape.shared_ffn else ()),
        *units,
    )


_DENSE = _gated(
    "decoder.layers.{layer}.mlp", "model.layers.{layer}.mlp", PROJECTIONS, lambda s: s.ffn
)


def layer_entries(shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    """The entries of a layer; embedding, final norm and output are common to all families."""
    return _entries(shape, shape.has_experts(layer))


@functools.lru_cache(maxsize=64)
def _entries(shape: ModelShape, has_experts: bool) -> tuple[Entry, ...]:
    experts = FAMILIES[shape.architecture].experts if has_experts else None
    return (
        *_attention(shape),
        *(() if experts else _DENSE),
        *((_QKV_BIAS,) if shape.has_qkv_bias else ()),
        *(_QK_NORMS if shape.has_qk_norm else ()),
        *(_mixture(experts, shape) if experts else ()),
    )


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
