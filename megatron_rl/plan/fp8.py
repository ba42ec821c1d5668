"""What FP8 changes in the memory of a trainer rank. Pure.

Source: transformer-engine 2.12.0 (module/linear.py, layernorm_linear.py, grouped_linear.py) as
Megatron-Core 0.16.1 uses it, on GPUs whose products need transposed codes, such as Hopper's.
`megatron-rl rehearse` has the same by shape.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.plan.parameters import (
    attention_parameters,
    latent_parameters,
    sequence_shards,
    stage_kinds,
)
from megatron_rl.weights.layout.shape import ModelShape

COPY_BYTES = 2
"""Codes of a weight by rows and transposed, which stay from microbatch to microbatch."""
_BLOCK = 128
"""Elements of an activation that share a float32 scale in the blockwise recipe."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Fp8:
    """FP8 of a run."""

    recipe: str
    edge_layers: int = 0
    """First layers, and last ones, whose products stay in the compute dtype."""
    item_bytes: int = 2
    """Of the compute dtype."""

    @property
    def code(self) -> float:
        """Size of an activation's code, with its part of a scale, in elements."""
        scale = _SCALE_BYTES / _BLOCK if self.recipe == "blockwise" else 0.0
        return (1 + scale) / self.item_bytes


def fp8_of(model: ModelConfig, item_bytes: int) -> Fp8 | None:
    """Of a configuration; None without FP8."""
    if model.fp8 == "none":
        return None
    return Fp8(model.fp8, model.fp8_bf16_edge_layers, item_bytes)


def layer_groups(
    shape: ModelShape, parallel: ParallelConfig, stage: int, fp8: Fp8 | None
) -> Iterator[tuple[ModelShape, int, Fp8 | None]]:
    """(kind, layers, FP8 of their products) of the layers of a stage."""
    edge = fp8.edge_layers if fp8 else shape.layers
    inner = range(edge, shape.layers - edge)
    for kind, count in stage_kinds(shape, parallel, stage):
        within = sum(n for each, n in stage_kinds(shape, parallel, stage, inner) if each == kind)
        if within:
            yield kind, within, fp8
        if within < count:
            yield kind, count - within, None


def quantized_elements(
    shape: ModelShape, parallel: ParallelConfig, stage: int, fp8: Fp8 | None
) -> int:
    """Parameters of a rank that have copies in FP8: weights of products within layers."""
    total = 0
    for kind, count, own in layer_groups(shape, parallel, stage, fp8):
        if own is None:
            continue
        latent = latent_parameters(kind)
        divided = attention_parameters(kind) - latent
        divided += 3 * kind.hidden * (kind.shared_ffn if kind.experts else kind.ffn)
        experts = kind.experts // parallel.expert * 3 * kind.hidden * kind.moe_ffn
        total += count * (latent + divided // parallel.tensor + experts // parallel.expert_tensor)
    return total


def spared_elements(
    shape: ModelShape, parallel: ParallelConfig, fp8: Fp8, recompute: str, modules: Collection[str]
) -> tuple[float, float]:
    """Elements for each token of a layer that codes spare: of what stays, of what is recomputed.

    A product keeps codes of its input. Two inputs are kept in the compute dtype by another
    operation: attention keeps its result, and the router keeps the input of shared experts. Under
    delayed scaling Megatron cannot leave out those codes.
    """
    share = 1 - fp8.code
    own = shape.hidden / sequence_shards(parallel)
    attention = share * own
    if shape.kv_rank:
        # Two products have codes of the same input, as large as the input.
        attention = share * (shape.q_rank + shape.kv_rank) / sequence_shards(parallel)
    unit = 0.0
    if shape.experts:
        unit = share * shape.experts_per_token * shape.moe_ffn
        unit /= parallel.expert_tensor * sequence_shards(parallel)
        inputs = share * shape.experts_per_token * own
        feed_forward = inputs + unit + share * shape.shared_ffn / parallel.tensor
    else:
        feed_forward = share * (own + shape.ffn / parallel.tensor)
    if fp8.recipe == "delayed":
        values = shape.value_dim if shape.kv_rank else shape.head_dim
        attention -= fp8.code * shape.heads * values / parallel.tensor
        feed_forward -= fp8.code * own * bool(shape.shared_ffn)
    if recompute == "full":
        return 0.0, attention + feed_forward
    if recompute == "selective" and ("moe" if shape.experts else "mlp") in modules:
        return attention, feed_forward
    if recompute == "selective" and shape.experts and "moe_act" in modules:
        # Megatron then keeps that input in the compute dtype, and recomputes it.
        return attention + feed_forward - unit, 0.0
    return attention + feed_forward, 0.0
