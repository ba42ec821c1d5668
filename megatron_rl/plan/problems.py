"""What of a configuration does not fit its GPUs, each problem with what to change.

Also the memory of a GPU that a trainer rank and an engine share, at once or in turns.

Used by `plan.py`. Pure, but that it reads the reference's config.json.
"""

from dataclasses import dataclass

from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.tree import Config
from megatron_rl.plan.fit import nearest_engine_fit, nearest_fit
from megatron_rl.plan.generator import EngineMemory, engine_memory
from megatron_rl.plan.trainer_memory import ITEM_BYTES, RankMemory
from megatron_rl.weights.layout.shape import ModelShape, read_shape


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of one GPU in each turn; without turns both are the sum of all."""

    trainers_turn: int
    """While the trainer computes."""
    engines_turn: int
    """While the engine generates and takes weights."""

    @property
    def peak(self) -> int:
        """What the GPU must hold."""
        return max(self.trainers_turn, self.engines_turn)


def shared_memory(config: Config, trainer: RankMemory, engine: EngineMemory) -> SharedMemory | None:
    """Of the fullest trainer rank and an engine rank beside it; None where they share no GPU."""
    if not config.generator.colocate:
        return None
    given_back = engine.weights + config.generator.bounded_kv_tokens * engine.kv_per_token
    both = trainer.total + given_back + engine.reserve
    if not config.generator.release_memory:
        return SharedMemory(both, both)
    # CUDA graphs stay (`generation/sglang_command.py`: RELEASED). How much of SGLang's reserve they
    # take is not known, so all of it counts.
    return SharedMemory(
        trainers_turn=both - given_back,
        engines_turn=both - trainer.passes,
    )


def sharing_problems(config: Config, shared: SharedMemory | None, gpu: Gpu) -> list[str]:
    """That a GPU does not hold both."""
    if shared is None or shared.peak <= gpu.memory_bytes:
        return []
    of = f"GiB of {gpu.memory_bytes / GIB:.1f}"
    if not config.generator.release_memory:
        text = (
            f"a trainer rank and an engine on one GPU need {shared.peak / GIB:.1f} {of}: lower "
            "generator.kv_tokens or train.microbatch_tokens"
        )
        # A run whose engine is another one cannot take turns.
        takes_turns = config.generator.engine == "sglang"
        return [f"{text}, or set generator.release_memory=true" if takes_turns else text]
    found = []
    if shared.trainers_turn > gpu.memory_bytes:
        found.append(
            f"a trainer rank and what an engine keeps need {shared.trainers_turn / GIB:.1f} {of}: "
            "lower train.microbatch_tokens"
        )
    if shared.engines_turn > gpu.memory_bytes:
        found.append(
            "an engine and the states of a trainer rank need "
            f"{shared.engines_turn / GIB:.1f} {of}: lower generator.kv_tokens"
        )
    return found


def turn_advice(config: Config, step_s: float) -> list[str]:
    """That requests may run out of time while the trainer computes."""
    limit_s = config.generator.request_timeout_s
    if not config.generator.release_memory or step_s < limit_s:
        return []
    return [
        f"requests wait while the trainer computes, about {step_s:.0f} s a step, and "
        f"expert.generator.request_timeout_s={limit_s:g} counts that: raise it, and "
        "expert.queue.lease_timeout_s"
    ]


def generator_gpus(config: Config) -> int:
    """GPUs of all engines."""
    return config.generator.replicas * config.generator.tensor_parallel


def trainer_problems(
    shape: ModelShape, config: Config, trainer: RankMemory, gpu: Gpu, mean_tokens: int
) -> list[str]:
    """The fullest trainer rank must fit its GPU."""
    if trainer.total <= gpu.memory_bytes:
        return []
    found = nearest_fit(shape, config, gpu_bytes=gpu.memory_bytes, mean_tokens=mean_tokens)
    remedy = f"nearest setting that fits: {' '.join(found)}" if found else (
        "neither sharding, recomputation, smaller microbatches nor 8 times the ranks make it fit: "
        "take larger GPUs or a shorter generator.context_tokens"
    )  # fmt: skip
    return [
        f"a trainer rank of pipeline stage {trainer.stage} needs {trainer.total / GIB:.1f} GiB of "
        f"{gpu.memory_bytes / GIB:.1f}; {remedy}"
    ]


def engine_problems(shape: ModelShape, config: Config, engine: EngineMemory, gpu: Gpu) -> list[str]:
    """An engine rank must hold its weights and the KV cache that the configuration wants."""
    generator = config.generator
    wanted = generator.bounded_kv_tokens
    if generator.takes_all_memory:
        wanted = generator.context_tokens
    if wanted < generator.context_tokens:
        return [
            f"generator.kv_tokens={generator.kv_tokens} does not hold one completion of "
            f"generator.context_tokens={generator.context_tokens}: raise it"
        ]
    if engine.kv_tokens >= wanted:
        return []
    found = nearest_engine_fit(shape, config, gpu_bytes=gpu.memory_bytes)
    remedy = f"nearest setting that fits: {' '.join(found)}" if found else "take larger GPUs"
    room = f"leaves room for {engine.kv_tokens} tokens of KV cache" if engine.kv_room > 0 else (
        "has no room for its weights"
    )  # fmt: skip
    return [f"an engine rank {room}, generator.kv_tokens={generator.kv_tokens}; {remedy}"]


def scorer_problems(config: Config, gpu: Gpu) -> list[str]:
    """The reference's own engine must hold its weights and scorer.kv_tokens."""
    if not scorer_gpus(config):
        return []
    scorer = config.scorer
    shape = read_shape(config.algorithm.reference.folder or config.model.path)
    as_generator = config.generator.model_copy(
        update={
            "engine": "sglang",
            "tensor_parallel": scorer.tensor_parallel,
            "expert_parallel": 1,
            "quantization": scorer.quantization,
            "max_running": scorer.max_running,
        }
    )
    memory = engine_memory(
        shape,
        as_generator,
        item_bytes=ITEM_BYTES[scorer.dtype or config.model.dtype],
        gpu_bytes=gpu.memory_bytes,
    )
    if memory.kv_tokens >= scorer.kv_tokens:
        return []
    return [
        f"a rank of the scorer, with {memory.weights / GIB:.1f} GiB of weights of the reference, "
        f"has room for {memory.kv_tokens} tokens of KV cache, scorer.kv_tokens={scorer.kv_tokens}: "
        "raise scorer.tensor_parallel, or lower the latter"
    ]


def scorer_gpus(config: Config) -> int:
    """GPUs of the engine that computes the reference; 0 without one."""
    return config.scorer.tensor_parallel if config.has_scorer else 0


def wanted_gpus(config: Config) -> int:
    """GPUs of the whole run."""
    scorer = scorer_gpus(config)
    if config.generator.colocate:
        return max(config.parallel.world_size, generator_gpus(config)) + scorer
    return config.parallel.world_size + generator_gpus(config) + scorer


def count_problems(config: Config, gpus: int | None) -> list[str]:
    """The run must not take more GPUs than there are (None: not said)."""
    wanted = wanted_gpus(config)
    if gpus is None or wanted <= gpus:
        return []
    return [
        f"the run takes {wanted} GPUs, {config.parallel.world_size} for the trainer and "
        f"{generator_gpus(config)} for generators{_of_scorer(config)}, but --gpus is {gpus}: "
        "lower parallel.data or generator.replicas"
    ]


def _of_scorer(config: Config) -> str:
    return f" and {gpus} for the scorer" if (gpus := scorer_gpus(config)) else ""
