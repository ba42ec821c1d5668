"""What tools.bench.generate computes from its samples and from the machine's limits. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.limits import Shapes


@dataclass(frozen=True)
class Speed:
    """Medians of an engine at one count of running requests."""

    prefill: float
    """Prompt tokens/s, the first completion token included."""
    decode: float
    """Completion tokens/s after the first."""


def speed(
    rows: Sequence[dict[str, Any]], running: int, *, prompt_tokens: int, new_tokens: int
) -> Speed:
    """From the samples of one engine; see `generate_job.measure`."""
    chosen = [row for row in rows if row["running"] == running]
    return Speed(
        prefill=statistics.median(running * prompt_tokens / row["first_s"] for row in chosen),
        decode=statistics.median(
            running * new_tokens / (row["all_s"] - row["first_s"]) for row in chosen
        ),
    )


@dataclass(frozen=True)
class Machine:
    """Limits of the cores that an engine may use."""

    read_bytes_per_s: float
    gemm_flops_per_s: float
    """Of the model's products at as many rows as requests run."""


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Keys and values of one token."""
    return 2 * layers * kv_heads * head_dim * element_bytes


def decode_roofline(
    shapes: Shapes,
    machine: Machine,
    *,
    running: int,
    context_tokens: float,
    kv_bytes: int,
    element_bytes: int = 2,
) -> float:
    """Completion tokens/s that no engine of this kind exceeds.

    A step of B requests takes max(W / bandwidth, 2 n B / rate) + B c k / bandwidth: n weights of
    products, W their bytes, c the mean context in tokens, k the bytes of its keys and values a
    token. Products and attention follow each other in a layer, so their times add.
    """
    weights_s = shapes.weights * element_bytes / machine.read_bytes_per_s
    products_s = 2 * shapes.weights * running / machine.gemm_flops_per_s
    cache_s = running * context_tokens * kv_bytes / machine.read_bytes_per_s
    return running / (max(weights_s, products_s) + cache_s)


def prefill_roofline(shapes: Shapes, flops_per_s: float) -> float:
    """Prompt tokens/s at the rate of products; logits of last tokens alone are not counted."""
    return flops_per_s / (2 * shapes.layers * shapes.layer_weights)


def over(ours: float | None, theirs: float | None) -> float | None:
    """The ratio, where both were measured."""
    return None if ours is None or theirs is None else round(ours / theirs, 3)
