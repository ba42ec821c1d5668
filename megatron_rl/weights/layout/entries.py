"""Megatron's parameters and the Hugging Face tensors that each is made of.

Used by trainer ranks and conversions; pure functions of sizes, which need no torch. The parameters
of a layer are put together from groups that families share, such as attention and a gated MLP, as
the family's table in `families/` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import PROJECTIONS, Experts
from megatron_rl.weights.layout.fused_files import entry_in_files
from megatron_rl.weights.layout.place import Entry
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import (
    Layout,
    by_columns,
    by_heads,
    by_normed_heads,
    by_query_groups,
    by_vocabulary,
    gate_then_up,
    whole,
)


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
    megatron: str,
    hf: str,
    layout: Layout,
    size: Callable[[ModelShape], tuple[int, ...]],
    end: str = ".weight",
) -> Entry:
    """One HF tensor of a layer's attention."""
    return Entry(
        f"decoder.layers.{{layer}}.self_attention.{megatron}{end}",
        (f"model.layers.{{layer}}.self_attn.{hf}{end}",),
        layout,
        lambda s: [size(s)],
    )


def _norm(megatron: str, hf: str) -> Entry:
    """A norm of hidden states, whole on every tensor rank."""
    return Entry(
        f"decoder.layers.{{layer}}.{megatron}.weight",
        (f"model.layers.{{layer}}.{hf}_layernorm.weight",),
        whole,
        lambda s: [(s.hidden,)],
    )


_INPUT_NORM = _norm("input_layernorm", "input")
# Megatron's pre_mlp_layernorm is HF's post_attention_layernorm: both stand between the two blocks.
_MLP_NORM = _norm("pre_mlp_layernorm", "post_attention")
_NORMS_BEHIND = (
    _norm("self_attention.linear_proj.post_layernorm", "post_attention"),
    _norm("mlp.linear_fc2.post_layernorm", "post_feedforward"),
)
_ATTENTION = (
    Entry(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.weight" for name in "qkv"),
        by_query_groups,
        lambda s: [(rows, s.hidden) for rows in _qkv_rows(s)],
    ),
    _of_attention("linear_proj", "o_proj", by_columns, lambda s: (s.hidden, s.heads * s.head_dim)),
)
_QKV_BIAS = Entry(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.bias" for name in "qkv"),
    by_query_groups,
    lambda s: [(rows,) for rows in _qkv_rows(s)],
)
_OUTPUT_BIAS = _of_attention("linear_proj", "o_proj", whole, lambda s: (s.hidden,), ".bias")
_SINKS = Entry(
    "decoder.layers.{layer}.self_attention.core_attention.softmax_offset",
    ("model.layers.{layer}.self_attn.sinks",),
    by_heads,
    lambda s: [(s.heads,)],
)
_QK_NORMS = (
    _of_attention(
        "q_layernorm", "q_norm", by_normed_heads, lambda s: (s.normed_heads[0] * s.head_dim,)
    ),
    _of_attention(
        "k_layernorm", "k_norm", by_normed_heads, lambda s: (s.normed_heads[1] * s.head_dim,)
    ),
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
    if shape.norms_behind:
        return (*_ATTENTION, *_NORMS_BEHIND)
    queries = _LOW_RANK_QUERIES if shape.q_rank else _QUERIES
    parts = (*queries, *_LATENT) if shape.kv_rank else _ATTENTION
    return (_INPUT_NORM, *parts, _MLP_NORM)


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


def _gated_biases(megatron: str, hf: str, projections: Sequence[str]) -> tuple[Entry, Entry]:
    """Biases of an expert, which is whole on its rank."""
    gate, up, down = (f"{hf}.{name}.bias" for name in projections)
    return (
        Entry(
            f"{megatron}.linear_fc1.bias",
            (gate, up),
            gate_then_up,
            lambda s: [(s.moe_ffn,), (s.moe_ffn,)],
        ),
        Entry(f"{megatron}.linear_fc2.bias", (down,), whole, lambda s: [(s.hidden,)]),
    )


def _mixture(experts: Experts, shape: ModelShape) -> tuple[Entry, ...]:
    """A router, its experts, and those that see every token."""
    hf = f"model.layers.{{layer}}.{experts.block}"

    def of_router(kind: str, size: Callable[[ModelShape], tuple[int, ...]]) -> Entry:
        return Entry(
            f"decoder.layers.{{layer}}.mlp.router.{kind}",
            (f"{hf}.{experts.router}.{kind}",),
            whole,
            lambda s: [size(s)],
        )

    router = of_router("weight", lambda s: (s.experts, s.hidden))
    local = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
    units = _gated(local, f"{hf}.experts.{{expert}}", experts.projections, lambda s: s.moe_ffn)
    if shape.has_biases:
        biases = _gated_biases(local, f"{hf}.experts.{{expert}}", experts.projections)
        return router, of_router("bias", lambda s: (s.experts,)), *units, *biases
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
    plain = (
        *_attention(shape),
        *(() if experts else _DENSE),
        *((_QKV_BIAS,) if shape.has_qkv_bias else ()),
        *((_OUTPUT_BIAS,) if shape.has_biases else ()),
        *((_SINKS,) if shape.has_sinks else ()),
        *(_QK_NORMS if shape.has_qk_norm else ()),
        *(_mixture(experts, shape) if experts else ()),
    )
    return tuple(entry_in_files(shape, entry) for entry in plain)
