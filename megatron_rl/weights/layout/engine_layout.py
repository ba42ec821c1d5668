"""Maps Hugging Face tensors to the parameters of an engine.

Used by engines that receive slices; needs only torch. Names and layout are those of SGLang 0.5.23:
its layers fuse queries, keys and values, gate and up, and all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron_rl.config.divisibility import check_engine_experts, check_engine_tensor
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Experts
from megatron_rl.weights.layout.fused_files import slices_in_files
from megatron_rl.weights.layout.shape import ModelShape, counts_of
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes, untrained

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of it."""
_PAIRS = ("experts.w13_weight", "experts.w13_weight_bias")
"""Name endings of parameters with a row for each gate and one for its up; see `paired`."""
_EXPERT_OUTPUT_BIAS = "experts.w2_weight_bias"


class ExpertPlace(NamedTuple):
    """Position of a rank among the ranks that divide the experts."""

    expert: Share = Share()
    units: Share = Share()


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
    check_engine_tensor(tensor.size, shape.heads, normed_heads=shape.jointly_normed)
    check_engine_experts(tensor.size, expert_parallel, counts_of(shape))
    if shape.experts and shape.is_tied:
        # SGLang 0.5.23 gives them a separate output matrix and leaves it unset.
        raise ValueError("SGLang has no tied embeddings for models with experts")
    slices = list(_vocabulary(shape, tensor))
    slices.append(_whole("model.norm.weight", shape.hidden))
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        first = "post_feedforward_layernorm" if shape.norms_behind else "input_layernorm"
        for norm in (first, "post_attention_layernorm"):
            slices.append(_whole(f"{name}.{norm}.weight", shape.hidden))
        attention = _latent_attention if shape.kv_rank else _attention
        slices += attention(f"{name}.self_attn", shape, tensor)
        if shape.has_experts(layer):
            slices += _experts(name, shape, expert_place(tensor, expert_parallel), ffn_multiple)
            slices += _shared_experts(name, shape, tensor, ffn_multiple)
        else:
            units = _even(shape.ffn, tensor, ffn_multiple * tensor.size)
            slices += _dense(f"{name}.mlp", shape, units)
    return slices_in_files(shape, slices)


def trained_parameters(
    shape: ModelShape, parameters: Mapping[str, T], place: ExpertPlace | None = None
) -> dict[str, T]:
    """An engine's parameters without those that are never synced: corrections of routers, and
    zeros where another rank of the `place` adds the experts' bias."""
    kept = untrained(shape)
    zeros = (_EXPERT_OUTPUT_BIAS,) if place is not None and place.units.rank else ()
    return {
        name: value
        for name, value in parameters.items()
        if name not in kept and not name.endswith(zeros)
    }


def paired(architecture: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An engine's parameters as slices see them.

    Where engines hold gate and up of a unit one below the other, each becomes a row of both, and
    biases become columns.
    """
    family = FAMILIES.get(architecture)
    if family is None or not family.pairs_units:
        return dict(parameters)

    def view(name: str, parameter: Tensor) -> Tensor:
        if name.endswith(_PAIRS):
            return parameter.unflatten(1, (-1, 2)).flatten(2)
        return parameter.unsqueeze(-1) if name.endswith(_EXPERT_OUTPUT_BIAS) else parameter

    return {name: view(name, parameter) for name, parameter in parameters.items()}


def hf_slices(shape: ModelShape) -> list[Slice]:
    """Slices of an engine that holds the parameters of a transformers model.

    Every tensor is whole under its own name, except that transformers 5 fuses experts. Raises
    ValueError for experts that files fuse too: transformers keeps them transposed.
    """
    if shape.experts and _experts_of(shape).fused == "pairs":
        raise ValueError(f"the hf engine takes no experts of a {shape.architecture}")
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
        # SGLang gathers all heads for a norm of them, whose weight each rank has whole.
        for part, normed in zip("qk", shape.normed_heads, strict=True):
            yield _whole(f"{name}.{part}_norm.weight", normed * shape.head_dim)
    yield _columns(f"{name}.o_proj.weight", shape.hidden, queries)
    if shape.has_biases:
        yield _whole(f"{name}.o_proj.bias", shape.hidden)
    if shape.has_sinks:
        sinks = _head_span(shape.heads, 1, tensor)
        yield from _stacked([(f"{name}.sinks", sinks)], f"{name}.sinks", 1)


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


def expert_place(tensor: Share, expert_parallel: int) -> ExpertPlace:
    """As SGLang's runtime_context.derive_spawn_ranks: neighbours share the units of experts."""
    sharing = tensor.size // expert_parallel
    return ExpertPlace(
        Share(tensor.rank // sharing, expert_parallel), Share(tensor.rank % sharing, sharing)
    )


def _experts(
    name: str, shape: ModelShape, place: ExpertPlace, ffn_multiple: int
) -> Iterator[Slice]:
    """The router, and the rank's units of each of its experts."""
    block = f"{name}.{_experts_of(shape).block}"
    router = f"{block}.{_experts_of(shape).router}"
    yield _whole(f"{router}.weight", shape.experts, shape.hidden)
    if shape.has_biases:
        yield _whole(f"{router}.bias", shape.experts)
    # SGLang pads by all ranks of the engine (configs/update_config.py), on the CPU alone.
    ranks = place.units.size * (place.expert.size if ffn_multiple > 1 else 1)
    units = _even(shape.moe_ffn, place.units, ffn_multiple * ranks)
    local = (f"{block}.experts.w13_weight", f"{block}.experts.w2_weight")
    if _experts_of(shape).fused == "pairs":
        yield from _paired_experts(f"{block}.experts", units, shape, place)
        return
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


def _paired_experts(
    block: str, units: Span, shape: ModelShape, place: ExpertPlace
) -> Iterator[Slice]:
    """Each expert's units as `paired` shows them: gate left of up; and biases."""
    width = shape.hidden
    for number, expert in enumerate(place.expert.of(shape.experts)):
        hf, row = f"{block}.{expert}", number * units.room
        for column, part in enumerate(("gate", "up")):
            for kind, local, size in (("weight", _PAIRS[0], width), ("bias", _PAIRS[1], 1)):
                yield Slice(
                    f"{hf}.{part}_proj.{kind}", units.start, 0, units.count, size,
                    f"{block}.{local.removeprefix('experts.')}", row, column * size,
                )  # fmt: skip
        yield Slice(
            f"{hf}.down_proj.weight", 0, units.start, width, units.count,
            f"{block}.w2_weight", number * width, 0,
        )  # fmt: skip
        if not place.units.rank:
            # The ranks' results are added up, and the bias is in one of them.
            bias = f"{hf}.down_proj.bias"
            yield Slice(bias, 0, 0, width, 1, f"{block}.w2_weight_bias", number * width, 0)


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

    SGLang's CPU mode pads key-value heads instead: there `engine_checks.py` refuses such
    ranks.
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
