"""Where each Hugging Face tensor lives in Megatron, and how tensor ranks share it.

Used by trainer ranks to load and export; pure functions of tensors and shapes. A family of models
is one line of ARCHITECTURES.

Sources: `sliceable` arguments are tensors or safetensors slices; both take [a:b] and [:, a:b].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.weights.shape import ModelShape


@dataclass(frozen=True)
class Share:
    """One tensor rank of how many."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        """This rank's part of `count` equal things."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)


@dataclass(frozen=True)
class Layout:
    """How tensor ranks share a parameter: `split` makes a rank's part, `join` is the inverse."""

    split: Callable[[Sequence[Any], Share, ModelShape], Tensor]
    join: Callable[[Sequence[Tensor], ModelShape], list[Tensor]]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of. `{}` stands for the layer."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    hf_shapes: Callable[[ModelShape], list[tuple[int, ...]]]

    def at_layer(self, megatron_layer: int, hf_layer: int) -> "Entry":
        """The entry of one layer; Megatron counts layers from the start of the stage."""
        return Entry(
            self.megatron.format(megatron_layer),
            tuple(name.format(hf_layer) for name in self.hf),
            self.layout,
            self.hf_shapes,
        )


def _split_rows(sources: Sequence[Any], share: Share, shape: ModelShape) -> Tensor:
    return sources[0][share.of(_length(sources[0], 0))]


def _join_rows(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(parts))]


def _split_columns(sources: Sequence[Any], share: Share, shape: ModelShape) -> Tensor:
    return sources[0][:, share.of(_length(sources[0], 1))]


def _join_columns(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(parts), dim=1)]


def _split_whole(sources: Sequence[Any], share: Share, shape: ModelShape) -> Tensor:
    return sources[0][:]


def _join_whole(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [parts[0]]


def _split_vocab(sources: Sequence[Any], share: Share, shape: ModelShape) -> Tensor:
    rows = share.of(shape.padded_vocab(share.size))
    real = sources[0][min(rows.start, shape.vocab) : min(rows.stop, shape.vocab)]
    padding = rows.stop - rows.start - real.shape[0]
    return torch.nn.functional.pad(real, (0, 0, 0, padding))


def _join_vocab(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(parts))[: shape.vocab]]


def _split_gate_up(sources: Sequence[Any], share: Share, shape: ModelShape) -> Tensor:
    part = share.of(shape.ffn)
    return torch.cat([source[part] for source in sources])


