"""Bytes of activations and logits of a trainer rank at a token budget. Pure.

The accounting is that of arXiv 2205.05198, section 4.1: a tensor counts when an operation keeps it
for its backward pass. Their layer has dropout, biases, GELU and stored attention scores, sbh (34 +
5as/h) bytes (eq. 1); ours has none of them, and gated MLPs, grouped queries and flash attention.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.plan.fp8 import Fp8, layer_groups, spared_elements
from megatron_rl.plan.parameters import sequence_shards
from megatron_rl.weights.layout.shape import ModelShape

Recompute = Literal["none", "selective", "full"]
FLOAT32_BYTES = 4
LOGIT_BYTES = 8
"""Bytes of a logit: the float32 value and its float32 gradient."""

_UNIT_ELEMENTS = 5
"""Elements of an unfused gated MLP (megatron-core 0.16.1, mlp.py:224): gate and up, silu(gate), up
with its offset, their product."""
_FUSED_ELEMENTS = 3
"""The same in one kernel (the fusion "swiglu"): gate and up, their product."""


@dataclass(frozen=True)
class Microbatch:
    """Sizes of one forward and backward pass."""

    tokens: int
    """Tokens of the packed microbatch, over all context-parallel ranks."""
    count: int
    """Microbatches of an optimizer step on a data-parallel rank."""


class Activations(NamedTuple):
    """Bytes of activations on a rank."""

    kept: int
    """Of all layers, for their backward passes."""
    backward: int
    """Recomputed activations and gradients during the backward pass of one layer. The last stage
    has freed its logits by then."""


def layer_elements(shape: ModelShape, parallel: ParallelConfig, *, is_fused: bool = False) -> float:
    """Elements for each token that one layer keeps for its backward pass on one rank.

    is_fused: layers are TransformerEngine's, and gated MLPs one kernel. Experts are taken to be
    equally loaded.
    """
    # The input of each norm, and its output, which the next product multiplies.
    norms = 4 * shape.hidden / sequence_shards(parallel)
    if shape.kv_rank:
        # The latents, and those after their norms.
        latents = 2 * shape.q_rank + 2 * shape.kv_rank + shape.rotary_dim
        norms += latents / sequence_shards(parallel)
    attention = _attention_elements(shape, has_context_ranks=is_fused and parallel.context > 1)
    if shape.experts:
        experts = _expert_elements(shape, parallel, is_fused=is_fused)
        return norms + attention / parallel.tensor + experts
    elements = _FUSED_ELEMENTS if is_fused else _UNIT_ELEMENTS
    return norms + (attention + elements * shape.ffn) / parallel.tensor


def _attention_elements(shape: ModelShape, *, has_context_ranks: bool) -> int:
    """As `layer_elements` for attention, over all tensor ranks.

    has_context_ranks: TransformerEngine exchanges keys and values among them, in a copy.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.kv_rank:
        values = shape.heads * shape.value_dim
        # Megatron copies rotated queries and keys, and values, out of what the products give.
        return queries + (queries + keys) + values + values
    # The fused projection (values are a view of it), rotated queries and keys, the result.
    attention = (queries + 2 * keys) + (queries + keys) + queries
    if has_context_ranks:
        # The copy takes the place of rotated keys, and of the projection if no norm keeps it.
        is_kept = shape.has_qk_norm or shape.norms_all_heads
        attention = (queries + 2 * keys) * (1 + is_kept) + queries
    if shape.norms_all_heads:
        # In float32, as two elements: queries and keys, and the same normed.
        return attention + 4 * (queries + keys)
    # Queries do not lie next to each other in the projection: their norm keeps a copy.
    return attention + queries if shape.has_qk_norm else attention


def _expert_elements(shape: ModelShape, parallel: ParallelConfig, *, is_fused: bool) -> float:
    """As `layer_elements` for the experts of a layer; a float32 router score counts as two."""
    units = _routed_elements(shape, is_fused=is_fused) * shape.moe_ffn / parallel.expert_tensor
    routed = shape.experts_per_token * (shape.hidden + units)
    shared = (_FUSED_ELEMENTS if is_fused else _UNIT_ELEMENTS) * shape.shared_ffn / parallel.tensor
    return (routed + 2 * shape.experts) / sequence_shards(parallel) + shared


def _routed_elements(shape: ModelShape, *, is_fused: bool) -> int:
    """Elements of each unit of an expert that a router chooses."""
    # Unfused, each also keeps its product times the router's probability.
    elements = _FUSED_ELEMENTS if is_fused else _UNIT_ELEMENTS + 1
    if shape.glu_limit:
        # Gate and up are clamped outside of the kernel (megatron-core 0.16.1,
        # fused_bias_geglu.py:423); unfused, what is added to the clamped up is counted above.
        elements += 2 if is_fused else 1
    return elements


def recomputed_elements(
    shape: ModelShape, parallel: ParallelConfig, modules: Collection[str], *, is_fused: bool = False
) -> float:
    """Elements for each token of a layer that recomputation of `modules` saves.

    Recomputing attention saves nothing: flash attention never stores its softmax. Layers are those
    of TransformerEngine, which fuses all norms but the one before experts into a product.
    """
    spared = 0.0
    if shape.experts:
        if "moe" in modules:
            spared += _expert_elements(shape, parallel, is_fused=is_fused)
        elif "moe_act" in modules:
            # Gate and up stay: the other tensors are recomputed from them.
            between = _routed_elements(shape, is_fused=is_fused) - 2
            between *= shape.moe_ffn / parallel.expert_tensor
            spared += shape.experts_per_token * between / sequence_shards(parallel)
        if "layernorm" in modules:
            spared += shape.hidden / sequence_shards(parallel)
    elif "mlp" in modules:
        elements = _FUSED_ELEMENTS if is_fused else _UNIT_ELEMENTS
        spared += elements * shape.ffn / parallel.tensor
        if is_fused:
            # Its norm belongs to its first product.
            spared += shape.hidden / sequence_shards(parallel)
    return spared


