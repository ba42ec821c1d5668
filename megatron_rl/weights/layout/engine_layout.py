"""Maps Hugging Face tensors to the parameters of an engine.

Used by engines that receive slices; needs only torch. Names and layout are those of SGLang 0.5.23:
its layers fuse queries, keys and values, gate and up, and all experts of a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron_rl.config.divisibility import check_engine_experts, check_engine_tensor
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Experts
from megatron_rl.weights.layout.shape import ModelShape, counts_of
from megatron_rl.weights.layout.slices import Share, Slice, unmatched_text
from megatron_rl.weights.layout.trainer_layout import hf_shapes, untrained

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of it."""
PADDED_VOCAB = ("embed_tokens.weight", "lm_head.weight")
PADDED_FFN = (
    "gate_up_proj.weight",
    "down_proj.weight",
    "experts.w13_weight",
    "experts.w2_weight",
)
"""Name endings of parameters that may hold padding, which no slice covers."""


class Span(NamedTuple):
    """Rows or columns of a Hugging Face tensor that a rank holds."""

    start: int
    count: int
    room: int
    """Rows or columns reserved in the parameter: `count` and padding."""


def engine_slices(
    shape: ModelShape, tensor: Share, *, expert_parallel: int = 1, ffn_multiple: int = 1
) -> list[Slice]:
    """Slices of one tensor rank of an SGLang engine.

    expert_parallel: among how many ranks whole experts are divided; the others divide units.
    ffn_multiple: each rank's MLP units are padded to a multiple of it: 32 in SGLang's CPU mode.
    Raises ValueError for ranks that do not divide the model or would hold only padding.
    """
    check_engine_tensor(tensor.size, shape.heads)
    check_engine_experts(tensor.size, expert_parallel, counts_of(shape))
    if shape.experts and shape.is_tied:
        # SGLang 0.5.23 gives them a separate output matrix and leaves it unset.
        raise ValueError("SGLang has no tied embeddings for models with experts")
    slices = list(_vocabulary(shape, tensor))
    slices.append(_whole("model.norm.weight", shape.hidden))
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            slices.append(_whole(f"{name}.{norm}.weight", shape.hidden))
        attention = _latent_attention if shape.kv_rank else _attention
        slices += attention(f"{name}.self_attn", shape, tensor)
        if shape.has_experts(layer):
            slices += _experts(name, shape, _expert_place(tensor, expert_parallel), ffn_multiple)
            slices += _shared_experts(name, shape, tensor, ffn_multiple)
        else:
            units = _even(shape.ffn, tensor, ffn_multiple * tensor.size)
            slices += _dense(f"{name}.mlp", shape, units)
    return slices


def trained_parameters(shape: ModelShape, parameters: Mapping[str, T]) -> dict[str, T]:
    """An engine's parameters without those that are never synced: corrections of routers."""
    kept = untrained(shape)
    return {name: value for name, value in parameters.items() if name not in kept}


def hf_slices(shape: ModelShape) -> list[Slice]:
    """Slices of an engine that holds the parameters of a transformers model.

    Every tensor is whole under its own name, except that transformers 5 fuses experts.
    """
    kept = untrained(shape)
    whole = [_whole(name, *size) for name, size in hf_shapes(shape).items() if name not in kept]
    if not shape.experts:
        return whole
    block = _experts_of(shape).block
    slices = [
        # transformers 5 calls the block `mlp` in every family; the files keep their own names.
        part._replace(local=part.local.replace(f".{block}.gate.", ".mlp.gate."))
        for part in whole
        if ".experts." not in part.hf
    ]
    units = Span(0, shape.moe_ffn, shape.moe_ffn)
    for layer in range(shape.dense_layers, shape.layers):
        name = f"model.layers.{layer}"
        local = (f"{name}.mlp.experts.gate_up_proj", f"{name}.mlp.experts.down_proj")
        slices += _fused_experts(name, local, units, shape, range(shape.experts))
    return slices


def _vocabulary(shape: ModelShape, tensor: Share) -> Iterator[Slice]:
    multiple = VOCAB_MULTIPLE
    # As in SGLang's VocabParallelEmbedding: the multiple grows only where ranks do not divide.
    if _rounded_up(shape.vocab, multiple) % tensor.size:
        multiple *= tensor.size
    tokens = _even(shape.vocab, tensor, multiple)
    names = ["model.embed_tokens.weight", *([] if shape.is_tied else ["lm_head.weight"])]
    for name in names:
        yield from _stacked([(name, tokens)], name, shape.hidden)


