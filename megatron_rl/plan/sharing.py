"""Memory of a GPU that a trainer rank and an engine share, at once or in turns. Pure."""

from dataclasses import dataclass

from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.config.tree import Config
from megatron_rl.plan.generator import EngineMemory
from megatron_rl.plan.trainer_memory import RankMemory


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
        engines_turn=both - trainer.activations - trainer.logits,
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
