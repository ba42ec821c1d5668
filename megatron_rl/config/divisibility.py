"""Checks that parallel sizes divide a model. Used by the launcher and by trainer ranks.

Every refusal names the nearest possible size.
"""

import math
from dataclasses import dataclass

from megatron_rl.config.errors import InputError
from megatron_rl.config.parallel import ParallelConfig, stage_layers


@dataclass(frozen=True)
class Counts:
    """Sizes of a model that ranks divide."""

    heads: int
    kv_heads: int
    layers: int
    ffn: int = 0
    """Units of a dense MLP; 0: experts instead."""
    experts: int = 0
    """Experts of a layer; 0: a dense model."""
    expert_ffn: int = 0
    """Units of one expert."""
    shared_ffn: int = 0
    """Units of shared experts."""


def check_sizes(parallel: ParallelConfig, counts: Counts) -> None:
    """Raise InputError unless the ranks can divide the model."""
    _check_tensor(parallel, counts)
    _check_pipeline(parallel, counts.layers)
    if counts.experts:
        _check_experts(parallel, counts)
        return
    for name in ("expert", "expert_tensor"):
        if (size := getattr(parallel, name)) > 1:
            raise InputError(f"parallel.{name} = {size}, but the model has no experts: use 1")


def check_engine_tensor(
    size: int, heads: int, *, normed_heads: int = 0, key: str = "generator.tensor_parallel"
) -> None:
    """Raise InputError unless the number of engine ranks divides the attention heads.

    Engines copy key-value heads and pad MLP units, so these sizes are free. normed_heads: number
    of key-value heads under one norm (0: each has its own). SGLang 0.5.23 gathers them from all
    ranks, so none may be a copy.
    """
    _check_divides(key, size, f"the model's {heads} attention heads", heads)
    what = f"the model's {normed_heads} key-value heads, which are normed together"
    _check_divides(key, size, what, heads, normed_heads)


def check_engine_experts(tensor: int, expert: int, counts: Counts) -> None:
    """Raise InputError unless an engine's `tensor` ranks can divide the experts `expert`-fold."""
    if expert == 1:
        return
    key = "generator.expert_parallel"
    if not counts.experts:
        raise InputError(f"{key} = {expert}, but the model has no experts: use 1")
    what = f"the model's {counts.experts} experts and generator.tensor_parallel = {tensor}"
    _check_divides(key, expert, what, counts.experts, tensor)
    if counts.expert_ffn % (tensor // expert):
        raise InputError(
            f"{key} = {expert} of generator.tensor_parallel = {tensor} leaves {tensor // expert} "
            f"ranks for each expert, which do not divide its {counts.expert_ffn} units: "
            f"use {tensor}"
        )


def _check_divides(key: str, size: int, what: str, *counts: int) -> None:
    """Raise InputError, with the nearest possible size, unless `size` divides all counts."""
    common = math.gcd(*counts)
    if common % size:
        raise InputError(
            f"{key} = {size} does not divide {what}; nearest possible: "
            f"{nearest_divisor(common, size)}"
        )


def _check_tensor(parallel: ParallelConfig, counts: Counts) -> None:
    what = f"the model's {counts.heads} attention heads and {counts.kv_heads} key-value heads"
    if counts.ffn:
        what += f" and {counts.ffn} MLP units"
    if counts.shared_ffn:
        what += f" and {counts.shared_ffn} units of shared experts"
    sizes = (counts.heads, counts.kv_heads, counts.ffn, counts.shared_ffn)
    _check_divides("parallel.tensor", parallel.tensor, what, *sizes)


def _check_pipeline(parallel: ParallelConfig, layers: int) -> None:
    stages, chunks = parallel.pipeline, parallel.virtual_stages
    if parallel.has_uneven_stages:
        _check_uneven(parallel, layers)
        return
    _check_divides("parallel.pipeline", stages, f"the model's {layers} layers", layers)
    each = layers // stages
    what = f"the {each} layers of each of parallel.pipeline = {stages} stages"
    _check_divides("parallel.virtual_stages", chunks, what, each)


def _check_uneven(parallel: ParallelConfig, layers: int) -> None:
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    try:
        stage_layers(layers, parallel.pipeline, first, last)
    except ValueError as error:
        raise InputError(
            f"expert.parallel.first_stage_layers = {first} and last_stage_layers = {last} of "
            f"parallel.pipeline = {parallel.pipeline} leave {layers - first - last} of the model's "
            f"{layers} layers to the other stages, which must have equally many and at least one; "
            "set both to 0 for stages of the same size"
        ) from error


def _check_experts(parallel: ParallelConfig, counts: Counts) -> None:
    ranks = parallel.tensor * parallel.context * parallel.data
    shared = parallel.expert_tensor
    what = (
        f"the {counts.expert_ffn} units of an expert and parallel.tensor x context x data = {ranks}"
    )
    _check_divides("parallel.expert_tensor", shared, what, counts.expert_ffn, ranks)
    what = (
        f"the model's {counts.experts} experts and parallel.tensor x context x data / "
        f"expert_tensor = {ranks // shared}"
    )
    _check_divides("parallel.expert", parallel.expert, what, counts.experts, ranks // shared)
    if parallel.tensor > 1 and not parallel.sequence:
        # With it each tensor rank routes its part of the tokens; without it, all tokens.
        raise InputError(
            f"parallel.tensor = {parallel.tensor} with experts needs parallel.sequence = true"
        )


def nearest_divisor(count: int, wanted: int) -> int:
    """The divisor of `count` nearest to `wanted`; of two, the smaller one."""
    divisors = (size for size in range(1, count + 1) if count % size == 0)
    return min(divisors, key=lambda size: (abs(size - wanted), size))
