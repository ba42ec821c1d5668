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


def check_engine_tensor(size: int, heads: int, *, key: str = "generator.tensor_parallel") -> None:
    """Raise InputError unless the number of engine ranks divides the attention heads.

    Engines copy key-value heads and pad MLP units, so these sizes are free.
    """
    if heads % size:
        raise InputError(
            f"{key} = {size} does not divide the model's {heads} attention "
            f"heads; nearest possible: {nearest_divisor(heads, size)}"
        )


def check_engine_experts(tensor: int, expert: int, counts: Counts) -> None:
    """Raise InputError unless an engine's `tensor` ranks can divide the experts `expert`-fold."""
    if expert == 1:
        return
    name = f"generator.expert_parallel = {expert}"
    if not counts.experts:
        raise InputError(f"{name}, but the model has no experts: use 1")
    if counts.experts % expert or tensor % expert:
        possible = math.gcd(counts.experts, tensor)
        raise InputError(
            f"{name} must divide the model's {counts.experts} experts and "
            f"generator.tensor_parallel = {tensor}; "
            f"nearest possible: {nearest_divisor(possible, expert)}"
        )
    if counts.expert_ffn % (tensor // expert):
        raise InputError(
            f"{name} of generator.tensor_parallel = {tensor} leaves {tensor // expert} ranks for "
            f"each expert, which do not divide its {counts.expert_ffn} units: use {tensor}"
        )


def _check_tensor(parallel: ParallelConfig, counts: Counts) -> None:
    size = parallel.tensor
    heads = f"{counts.heads} attention heads and {counts.kv_heads} key-value heads"
    possible = math.gcd(counts.heads, counts.kv_heads, counts.ffn)
    for what, count in ((heads, math.gcd(counts.heads, counts.kv_heads)),
                        (f"{counts.ffn} MLP units", counts.ffn)):  # fmt: skip
        if count % size:
            raise InputError(
                f"parallel.tensor = {size} does not divide the model's {what}; "
                f"nearest possible: {nearest_divisor(possible, size)}"
            )


def _check_pipeline(parallel: ParallelConfig, layers: int) -> None:
    stages, chunks = parallel.pipeline, parallel.virtual_stages
    if parallel.has_uneven_stages:
        _check_uneven(parallel, layers)
        return
    if layers % stages:
        raise InputError(
            f"parallel.pipeline = {stages} does not divide the model's {layers} layers; "
            f"nearest possible: {nearest_divisor(layers, stages)}"
        )
    if layers // stages % chunks:
        raise InputError(
            f"parallel.virtual_stages = {chunks} does not divide the {layers // stages} layers "
            f"of each of parallel.pipeline = {stages} stages; "
            f"nearest possible: {nearest_divisor(layers // stages, chunks)}"
        )


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
    if counts.expert_ffn % shared or ranks % shared:
        possible = math.gcd(counts.expert_ffn, ranks)
        raise InputError(
            f"parallel.expert_tensor = {shared} must divide the {counts.expert_ffn} units "
            f"of an expert and parallel.tensor x context x data = {ranks}; "
            f"nearest possible: {nearest_divisor(possible, shared)}"
        )
    if counts.experts % parallel.expert or ranks // shared % parallel.expert:
        possible = math.gcd(counts.experts, ranks // shared)
        raise InputError(
            f"parallel.expert = {parallel.expert} must divide the model's {counts.experts} experts "
            f"and parallel.tensor x context x data / expert_tensor = {ranks // shared}; "
            f"nearest possible: {nearest_divisor(possible, parallel.expert)}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        # With it each tensor rank routes its part of the tokens; without it, all tokens.
        raise InputError(
            f"parallel.tensor = {parallel.tensor} with experts needs parallel.sequence = true"
        )


def nearest_divisor(count: int, wanted: int) -> int:
    """The divisor of `count` nearest to `wanted`; of two, the smaller one."""
    divisors = (size for size in range(1, count + 1) if count % size == 0)
    return min(divisors, key=lambda size: (abs(size - wanted), size))