def _attention(name: str, shape: ModelShape, tensor: Share) -> Iterator[Slice]:
    """Queries, then keys, then values of the rank; biases likewise."""
    queries = _head_span(shape.heads, shape.head_dim, tensor)
    keys = _head_span(shape.kv_heads, shape.head_dim, tensor)
    spans = (("q", queries), ("k", keys), ("v", keys))
    kinds = [("weight", shape.hidden), *([("bias", 1)] if shape.has_qkv_bias else [])]
    for kind, columns in kinds:
        parts = [(f"{name}.{part}_proj.{kind}", span) for part, span in spans]
        yield from _stacked(parts, f"{name}.qkv_proj.{kind}", columns)
    if shape.has_qk_norm:
        for part in "qk":
            yield _whole(f"{name}.{part}_norm.weight", shape.head_dim)
    yield _columns(f"{name}.o_proj.weight", shape.hidden, queries)


def _latent_attention(name: str, shape: ModelShape, tensor: Share) -> Iterator[Slice]:
    """Projections to latents, whole and one below the other; and the heads of the rank."""

    def heads(part: str, dim: int, columns: int) -> Iterator[Slice]:
        weight = f"{name}.{part}.weight"
        yield from _stacked([(weight, _head_span(shape.heads, dim, tensor))], weight, columns)

    down = f"{name}.kv_a_proj_with_mqa.weight"
    latent = Span(0, shape.latent_dim, shape.latent_dim)
    if shape.q_rank:
        queries = Span(0, shape.q_rank, shape.q_rank)
        parts = [(f"{name}.q_a_proj.weight", queries), (down, latent)]
        yield from _stacked(parts, f"{name}.fused_qkv_a_proj_with_mqa.weight", shape.hidden)
        yield _whole(f"{name}.q_a_layernorm.weight", shape.q_rank)
        yield from heads("q_b_proj", shape.head_dim, shape.q_rank)
    else:
        yield from heads("q_proj", shape.head_dim, shape.hidden)
        yield _whole(down, shape.latent_dim, shape.hidden)
    yield _whole(f"{name}.kv_a_layernorm.weight", shape.kv_rank)
    yield from heads("kv_b_proj", shape.nope_dim + shape.value_dim, shape.kv_rank)
    values = _head_span(shape.heads, shape.value_dim, tensor)
    yield _columns(f"{name}.o_proj.weight", shape.hidden, values)


def _dense(mlp: str, shape: ModelShape, units: Span) -> Iterator[Slice]:
    """A gated MLP; `mlp` is its module."""
    gate_up = [(f"{mlp}.{part}_proj.weight", units) for part in ("gate", "up")]
    yield from _stacked(gate_up, f"{mlp}.gate_up_proj.weight", shape.hidden)
    yield _columns(f"{mlp}.down_proj.weight", shape.hidden, units)