def _join_gate_up(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    halves = [part.chunk(2) for part in parts]
    return [torch.cat([half[index] for half in halves]) for index in range(2)]


def _split_qkv(sources: Sequence[Any], share: Share, shape: ModelShape) -> Tensor:
    """Megatron keeps, for each key-value group, its queries, then its key, then its value."""
    groups = share.of(shape.kv_heads)
    blocks = []
    for source, width in zip(sources, _group_widths(shape), strict=True):
        rows = source[groups.start * width : groups.stop * width]
        blocks.append(rows.reshape(-1, width, *rows.shape[1:]))
    return torch.cat(blocks, dim=1).flatten(0, 1)


def _join_qkv(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    widths = _group_widths(shape)
    rows = torch.cat(list(parts))
    blocks = rows.reshape(shape.kv_heads, sum(widths), *rows.shape[1:]).split(widths, dim=1)
    return [block.flatten(0, 1) for block in blocks]


def _group_widths(shape: ModelShape) -> list[int]:
    """Rows of queries, keys and values in one key-value group."""
    return [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]


def _length(source: Any, dim: int) -> int:
    return source.shape[dim] if isinstance(source, Tensor) else source.get_shape()[dim]


ROWS = Layout(_split_rows, _join_rows)
COLUMNS = Layout(_split_columns, _join_columns)
WHOLE = Layout(_split_whole, _join_whole)
VOCAB = Layout(_split_vocab, _join_vocab)
GATE_UP = Layout(_split_gate_up, _join_gate_up)
QKV = Layout(_split_qkv, _join_qkv)


def _qkv_rows(shape: ModelShape) -> list[int]:
    return [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]


EMBEDDING = Entry(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    VOCAB,
    lambda shape: [(shape.vocab, shape.hidden)],
)
FINAL_NORM = Entry(
    "decoder.final_layernorm.weight", ("model.norm.weight",), WHOLE, lambda s: [(s.hidden,)]
)
OUTPUT = Entry("output_layer.weight", ("lm_head.weight",), VOCAB, lambda s: [(s.vocab, s.hidden)])
TIED_OUTPUT = Entry(OUTPUT.megatron, EMBEDDING.hf, VOCAB, EMBEDDING.hf_shapes)

_LAYER = (
    Entry(
        "decoder.layers.{}.input_layernorm.weight",
        ("model.layers.{}.input_layernorm.weight",),
        WHOLE,
        lambda s: [(s.hidden,)],
    ),
    Entry(
        "decoder.layers.{}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkv"),
        QKV,
        lambda s: [(rows, s.hidden) for rows in _qkv_rows(s)],
    ),
    Entry(
        "decoder.layers.{}.self_attention.linear_proj.weight",
        ("model.layers.{}.self_attn.o_proj.weight",),
        COLUMNS,
        lambda s: [(s.hidden, s.heads * s.head_dim)],
    ),
    Entry(
        "decoder.layers.{}.pre_mlp_layernorm.weight",
        ("model.layers.{}.post_attention_layernorm.weight",),
        WHOLE,
        lambda s: [(s.hidden,)],
    ),
    Entry(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
        GATE_UP,
        lambda s: [(s.ffn, s.hidden), (s.ffn, s.hidden)],
    ),
    Entry(
        "decoder.layers.{}.mlp.linear_fc2.weight",
        ("model.layers.{}.mlp.down_proj.weight",),
        COLUMNS,
        lambda s: [(s.hidden, s.ffn)],
    ),
)
_QKV_BIAS = Entry(
    "decoder.layers.{}.self_attention.linear_qkv.bias",
    tuple(f"model.layers.{{}}.self_attn.{name}_proj.bias" for name in "qkv"),
    QKV,
    lambda s: [(rows,) for rows in _qkv_rows(s)],
)
_QK_NORMS = tuple(
    Entry(
        f"decoder.layers.{{}}.self_attention.{name}_layernorm.weight",
        (f"model.layers.{{}}.self_attn.{name}_norm.weight",),
        WHOLE,
        lambda s: [(s.head_dim,)],
    )
    for name in "qk"
)

ARCHITECTURES: dict[str, tuple[Entry, ...]] = {
    "LlamaForCausalLM": _LAYER,
    "MistralForCausalLM": _LAYER,
    "Qwen2ForCausalLM": (*_LAYER, _QKV_BIAS),
    "Qwen3ForCausalLM": (*_LAYER, *_QK_NORMS),
}
"""HF architecture -> the entries of one layer; embedding, final norm and output are common."""

# TransformerEngine puts a norm into the linear layer that follows it.
_ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def entries(shape: ModelShape, stage: int, stages: int) -> Iterator[Entry]:
    """Entries of one pipeline stage in the order of export; all of the model's over all stages.

    A tied output matrix on a later stage is a copy and no entry: see `copies`.
    """
    per_stage = shape.layers // stages
    if stage == 0:
        yield EMBEDDING
    for layer in range(per_stage):
        for entry in ARCHITECTURES[shape.architecture]:
            yield entry.at_layer(layer, stage * per_stage + layer)
    if stage == stages - 1:
        yield FINAL_NORM
        if not shape.is_tied:
            yield OUTPUT


def copies(shape: ModelShape, stage: int, stages: int) -> Iterator[Entry]:
    """Entries of parameters that repeat another stage's: loaded, never exported."""
    if shape.is_tied and stages > 1 and stage == stages - 1:
        yield TIED_OUTPUT


def named_parameters(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """A model chunk's parameters under the names of ARCHITECTURES.

    Strips the wrappers' prefixes and renames what TransformerEngine names otherwise.
    """
    found = {}
    for name, parameter in chunk.named_parameters():
        while name.startswith("module."):
            name = name.removeprefix("module.")
        for engine_name, local_name in _ENGINE_NAMES.items():
            if name.endswith(engine_name):
                name = name.removesuffix(engine_name) + local_name
        found[name] = parameter
    return found
