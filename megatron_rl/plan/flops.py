"""FLOPs and seconds of an optimizer step. Pure.

A product of [m, k] and [k, n] counts 2 m k n; backward counts twice the forward pass. Source:
Narayanan et al. (arXiv 2104.04473, eq. 3), whose factor 4 holds a recomputed forward pass; the
model's own FLOPs are 3 forward passes, as in PaLM's definition of MFU (arXiv 2204.02311, app. B).
"""

from collections.abc import Collection
from dataclasses import dataclass

from megatron_rl.plan.parameters import attention_parameters
from megatron_rl.weights.layout.shape import ModelShape

BACKWARD = 2
"""FLOPs of a backward pass over those of a forward pass."""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of all ranks together, forward and backward."""

    products: int
    """Products of activations with weights: linear in tokens."""
    attention: int
    """Queries with keys and scores with values: quadratic in the length."""
    output: int
    """Output matrix, for every token."""

    @property
    def total(self) -> int:
        """All FLOPs."""
        return self.products + self.attention + self.output

    def plus(self, other: "StepFlops") -> "StepFlops":
        """The sum of both."""
        return StepFlops(
            self.products + other.products,
            self.attention + other.attention,
            self.output + other.output,
        )


def product_flops(shape: ModelShape) -> int:
    """FLOPs of one token's forward pass through the matrices of all layers."""
    kinds = shape.kinds(range(shape.layers))
    return 2 * sum(count * (attention_parameters(shape) + _units(kind)) for kind, count in kinds)


def _units(shape: ModelShape) -> int:
    """Matrix elements that one token uses in a layer's MLP, or in its router and experts."""
    if not shape.experts:
        return 3 * shape.hidden * shape.ffn
    units = shape.experts_per_token * shape.moe_ffn + shape.shared_ffn
    return 3 * shape.hidden * units + shape.experts * shape.hidden


def output_flops(shape: ModelShape) -> int:
    """FLOPs of one row of logits, forward."""
    return 2 * shape.hidden * shape.vocab


def attention_flops(shape: ModelShape, pairs: int, layers: int | None = None) -> int:
    """FLOPs of attention in `layers` (None: all), forward, for `pairs` of a query and a key."""
    dims = shape.head_dim + (shape.value_dim or shape.head_dim)
    return 2 * (shape.layers if layers is None else layers) * shape.heads * dims * pairs


def causal_flops(shape: ModelShape, length: int) -> int:
    """FLOPs of attention in all layers, forward, of a sequence of `length` tokens."""
    full = len(shape.full_layers)
    pairs = causal_pairs(length, shape.sliding_window)
    cut = attention_flops(shape, pairs, shape.layers - full)
    return cut + attention_flops(shape, causal_pairs(length), full)


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key of a sequence: each token sees itself and those before it.

    window: most tokens that a token sees, itself included.
    """
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def step_flops(shape: ModelShape, *, sequences: int, length: int) -> StepFlops:
    """Model FLOPs of training on `sequences` of `length` tokens each, nothing recomputed."""
    tokens = sequences * length
    passes = 1 + BACKWARD
    return StepFlops(
        products=passes * tokens * product_flops(shape),
        attention=passes * sequences * causal_flops(shape, length),
        output=passes * tokens * output_flops(shape),
    )


def hardware_flops(flops: StepFlops, *, recomputes_layers: bool, again: int = 0) -> int:
    """FLOPs that devices compute: full recomputation repeats the layers' forward pass.

    again: FLOPs that recomputation of some modules adds.
    """
    layers = flops.products + flops.attention
    return flops.total + again + (layers // (1 + BACKWARD) if recomputes_layers else 0)


def recomputed_flops(
    shape: ModelShape, modules: Collection[str], *, sequences: int, length: int
) -> int:
    """FLOPs of the forward passes through `modules` that a step of `sequences` makes again.

    Norms and activations count nothing: they are limited by memory.
    """
    found = 0
    if "core_attn" in modules:
        found += sequences * causal_flops(shape, length)
    units = sum(
        count * _units(kind)
        for kind, count in shape.kinds(range(shape.layers))
        if ("moe" if kind.experts else "mlp") in modules
    )
    return found + 2 * units * sequences * length


def bubble_share(stages: int, virtual_stages: int, microbatches: int) -> float:
    """Share of a step that a pipeline stage idles: (p - 1) / (v m + p - 1).

    Source: arXiv 2104.04473, section 2.2.2, where it is given over the ideal time.
    """
    return (stages - 1) / (virtual_stages * microbatches + stages - 1)


def step_seconds(flops: StepFlops, *, gpus: int, peak_flops: float, mfu: float) -> float:
    """Seconds of a step whose model FLOPs use the share `mfu` of the GPUs' peak."""
    return flops.total / (gpus * peak_flops * mfu)
