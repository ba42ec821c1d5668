"""Memory of an engine and its KV cache. Pure.

Weights are the slices of each engine rank, as in `megatron-rl plan-weights`.
"""

from dataclasses import dataclass, replace

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import GIB, MIB
from megatron_rl.config.tree import GeneratorConfig
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share


def engine_rank_bytes(shape: ModelShape, generator: GeneratorConfig, item_bytes: int) -> list[int]:
    """Bytes of weights that each rank of an engine takes in a weight sync. Raises InputError."""
    ranks = 1 if generator.engine == "hf" else generator.tensor_parallel
    try:
        return [
            item_bytes * _rank_elements(shape, generator, Share(r, ranks)) for r in range(ranks)
        ]
    except ValueError as error:
        raise InputError(f"generator.tensor_parallel = {ranks} is not possible: {error}") from error


def _rank_elements(shape: ModelShape, generator: GeneratorConfig, tensor: Share) -> int:
    # All but the first layers are alike; computing the slices of all experts of all layers would
    # take seconds.
    first = shape.dense_layers + 1
    one, two = (
        sum(part.size for part in hf_slices(few))
        if generator.engine == "hf"
        else sum(
            part.size
            for part in engine_slices(few, tensor, expert_parallel=generator.expert_parallel)
        )
        for few in (replace(shape, layers=first), replace(shape, layers=first + 1))
    )
    return one + (shape.layers - first) * (two - one)


def kv_bytes_per_token(shape: ModelShape, tensor: int, item_bytes: int) -> int:
    """Bytes of keys and values of one token on one engine rank.

    Ranks beyond the key-value heads hold copies (SGLang 0.5.23, model_config.get_num_kv_heads);
    every rank holds the latents. Layers with a window count as those without: of some families
    SGLang keeps fewer of their tokens on CUDA.
    """
    if shape.kv_rank:
        return shape.layers * shape.latent_dim * item_bytes
    heads = max(1, shape.kv_heads // tensor)
    return 2 * shape.layers * heads * shape.head_dim * item_bytes


def sglang_reserve_bytes(gpu_bytes: int, *, tensor: int, max_running: int) -> int:
    """Bytes that SGLang 0.5.23 reserves for activations and graphs (arg_groups/memory_hook.py).

    1.5 MiB for each token of a prefill chunk, 2 MiB for each request of the largest decoding graph.
    """
    is_large = gpu_bytes > 60 * GIB
    chunk_tokens = 16_384 if gpu_bytes >= 160 * GIB else 8192 if is_large else 4096
    graph = (256 if tensor < 4 else 512) if is_large else (32 if tensor < 4 else 160)
    mebibytes = 512 + 1.5 * chunk_tokens + tensor * 128 + 2 * min(graph, max_running)
    return int(max(mebibytes, 10 * 1024 if is_large else 0) * MIB)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine, and the capacity of its KV cache."""

    weights: int
    kv_per_token: int
    reserve: int
    kv_room: int
    """Bytes left for the KV cache; below 0: the weights do not fit."""
    communicators: int = 0
    """Of a weight sync, at most. SGLang's reserve does not know of them."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache could hold."""
        return max(0, self.kv_room // self.kv_per_token)


def cache_tokens(generator: GeneratorConfig, memory: EngineMemory) -> int:
    """Tokens for which the KV cache of an engine on a GPU is configured."""
    return memory.kv_tokens if generator.takes_all_memory else generator.bounded_kv_tokens


def engine_memory(
    shape: ModelShape,
    generator: GeneratorConfig,
    *,
    item_bytes: int,
    gpu_bytes: int,
    communicators: int = 0,
) -> EngineMemory:
    """Memory of the fullest rank of an engine. Raises InputError.

    Quantised weights count as one byte each: right for FP8, too much for 4 bits.
    """
    ranks = generator.tensor_parallel
    held = 1 if generator.quantization else item_bytes
    weights = max(engine_rank_bytes(shape, generator, held))
    reserve = sglang_reserve_bytes(gpu_bytes, tensor=ranks, max_running=generator.max_running)
    return EngineMemory(
        weights=weights,
        kv_per_token=kv_bytes_per_token(shape, ranks, item_bytes),
        reserve=reserve,
        kv_room=gpu_bytes - reserve - communicators - weights,
        communicators=communicators,
    )
