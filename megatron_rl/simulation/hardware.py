"""The cluster model from sizes only: the GPU's data sheet, the model's shape, the layout.

Used by `megatron-rl simulate` without --calibrate. Pure except for reading config.json. Every
assumed figure is a field of `Assumptions`; docs/simulator.md gives their sources.
"""

from dataclasses import dataclass

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import find_gpu
from megatron_rl.config.tree import Config
from megatron_rl.plan.communicators import engine_communicator_bytes
from megatron_rl.plan.flops import BACKWARD, attention_flops, output_flops, product_flops
from megatron_rl.plan.generator import engine_memory, engine_rank_bytes, kv_bytes_per_token
from megatron_rl.plan.parameters import model_parameters
from megatron_rl.plan.trainer_memory import ITEM_BYTES
from megatron_rl.plan.weight_sync import sync_cost
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.machines import (
    ClusterModel,
    Faults,
    TrainerModel,
    Turns,
    VerifierModel,
    WeightSyncModel,
)
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape

MEMORY_BYTES_PER_S = {
    "a100-40g": 1.555e12,
    "a100-80g": 2.039e12,
    "l40s-48g": 0.864e12,
    "h100-80g": 3.35e12,
    "h200-141g": 4.8e12,
    "b200-180g": 8.0e12,
}
"""NVIDIA's data sheets, SXM models."""
DENSE_MFU, EXPERTS_MFU = 0.35, 0.2
_NODE_WORKERS = 8
"""Workers of `workers = "auto"` on a node of 8 GPUs, with 32 cores or more."""


@dataclass(frozen=True)
class Assumptions:
    """Figures that no data sheet gives."""

    gpu: str = "h100-80g"
    mfu: float | None = None
    """Model FLOPs of the trainer over the bfloat16 peak, for any recomputation and precision; None:
    DENSE_MFU, or EXPERTS_MFU for a mixture of experts."""
    memory_share: float = 0.7
    """Share of the memory bandwidth that decoding reaches."""
    iteration_overhead_s: float = 0.004
    """Launches and reductions over tensor ranks in an iteration."""
    request_overhead_s: float = 5e-6
    """Sampling and scheduling per completion and iteration."""
    prefill_share: float = 0.5
    """Share of the bfloat16 peak that prefills reach."""
    bytes_per_s: float | None = None
    """Bandwidth of one rank in a weight sync; None: `sync_rate`."""
    reduce_bytes_per_s: float = 25e9
    """Bandwidth of a trainer rank for reducing gradients and gathering parameters."""
    turn_s: float = 1.0
    """Time for colocated engines to release their memory, and again to reclaim it."""
    pause_s: float = 0.1
    """Time of an engine's weight sync outside the transfer: pause, digests, resuming."""
    is_overlapped: bool = False
    """Overlap weight syncs with the next step, even without expert.weights.overlap."""
    verify_s: float = 0.1
    """Grading time of one completion."""
    verifier_servers: int | None = None
    """None: verifier.answers.workers per node of 8 GPUs."""
    deaths_per_engine_hour: float = 0.0
    restart_s: float = 300.0
    dead: int = 0


