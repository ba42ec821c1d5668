"""Memory of a trainer rank by purpose, and the rank that needs most. Pure.

Source of the bytes of weights, gradients and optimizer state: ZeRO (arXiv 1910.02054, section 3.1)
with Megatron's float32 gradient buffer: 2 + 4 + 4 + 8 in bf16, 4 + 4 + 8 in float32. Korthikanti et
al. (arXiv 2205.05198) leave them out.
"""

import math
from dataclasses import dataclass

from megatron_rl.config.gpus import GIB
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.plan.activations import (
    Microbatch,
    Recompute,
    activation_bytes,
    logits_bytes,
)
from megatron_rl.plan.communicators import trainer_communicator_bytes
from megatron_rl.plan.fp8 import COPY_BYTES, Fp8, fp8_of, quantized_elements
from megatron_rl.plan.padding import overlap_buffer_bytes
from megatron_rl.plan.parameters import (
    RankParameters,
    dense_shards,
    expert_shards,
    stage_parameters,
)
from megatron_rl.weights.layout.shape import ModelShape

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in float32."""
MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments, float32."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank."""

    weights: int
    gradients: int
    masters: int
    """float32 copies of bf16 parameters; float32 parameters are their own."""
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.masters + self.moments


def state_bytes(
    parameters: RankParameters,
    parallel: ParallelConfig,
    *,
    item_bytes: int,
    fp8_elements: int = 0,
    keeps_fp8_alone: bool = False,
    is_offloaded: bool = False,
) -> StateBytes:
    """What a rank holds between steps.

    item_bytes: of a parameter. fp8_elements: parameters with codes in FP8; keeps_fp8_alone: in the
    place of the parameter. is_offloaded: masters and moments are in host memory.
    """
    sharded = -(-parameters.dense // dense_shards(parallel))
    sharded += -(-parameters.expert // expert_shards(parallel))
    on_device = 0 if is_offloaded else sharded
    plain = parameters.total - (fp8_elements if keeps_fp8_alone else 0)
    return StateBytes(
        weights=plain * item_bytes + fp8_elements * COPY_BYTES,
        gradients=parameters.total * GRADIENT_BYTES,
        masters=on_device * MASTER_BYTES if item_bytes < MASTER_BYTES else 0,
        moments=on_device * MOMENT_BYTES,
    )


ITEM_BYTES = {"bfloat16": 2, "float32": 4}
RESERVE_BYTES = 4 * GIB
"""An allowance: CUDA context, buffers of cuBLAS and of training's NCCL groups, fragmentation."""


@dataclass(frozen=True)
class TrainerSetting:
    """What the memory of a trainer rank depends on, beside the model."""

    parallel: ParallelConfig
    microbatch: Microbatch
    item_bytes: int
    """Of a parameter and of an activation."""
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    sync_buffer_bytes: int = 0
    communicator_bytes: int = 0
    """Of a weight sync, if the rank sends to every rank of an engine."""
    dequantises: bool = False
    """A weight sync holds parameters in the compute dtype beside those in FP8; taken to be all."""
    logprob_chunk_tokens: int | None = None
    """Rows of logits that exist at once; None: those of a whole microbatch."""
    compares_vocabularies: bool = False
    """The reference's output layer and what goes into it lie beside the policy's."""
    fp8: Fp8 | None = None
    is_offloaded: bool = False
    """Optimizer state is in host memory."""
    has_fused_units: bool = False
    """Gated MLPs are one kernel (`expert.model.fusions`)."""
    overlap_bytes_per_hidden: int = 0
    """Of the buffers of expert.parallel.overlap_tensor, for each element of a hidden state."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each rank of one pipeline stage."""

    stage: int
    parameters: int
    """Elements, not bytes."""
    states: StateBytes
    activations: int
    """Kept for the backward passes of all layers."""
    backward: int
    """Recomputed activations and gradients during the backward pass of one layer."""
    logits: int
    """Freed before the backward passes of the layers."""
    sync_buffers: int
    overlap_buffers: int = 0
    """Of expert.parallel.overlap_tensor."""
    communicators: int = 0
    """Of a weight sync, at most."""
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        """The peak, as a sum of parts that are not all at theirs at once."""
        return self.tensors + self.communicators + self.reserve

    @property
    def tensors(self) -> int:
        """Of these, what torch allocates."""
        return self.states.total + self.passes + self.sync_buffers + self.overlap_buffers

    @property
    def passes(self) -> int:
        """Of a forward and backward pass."""
        return self.activations + max(self.backward, self.logits)


def setting_of(config: Config, mean_tokens: int) -> TrainerSetting:
    """The setting of a configuration whose sequences have mean_tokens on average."""
    train = config.train
    tokens = train.prompts_per_batch * train.group_size * mean_tokens
    # A sequence over the budget is a microbatch of its own (protocol/packing.py).
    budget = max(train.microbatch_tokens, config.generator.context_tokens)
    passes = tokens / (train.minibatches * config.parallel.data * train.microbatch_tokens)
    return TrainerSetting(
        parallel=config.parallel,
        microbatch=Microbatch(budget, max(1, math.ceil(passes))),
        item_bytes=ITEM_BYTES[config.model.dtype],
        recompute=config.model.recompute,
        recompute_modules=config.model.recompute_modules,
        sync_buffer_bytes=_sync_buffer_bytes(config),
        communicator_bytes=trainer_communicator_bytes(config, config.generator.tensor_parallel),
        dequantises=config.model.fp8_parameters,
        logprob_chunk_tokens=config.train.logprob_chunk_tokens,
        compares_vocabularies=config.algorithm.kl.is_exact,
        fp8=fp8_of(config.model, ITEM_BYTES[config.model.dtype]),
        is_offloaded=config.optimizer.offload,
        has_fused_units=_fuses_units(config.model),
        overlap_bytes_per_hidden=overlap_buffer_bytes(config.model, config.parallel, budget),
    )


def _sync_buffer_bytes(config: Config) -> int:
    """Two rounds of a weight sync are in flight (docs/weights.md), under folder in files.

    Each engine rank gets at most a bucket in a round, and the ranks of a stage share the sending.
    """
    if config.weights.method == "folder":
        return 0
    stage_ranks = config.parallel.world_size // config.parallel.pipeline
    rounds = 2 * config.weights.bucket_bytes
    return min(rounds, rounds * config.generator.tensor_parallel // stage_ranks)


def _fuses_units(model: ModelConfig) -> bool:
    """As `backend/fusions.py` decides on a CUDA host with TransformerEngine."""
    return model.layers != "local" and (model.fusions == "auto" or "swiglu" in model.fusions)


def rank_memory(shape: ModelShape, setting: TrainerSetting, stage: int) -> RankMemory:
    """Memory of a rank of pipeline stage `stage`; its tensor and data ranks are alike."""
    parallel = setting.parallel
    parameters = stage_parameters(shape, parallel, stage)
    logits = 0
    if stage == parallel.pipeline - 1:
        rows = setting.microbatch.tokens // parallel.context
        columns = shape.padded_vocab(parallel.tensor) // parallel.tensor
        logits = logits_bytes(rows, columns, setting.logprob_chunk_tokens)
        if setting.compares_vocabularies:
            logits += (rows + columns) * shape.hidden * setting.item_bytes
    activations = activation_bytes(
        shape,
        parallel,
        setting.microbatch,
        stage=stage,
        item_bytes=setting.item_bytes,
        recompute=setting.recompute,
        modules=setting.recompute_modules,
        is_fused=setting.has_fused_units,
        fp8=setting.fp8,
    )
    return RankMemory(
        stage=stage,
        parameters=parameters.total,
        states=state_bytes(
            parameters,
            parallel,
            item_bytes=setting.item_bytes,
            fp8_elements=quantized_elements(shape, parallel, stage, setting.fp8),
            keeps_fp8_alone=setting.dequantises,
            is_offloaded=setting.is_offloaded,
        ),
        activations=activations.kept,
        backward=activations.backward,
        logits=logits,
        sync_buffers=setting.sync_buffer_bytes
        + setting.dequantises * parameters.total * setting.item_bytes,
        overlap_buffers=setting.overlap_bytes_per_hidden * shape.hidden,
        communicators=setting.communicator_bytes,
    )


def fullest_rank(shape: ModelShape, setting: TrainerSetting) -> RankMemory:
    """Memory of the rank that needs most; of several, the one of the earliest stage."""
    stages = range(setting.parallel.pipeline)
    return max((rank_memory(shape, setting, stage) for stage in stages), key=lambda m: m.total)
