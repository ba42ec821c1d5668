"""The nearest configuration that fits a GPU. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.sizing.generator import engine_memory
from megatron_rl.launcher.sizing.trainer_memory import ITEM_BYTES, fullest_rank, setting_of
from megatron_rl.weights.layout.shape import ModelShape, check_parallel

HOST_GPUS = 8
"""Tensor ranks and the ranks of an engine stay within a host."""
_FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class _Change:
    """Steps away from a configuration; each factor is 1 for no change."""

    shards_optimizer: bool
    recomputes: bool
    less_tokens: int
    tensor: int
    pipeline: int
    expert: int
    data: int

    @property
    def cost(self) -> float:
        """By how much it is the worse choice: speed first, then more GPUs."""
        steps = (self.less_tokens, self.tensor, self.expert, self.pipeline, self.data)
        weights = (1, 3, 3, 4, 12)
        doublings = (step.bit_length() - 1 for step in steps)
        changes = self.shards_optimizer * 1 + self.recomputes * 2
        return changes + sum(w * n for w, n in zip(weights, doublings, strict=True))


def nearest_fit(
    shape: ModelShape, config: Config, *, gpu_bytes: int, mean_tokens: int
) -> list[str] | None:
    """Overrides that make the trainer fit, fewest and cheapest changes first; None if none do."""
    for change in sorted(_changes(config), key=lambda change: change.cost):
        changed = _apply(config, change)
        try:
            check_parallel(shape, changed.parallel)
        except InputError:
            continue
        if fullest_rank(shape, setting_of(changed, mean_tokens)).total <= gpu_bytes:
            return _differences(config, changed)
    return None


def _changes(config: Config) -> Iterator[_Change]:
    parallel, train = config.parallel, config.train
    # No smaller than the longest completion, which is a microbatch of its own.
    tokens = [
        f for f in _FACTORS if train.microbatch_tokens // f >= config.generator.context_tokens
    ]
    options = (
        (False,) if parallel.distributed_optimizer else (False, True),
        (False,) if config.model.recompute == "full" else (False, True),
        tokens or (1,),
        [f for f in _FACTORS if f == 1 or parallel.tensor * f <= HOST_GPUS],
        _FACTORS,
        _FACTORS,
        _FACTORS,
    )
    for values in product(*options):
        yield _Change(*values)


def _apply(config: Config, change: _Change) -> Config:
    parallel, train = config.parallel, config.train
    tensor, pipeline = parallel.tensor * change.tensor, parallel.pipeline * change.pipeline
    data = parallel.data
    # What a replica takes more is taken from the replicas, as long as they can be divided.
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
    if change.recomputes:
        updates["model"] = {"recompute": "full"}
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in updates.items()
    }
    return config.model_copy(update=sections)


def _differences(config: Config, changed: Config) -> list[str]:
    """The overrides that lead from one configuration to the other."""
    found = []
    for name in ("model", "parallel", "train"):
        before, after = getattr(config, name), getattr(changed, name)
        for key in type(before).model_fields:
            if getattr(before, key) != getattr(after, key):
                found.append(f"{name}.{key}={str(getattr(after, key)).lower()}")
    return found


def nearest_engine_fit(shape: ModelShape, config: Config, *, gpu_bytes: int) -> list[str] | None:
    """Overrides that make the engine and its generator.kv_tokens fit; None if none do."""
    generator, item_bytes = config.generator, ITEM_BYTES[config.model.dtype]
    for factor in _FACTORS:
        ranks = generator.tensor_parallel * factor
        changed = generator.model_copy(update={"tensor_parallel": ranks})
        try:
            memory = engine_memory(shape, changed, item_bytes=item_bytes, gpu_bytes=gpu_bytes)
        except InputError:
            continue
        tokens = min(generator.kv_tokens, memory.kv_tokens)
        # A cache for fewer completions is near; one that does not hold a single one is no cache.
        if ranks <= HOST_GPUS and tokens >= generator.context_tokens:
            found = {"tensor_parallel": ranks, "kv_tokens": tokens}
            return [
                f"generator.{key}={value}"
                for key, value in found.items()
                if value != getattr(generator, key)
            ]
    return None