def cluster_model(config: Config, assumed: Assumptions) -> ClusterModel:
    """The cluster model of a configuration on these GPUs. Raises InputError."""
    if config.generator.colocate and not config.generator.release_memory:
        raise InputError(
            "generator.colocate=true needs generator.release_memory=true in a simulation: trainer "
            "and engines that compute on a GPU at the same time are not simulated. Set one or the "
            "other key"
        )
    shape = read_shape(config.model.path)
    check_parallel(shape, config.parallel)
    engine = _engine(shape, config, assumed)
    if assumed.dead >= config.generator.replicas:
        raise InputError(
            f"{assumed.dead} dead engines of generator.replicas={config.generator.replicas}: "
            "at least one must live"
        )
    gpus = config.parallel.world_size + config.generator.replicas * config.generator.tensor_parallel
    workers = config.verifier.answers.workers
    a_node = _NODE_WORKERS if workers == "auto" else workers
    servers = assumed.verifier_servers or a_node * -(-gpus // 8)
    return ClusterModel(
        engine=engine,
        trainer=_trainer(shape, config, assumed),
        sync=_sync(shape, config, assumed),
        verifier=VerifierModel(servers, (assumed.verify_s,)),
        faults=Faults(assumed.deaths_per_engine_hour, assumed.restart_s, assumed.dead),
        turns=Turns(assumed.turn_s, assumed.turn_s) if config.generator.release_memory else None,
    )


def kv_tokens_of(config: Config, assumed: Assumptions) -> int:
    """Tokens that an engine's KV cache could hold on these GPUs; 0: the weights do not fit."""
    gpu = find_gpu(assumed.gpu)
    memory = engine_memory(
        read_shape(config.model.path),
        config.generator,
        item_bytes=ITEM_BYTES[config.model.dtype],
        gpu_bytes=gpu.memory_bytes,
        communicators=engine_communicator_bytes(config, config.parallel.world_size),
    )
    return memory.kv_tokens


def _engine(shape: ModelShape, config: Config, assumed: Assumptions) -> EngineModel:
    """An iteration takes as long as reading all weights and the cache, or as the products.

    All weights: at 64 completions a mixture of 128 experts with 8 per token misses 2 % of them.
    """
    generator, peak = config.generator, find_gpu(assumed.gpu).bf16_flops
    ranks = generator.tensor_parallel
    item = ITEM_BYTES[config.model.dtype]
    rate = MEMORY_BYTES_PER_S[assumed.gpu] * assumed.memory_share
    weights = max(engine_rank_bytes(shape, generator, 1 if generator.quantization else item))
    read_s = weights / rate
    token_flops = product_flops(shape) + output_flops(shape)
    most_s = generator.max_running * token_flops / (ranks * peak * assumed.prefill_share)
    return EngineModel(
        base_s=read_s + assumed.iteration_overhead_s,
        # Linear between few completions and max_running.
        per_running_s=max(0.0, most_s - read_s) / generator.max_running
        + assumed.request_overhead_s,
        per_kv_token_s=kv_bytes_per_token(shape, ranks, item) / rate,
        prefill_s_per_token=token_flops / (ranks * peak * assumed.prefill_share),
        max_running=generator.max_running,
        kv_tokens=kv_tokens_of(config, assumed)
        if generator.takes_all_memory
        else generator.bounded_kv_tokens,
        recomputes_cache=config.weights.kv_cache == "recompute",
    )


def _trainer(shape: ModelShape, config: Config, assumed: Assumptions) -> TrainerModel:
    parallel = config.parallel
    replica = parallel.world_size // parallel.data
    mfu = assumed.mfu or (EXPERTS_MFU if shape.experts else DENSE_MFU)
    rate = replica * find_gpu(assumed.gpu).bf16_flops * mfu
    passes, full = 1 + BACKWARD, len(shape.full_layers)
    rank_parameters = model_parameters(shape) / (parallel.tensor * parallel.pipeline)
    if shape.experts:
        rank_parameters = model_parameters(shape) / max(parallel.expert, parallel.tensor)
    # Gradients in float32 one way, parameters in the model's precision the other.
    moved = rank_parameters * (4 + ITEM_BYTES[config.model.dtype])
    return TrainerModel(
        token_s=passes * (product_flops(shape) + output_flops(shape)) / rate,
        pair_s=passes * attention_flops(shape, 1, shape.layers - full) / rate,
        full_pair_s=passes * attention_flops(shape, 1, full) / rate,
        positions=config.train.microbatch_tokens if config.train.pad_microbatches else 0,
        filling_s=passes * product_flops(shape) / rate,
        optimizer_s=moved / assumed.reduce_bytes_per_s if parallel.data > 1 else 0.0,
        window=shape.sliding_window,
        stages=parallel.pipeline,
        virtual_stages=parallel.virtual_stages,
        ranks_meet=parallel.expert > parallel.tensor,
    )


def _sync(shape: ModelShape, config: Config, assumed: Assumptions) -> WeightSyncModel:
    cost = sync_cost(shape, config, bytes_per_s=assumed.bytes_per_s, fixed_s=assumed.pause_s)
    return WeightSyncModel(
        cost.whole_seconds,
        late_s=cost.one_s + assumed.pause_s,
        is_overlapped=assumed.is_overlapped or cost.is_overlapped,
    )
