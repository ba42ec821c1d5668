"""Memory of an engine, its KV cache, and what a publish moves. Pure.

Weights are those of `megatron-rl plan-weights`: the slices that each engine rank takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import GeneratorConfig
from megatron_rl.launcher.sizing.gpus import GIB, MIB
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.relay_tree import turns_before
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.tensor_shards import Share


def engine_rank_bytes(shape: ModelShape, generator: GeneratorConfig, item_bytes: int) -> list[int]:
    """Bytes of weights that each rank of an engine takes in a publish. Raises InputError."""
    ranks = 1 if generator.engine == "hf" else generator.tensor_parallel
    try:
        return [
            item_bytes * _rank_elements(shape, generator, Share(r, ranks)) for r in range(ranks)
        ]
    except ValueError as error:
        raise InputError(f"generator.tensor_parallel = {ranks} is not possible: {error}") from error


def _rank_elements(shape: ModelShape, generator: GeneratorConfig, tensor: Share) -> int:
    # Layers are alike, and the slices of every expert of every layer would take seconds.
    one, two = (
        sum(part.size for part in hf_slices(few))
        if generator.engine == "hf"
        else sum(
            part.size
            for part in engine_slices(few, tensor, expert_parallel=generator.expert_parallel)
        )
        for few in (replace(shape, layers=1), replace(shape, layers=2))
    )
    return one + (shape.layers - 1) * (two - one)


def kv_bytes_per_token(shape: ModelShape, tensor: int, item_bytes: int) -> int:
    """Bytes of keys and values of one token on one engine rank.

    Ranks beyond the key-value heads hold copies (SGLang 0.5.23, model_config.get_num_kv_heads).
    """
    heads = max(1, shape.kv_heads // tensor)
    return 2 * shape.layers * heads * shape.head_dim * item_bytes


def sglang_reserve_bytes(gpu_bytes: int, *, tensor: int, max_running: int) -> int:
    """What SGLang 0.5.23 leaves free for activations and CUDA graphs (arg_groups/memory_hook.py).

    1.5 MiB for each token of a prefill chunk, 2 MiB for each request of the largest decoding graph.
    """
    is_large = gpu_bytes > 60 * GIB
    chunk_tokens = 16_384 if gpu_bytes >= 160 * GIB else 8192 if is_large else 4096
    graph = (256 if tensor < 4 else 512) if is_large else (32 if tensor < 4 else 160)
    mebibytes = 512 + 1.5 * chunk_tokens + tensor * 128 + 2 * min(graph, max_running)
    return int(max(mebibytes, 10 * 1024 if is_large else 0) * MIB)


@dataclass(frozen=True)
class EngineMemory:
    """One rank of an engine, in bytes, and what its KV cache holds."""

    weights: int
    kv_per_token: int
    reserve: int
    kv_room: int
    """Left for the KV cache; below 0 when the weights do not fit."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache could hold."""
        return max(0, self.kv_room // self.kv_per_token)


def engine_memory(
    shape: ModelShape, generator: GeneratorConfig, *, item_bytes: int, gpu_bytes: int
) -> EngineMemory:
    """Memory of the fullest rank of an engine. Raises InputError.

    Quantised weights are counted as one byte each, which is right for fp8 and too much for 4 bits.
    """
    ranks = generator.tensor_parallel
    held = 1 if generator.quantization else item_bytes
    weights = max(engine_rank_bytes(shape, generator, held))
    reserve = sglang_reserve_bytes(gpu_bytes, tensor=ranks, max_running=generator.max_running)
    return EngineMemory(
        weights=weights,
        kv_per_token=kv_bytes_per_token(shape, ranks, item_bytes),
        reserve=reserve,
        kv_room=gpu_bytes - reserve - weights,
    )


PAPER_PUBLISH_S = 5.0
"""In less weights reach the generators, even of large models. Source: Magistral (2506.10910)."""


@dataclass(frozen=True)
class Publish:
    """What one publish to all generators moves, over NCCL."""

    total_bytes: int
    rank_bytes: int
    """Most that a rank of an engine takes."""
    copies: int
    """Of the model in the trainer; they serve generators at the same time."""
    group_ranks: int
    """Of a copy and an engine."""
    turns: int
    """Transfers, one after the other, until all generators are served: by the busiest copy, or with
    `is_relayed` also by those that hold the version."""
    is_relayed: bool
    """Generators pass weights on (weights.relay)."""
    seconds: float
    """Of the transfers of all turns; digests and pauses are not counted."""
    turn_s: float
    """Assumed for a turn beside its transfer."""
    least_seconds: float
    """Of the transfers, if the trainer's ranks alone sent, all of the time: their bandwidth."""

    @property
    def whole_seconds(self) -> float:
        """That the trainer waits."""
        return self.seconds + self.turns * self.turn_s

    def relay_advice(self) -> list[str]:
        """What weights.relay would save, where a publish takes longer than the paper says."""
        turns = turns_before(self.turns)
        if self.is_relayed or self.whole_seconds <= PAPER_PUBLISH_S or turns == self.turns:
            return []
        return [
            f"a publish takes {self.whole_seconds:.1f} s: with weights.relay=true engines pass "
            f"weights on, in {turns} turns instead of {self.turns}, "
            f"{turns * self.whole_seconds / self.turns:.1f} s"
        ]


def publish_cost(
    shape: ModelShape,
    generator: GeneratorConfig,
    *,
    copies: Sequence[Sequence[int]],
    item_bytes: int,
    bytes_per_s: float,
    turn_s: float = 0.0,
    is_relayed: bool = False,
) -> Publish:
    """Bytes and seconds, where each rank sends or receives `bytes_per_s`. Raises InputError.

    copies: the trainer's ranks of each. Those of a copy share its work evenly (`make_plan`), so
    that the slower end of a transfer is the fullest receiver, or the senders where they are fewer.
    """
    ranks = engine_rank_bytes(shape, generator, item_bytes)
    senders = len(copies[0])
    served = -(-generator.replicas // len(copies))
    turns = turns_before(served) if is_relayed else served
    total = generator.replicas * sum(ranks)
    # Over NCCL a copy serves its generators in turn: see weights/publish/settings.py.
    slowest = max(max(ranks), sum(ranks) / senders)
    return Publish(
        total_bytes=total,
        rank_bytes=max(ranks),
        copies=len(copies),
        group_ranks=senders + len(ranks),
        turns=turns,
        is_relayed=is_relayed,
        seconds=turns * slowest / bytes_per_s,
        turn_s=turn_s,
        least_seconds=max(max(ranks), served * sum(ranks) / senders) / bytes_per_s,
    )