def stored_microbatches(parallel: ParallelConfig, stage: int, count: int) -> float:
    """Microbatches whose activations of all layers of a stage are held at once.

    1F1B: at most stages - stage (arXiv 2104.04473, section 2.2.1). Interleaved stages: Megatron
    starts 2 (stages - stage - 1) + (v - 1) stages chunks ahead, which on stage 0 is L (1 + (p - 1)
    / (p v)) layers (arXiv 2205.05198, section 4.2.3).
    """
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_stages == 1:
        return min(behind + 1, count)
    chunks = 2 * behind + (parallel.virtual_stages - 1) * parallel.pipeline + 1
    return min(chunks / parallel.virtual_stages, count)


def activation_bytes(
    shape: ModelShape,
    parallel: ParallelConfig,
    microbatch: Microbatch,
    *,
    stage: int,
    item_bytes: int,
    recompute: Recompute,
    modules: Collection[str] = (),
    is_fused: bool = False,
    fp8: Fp8 | None = None,
) -> Activations:
    """Peak bytes of activations on a rank of `stage`.

    recompute "full" keeps the input of each layer and recomputes one layer at a time; "selective"
    does so with the modules alone.
    """
    tokens = microbatch.tokens / parallel.context
    groups = list(layer_groups(shape, parallel, stage, fp8))
    costs = [
        _layer_cost(kind, parallel, recompute, modules, is_fused=is_fused, fp8=own)
        for kind, _, own in groups
    ]
    held = stored_microbatches(parallel, stage, microbatch.count)
    elements = held * sum(n * kept for (_, n, _), (kept, _) in zip(groups, costs, strict=True))
    if stage == 0:
        elements += held * shape.hidden / sequence_shards(parallel)
    if stage == parallel.pipeline - 1:
        elements += 2 * shape.hidden / sequence_shards(parallel)
    if is_fused and parallel.pipeline > 1:
        # What stages exchange: an output and an early input, and their gradients; half at the ends.
        ends = (stage == 0) + (stage == parallel.pipeline - 1)
        elements += (4 - 2 * ends) * shape.hidden / sequence_shards(parallel)
    # One layer at a time is recomputed, and has gradients: the largest is the peak.
    backward = max(
        again
        + (
            _fused_gradient_elements(kind, parallel, own)
            if is_fused
            else _gradient_elements(kind, parallel)
        )
        for (kind, _, own), (_, again) in zip(groups, costs, strict=True)
    )
    size = tokens * item_bytes
    return Activations(round(size * elements), round(size * backward))


def _layer_cost(
    shape: ModelShape,
    parallel: ParallelConfig,
    recompute: Recompute,
    modules: Collection[str],
    *,
    is_fused: bool,
    fp8: Fp8 | None,
) -> tuple[float, float]:
    """Elements for each token of a layer that are kept, and that its recomputation holds."""
    whole = layer_elements(shape, parallel, is_fused=is_fused)
    kept, again = whole, 0.0
    match recompute:
        case "full":
            kept, again = shape.hidden / sequence_shards(parallel), whole
        case "selective":
            again = recomputed_elements(shape, parallel, modules, is_fused=is_fused)
            kept = whole - again
    if fp8:
        spared = spared_elements(shape, parallel, fp8, recompute, modules)
        return kept - spared[0], again - spared[1]
    return kept, again


def _gradient_elements(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements for each token of the gradients alive at once in the backward of one layer."""
    units = shape.ffn / parallel.tensor
    if shape.experts:
        units = shape.experts_per_token * shape.moe_ffn / sequence_shards(parallel)
        units = max(units, shape.shared_ffn / parallel.tensor)
    # Of the gated product, of gate and up; of a layer's input, and tokens gathered for a product.
    return 3 * units + 2 * shape.hidden


def _fused_gradient_elements(shape: ModelShape, parallel: ParallelConfig, fp8: Fp8 | None) -> float:
    """The same for TransformerEngine's layers, where what a product has used is freed.

    As `megatron-rl rehearse` finds them.
    """
    own = shape.hidden / sequence_shards(parallel)
    if shape.experts:
        # Rows on their way to experts and back: permuted, exchanged, sorted; and their gradients,
        # in FP8 with codes of two kinds.
        return (9 if fp8 else 8) * shape.experts_per_token * own + shape.hidden
    units = shape.ffn / parallel.tensor
    if fp8:
        # The same in FP8, where gradients have codes of two kinds, and gathered inputs too.
        gathered = (2 if fp8.recipe == "blockwise" else 1) * fp8.code * shape.hidden
        gathered *= sequence_shards(parallel) > 1
        return max(
            shape.hidden + 1.5 * own + units,
            2.5 * units + own,
            1.5 * units + shape.hidden + gathered + own,
        )
    # In the second product's backward pass, the gate's, and the first product's.
    return max(shape.hidden + own + units, 2 * units + own, 2 * shape.hidden - units)


def logits_bytes(rows: int, columns: int, chunk_rows: int | None = None) -> int:
    """Bytes of the logits of `rows` predicted tokens on the last stage.

    columns: padded vocabulary over tensor ranks. With chunk_rows only so many rows exist at once,
    in float32; without, all of them and their gradients.
    """
    if chunk_rows is None:
        return rows * columns * LOGIT_BYTES
    return min(rows, chunk_rows) * columns * FLOAT32_BYTES