def _shared_experts(
    name: str, shape: ModelShape, tensor: Share, ffn_multiple: int
) -> Iterator[Slice]:
    """Experts that see every token: one MLP, which all tensor ranks divide."""
    if not shape.shared_ffn:
        return
    experts = _experts_of(shape)
    # SGLang pads the units of one expert, of which these are a multiple.
    one = _rounded_up(shape.moe_ffn, ffn_multiple * tensor.size)
    units = _part(shape.shared_ffn, shape.shared_ffn // shape.moe_ffn * one, tensor)
    yield from _dense(f"{name}.{experts.block}.{experts.shared}", shape, units)


def _experts_of(shape: ModelShape) -> Experts:
    experts = FAMILIES[shape.architecture].experts
    assert experts is not None, f"{shape.architecture} has no experts"
    return experts


class _ExpertPlace(NamedTuple):
    """Position of a rank among the ranks that divide the experts."""

    expert: Share
    units: Share


def _expert_place(tensor: Share, expert_parallel: int) -> _ExpertPlace:
    """As SGLang's runtime_context.derive_spawn_ranks: neighbours share the units of experts."""
    sharing = tensor.size // expert_parallel
    return _ExpertPlace(
        Share(tensor.rank // sharing, expert_parallel), Share(tensor.rank % sharing, sharing)
    )


def _experts(
    name: str, shape: ModelShape, place: _ExpertPlace, ffn_multiple: int
) -> Iterator[Slice]:
    """The router, and the rank's units of each of its experts."""
    block = f"{name}.{_experts_of(shape).block}"
    yield _whole(f"{block}.gate.weight", shape.experts, shape.hidden)
    # SGLang pads by all ranks of the engine (configs/update_config.py), on the CPU alone.
    ranks = place.units.size * (place.expert.size if ffn_multiple > 1 else 1)
    units = _even(shape.moe_ffn, place.units, ffn_multiple * ranks)
    local = (f"{block}.experts.w13_weight", f"{block}.experts.w2_weight")
    yield from _fused_experts(name, local, units, shape, place.expert.of(shape.experts))


def _fused_experts(
    name: str, local: tuple[str, str], units: Span, shape: ModelShape, held: range
) -> Iterator[Slice]:
    """Each expert's gate then up in one parameter, [held experts, 2 units, hidden]; down in one."""
    names = _experts_of(shape)
    gate_name, up_name, down_name = names.projections
    gate_up, down = local
    for place, expert in enumerate(held):
        hf = f"{name}.{names.block}.experts.{expert}"
        parts = [(f"{hf}.{part}.weight", units) for part in (gate_name, up_name)]
        # Up starts after gate's padding, where there is any: at `room`, not at `count`.
        yield from _stacked(parts, gate_up, shape.hidden, local_row=place * 2 * units.room)
        row = place * shape.hidden
        yield Slice(
            f"{hf}.{down_name}.weight", 0, units.start, shape.hidden, units.count, down, row, 0
        )


def _stacked(
    parts: Iterable[tuple[str, Span]], local: str, columns: int, local_row: int = 0
) -> Iterator[Slice]:
    """Rows of several tensors, one below the other in a parameter."""
    for hf, span in parts:
        yield Slice(hf, span.start, 0, span.count, columns, local, local_row, 0)
        local_row += span.room


def _columns(name: str, rows: int, span: Span) -> Slice:
    return Slice(name, 0, span.start, rows, span.count, name, 0, 0)


def _whole(name: str, rows: int, columns: int = 1) -> Slice:
    return Slice(name, 0, 0, rows, columns, name, 0, 0)


def _head_span(heads: int, head_dim: int, tensor: Share) -> Span:
    """Rows of the rank's heads; with more ranks than heads, neighbours share a head.

    SGLang's CPU mode pads key-value heads instead: there `check_slices` refuses such ranks.
    """
    if max(heads, tensor.size) % min(heads, tensor.size):
        raise ValueError(f"{tensor.size} tensor ranks do not divide {heads} key-value heads")
    # Query heads are divided by all ranks, so only key-value heads are ever shared.
    count = max(1, heads // tensor.size)
    first = tensor.rank * heads // tensor.size
    return Span(first * head_dim, count * head_dim, count * head_dim)


def _even(count: int, share: Share, multiple: int) -> Span:
    """The rank's part of `count` rows, padded at the end to a multiple."""
    return _part(count, _rounded_up(count, multiple), share)


def _part(count: int, total: int, share: Share) -> Span:
    """The rank's part of `count` rows, padded at the end to `total`."""
    # Padding lies behind the last of the things, so that the last ranks have it.
    room = total // share.size
    start = share.rank * room
    if start >= count:
        raise ValueError(
            f"of {count} rows rank {share.rank} of {share.size} would hold only padding: "
            "use fewer tensor ranks"
        )
    return Span(start, min(room, count - start), room)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def check_slices(
    slices: Iterable[Slice], parameters: Mapping[str, Tensor], *, may_pad_ffn: bool = False
) -> None:
    """Raise ValueError, naming the parameters, unless the slices describe the parameters.

    They must not overlap or reach outside, and must cover each parameter: wholly, or in part where
    it may hold padding, of the vocabulary or, with `may_pad_ffn`, of MLP units. A parameter that
    shares a covered one's memory needs no slice.
    """
    padded = PADDED_VOCAB + (PADDED_FFN if may_pad_ffn else ())
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for part in slices:
        by_name[part.local].append(part)
    # A tied output matrix is a second name of the embedding's memory. A tensor on torch's device
    # "meta" stands for one that is quantised: it has no memory, and all of them the address 0.
    covered = {parameters[name].data_ptr() for name in by_name if name in parameters} - {0}
    left = [
        name
        for name, parameter in parameters.items()
        if name not in by_name and parameter.data_ptr() not in covered
    ]
    if text := unmatched_text(by_name.keys() - parameters.keys(), left):
        raise ValueError(text)
    for name, parts in by_name.items():
        missing = parameters[name].numel() - _covered(name, parts, parameters[name])
        if missing and not name.endswith(padded):
            raise ValueError(f"{name}: {missing} of its elements are in no slice")


def _covered(name: str, parts: list[Slice], parameter: Tensor) -> int:
    """Elements of the parameter in the slices. Raises ValueError if they overlap or do not fit."""
    dims = tuple(parameter.shape)
    if not dims or not parameter.is_contiguous():
        raise ValueError(f"{name}: {dims} with strides {parameter.stride()} is no plain matrix")
    columns = dims[-1] if len(dims) > 1 else 1
    rows = parameter.numel() // columns
    # Going down the rows, a part can overlap only those that still reach below its first row.
    open_parts: list[Slice] = []
    for part in sorted(parts, key=lambda part: part.local_row):
        bottom, right = part.local_row + part.rows, part.local_column + part.columns
        if min(part.local_row, part.local_column) < 0 or bottom > rows or right > columns:
            raise ValueError(f"{name}: {part} reaches outside of {dims}")
        open_parts = [one for one in open_parts if one.local_row + one.rows > part.local_row]
        for other in open_parts:
            if (
                part.local_column < other.local_column + other.columns
                and other.local_column < right
            ):
                raise ValueError(f"{name}: {part} overlaps {other}")
        open_parts.append(part)
    return sum(part.size for part in parts)
