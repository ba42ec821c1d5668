"""The nearest configuration that fits a GPU. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import HOST_GPUS
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.config.tree import Config
from megatron_rl.plan.communicators import engine_communicator_bytes
from megatron_rl.plan.generator import cache_tokens, engine_memory
from megatron_rl.plan.trainer_memory import ITEM_BYTES, fullest_rank
from megatron_rl.weights.layout.shape import ModelShape, check_parallel

_FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class _Change:
    """A change of a configuration; each factor is 1 for no change."""

    shards_optimizer: bool
    recompute: int
    """Index into `recomputations`; 0: that of the configuration."""
    less_tokens: int
    tensor: int
    pipeline: int
    expert: int
    data: int

    @property
    def cost(self) -> float:
        """Cost of the change: lost speed first, then more GPUs."""
        steps = (self.less_tokens, self.tensor, self.expert, self.pipeline, self.data)
        weights = (1, 3, 3, 4, 12)
        doublings = (step.bit_length() - 1 for step in steps)
        changes = self.shards_optimizer * 1 + (1 + self.recompute / 10) * bool(self.recompute)
        return changes + sum(w * n for w, n in zip(weights, doublings, strict=True))


def nearest_fit(
    shape: ModelShape, config: Config, *, gpu_bytes: int, mean_tokens: int
) -> list[str] | None:
    """Overrides with the fewest and cheapest changes with which the trainer fits; None: none."""
    has_experts = bool(shape.experts)
    changes = sorted(_changes(config, has_experts), key=lambda change: change.cost)
    for change in changes:
        changed = _apply(config, change, has_experts)
        try:
            check_parallel(shape, changed.parallel)
        except InputError:
            continue
        if fullest_rank(shape, changed, mean_tokens).total <= gpu_bytes:
            return _differences(config, changed)
    return None


def recomputations(model: ModelConfig, *, has_experts: bool) -> list[dict[str, Any]]:
    """Settings of `model` that keep ever fewer activations; the first is the current one.

    Selective modules come before `full`, as they recompute less. Modules in use stay.
    """
    if model.recompute == "full":
        return [{}]
    # Recomputing the unfused norm costs nothing; delayed scaling refuses both (config/trainer.py).
    steps = [["moe_act", "layernorm"], ["moe", "layernorm"]] if has_experts else [["mlp"]]
    if model.fp8 == "delayed" or model.layers == "local":
        # The others are parts of TransformerEngine's layers.
        steps = [[name for name in step if name in ("mlp", "moe")] for step in steps]
    used = set(model.recompute_modules) if model.recompute == "selective" else set()
    found: list[dict[str, Any]] = [{}]
    for step in steps:
        modules = set(step) | (used - ({"moe_act"} if "moe" in step else set()))
        if step and not modules <= used and not {"moe", "moe_act"} <= modules:
            names = tuple(sorted(modules))
            found.append({"recompute": "selective", "recompute_modules": names})
    return [*found, {"recompute": "full"}]


def _changes(config: Config, has_experts: bool) -> Iterator[_Change]:
    parallel, train = config.parallel, config.train
    # At least the longest completion, which may fill a microbatch.
    tokens = [
        f for f in _FACTORS if train.microbatch_tokens // f >= config.generator.context_tokens
    ]
    options = (
        (False,) if parallel.distributed_optimizer else (False, True),
        range(len(recomputations(config.model, has_experts=has_experts))),
        tokens or (1,),
        [f for f in _FACTORS if f == 1 or parallel.tensor * f <= HOST_GPUS],
        _FACTORS,
        _FACTORS,
        _FACTORS,
    )
    for values in product(*options):
        yield _Change(*values)


def _apply(config: Config, change: _Change, has_experts: bool) -> Config:
    parallel, train = config.parallel, config.train
    tensor, pipeline = parallel.tensor * change.tensor, parallel.pipeline * change.pipeline
    data = parallel.data
    # GPUs added to a replica come from fewer replicas, as long as their number is divisible.
    for factor in (change.tensor, change.pipeline):
        data = data // factor if data % factor == 0 else data
    updates: dict[str, dict[str, Any]] = {
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data * change.data,
            "expert": parallel.expert * change.expert,
            "sequence": parallel.sequence or change.tensor > 1,
            "distributed_optimizer": parallel.distributed_optimizer or change.shards_optimizer,
        },
        "train": {"microbatch_tokens": train.microbatch_tokens // change.less_tokens},
    }
    updates["model"] = recomputations(config.model, has_experts=has_experts)[change.recompute]
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in updates.items()
    }
    return config.model_copy(update=sections)


def _differences(config: Config, changed: Config) -> list[str]:
    """The overrides that turn one configuration into the other."""
    found = []
    for name in ("model", "parallel", "train"):
        before, after = getattr(config, name), getattr(changed, name)
        for key in type(before).model_fields:
            if getattr(before, key) != getattr(after, key):
                found.append(f"{name}.{key}={_toml(getattr(after, key))}")
    return found


def _toml(value: object) -> str:
    """Text of a value in an override, without spaces."""
    if isinstance(value, tuple):
        return json.dumps(value, separators=(",", ":"))
    return str(value).lower()


def nearest_engine_fit(shape: ModelShape, config: Config, *, gpu_bytes: int) -> list[str] | None:
    """Overrides with which the engine and its generator.kv_tokens fit; None: none."""
    generator, item_bytes = config.generator, ITEM_BYTES[config.model.dtype]
    communicators = engine_communicator_bytes(config, config.parallel.world_size)
    for factor in _FACTORS:
        ranks = generator.tensor_parallel * factor
        changed = generator.model_copy(update={"tensor_parallel": ranks})
        try:
            memory = engine_memory(
                shape,
                changed,
                item_bytes=item_bytes,
                gpu_bytes=gpu_bytes,
                communicators=communicators,
            )
        except InputError:
            continue
        tokens = min(cache_tokens(generator, memory), memory.kv_tokens)
        # A cache for fewer completions is acceptable, if it holds at least one.
        if ranks <= HOST_GPUS and tokens >= generator.context_tokens:
            found = {"tensor_parallel": ranks, "kv_tokens": tokens}
            return [
                f"generator.{key}={value}"
                for key, value in found.items()
                if value != getattr(generator, key)
                and not (key == "kv_tokens" and generator.takes_all_memory)
            ]
    return None
