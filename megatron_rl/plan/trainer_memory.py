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
from megatron_rl.plan.activations import Microbatch, activation_bytes, logits_bytes
from megatron_rl.plan.communicators import trainer_communicator_bytes
from megatron_rl.plan.fp8 import COPY_BYTES, fp8_of, quantized_elements
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


def microbatch_of(config: Config, mean_tokens: int) -> Microbatch:
    """The microbatches of a configuration whose sequences have mean_tokens on average."""
    train = config.train
    tokens = train.prompts_per_batch * train.group_size * mean_tokens
    # A sequence over the budget is a microbatch of its own (protocol/packing.py).
    budget = max(train.microbatch_tokens, config.generator.context_tokens)
    passes = tokens / (train.minibatches * config.parallel.data * train.microbatch_tokens)
    return Microbatch(budget, max(1, math.ceil(passes)))


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


def rank_memory(
    shape: ModelShape, config: Config, microbatch: Microbatch, stage: int
) -> RankMemory:
    """Memory of a rank of pipeline stage `stage`; its tensor and data ranks are alike."""
    model, parallel, item_bytes = config.model, config.parallel, ITEM_BYTES[config.model.dtype]
    parameters, fp8 = stage_parameters(shape, parallel, stage), fp8_of(model, item_bytes)
    logits = 0
    if stage == parallel.pipeline - 1:
        rows = microbatch.tokens // parallel.context
        columns = shape.padded_vocab(parallel.tensor) // parallel.tensor
        logits = logits_bytes(rows, columns, config.train.logprob_chunk_tokens)
        if config.algorithm.kl.is_exact:
            # The reference has its own output layer and hidden states, next to the policy's.
            logits += (rows + columns) * shape.hidden * item_bytes
    activations = activation_bytes(
        shape,
        parallel,
        microbatch,
        stage=stage,
        item_bytes=item_bytes,
        recompute=model.recompute,
        modules=model.recompute_modules,
        is_fused=_fuses_units(model),
        fp8=fp8,
    )
    # A weight sync holds FP8 parameters in the compute dtype, too; all of them are counted.
    dequantised = model.fp8_parameters * parameters.total * item_bytes
    return RankMemory(
        stage=stage,
        parameters=parameters.total,
        states=state_bytes(
            parameters,
            parallel,
            item_bytes=item_bytes,
            fp8_elements=quantized_elements(shape, parallel, stage, fp8),
            keeps_fp8_alone=model.fp8_parameters,
            is_offloaded=config.optimizer.offload,
        ),
        activations=activations.kept,
        backward=activations.backward,
        logits=logits,
        sync_buffers=_sync_buffer_bytes(config) + dequantised,
        overlap_buffers=overlap_buffer_bytes(model, parallel, microbatch.tokens) * shape.hidden,
        # If the rank sends to every rank of an engine.
        communicators=trainer_communicator_bytes(config, config.generator.tensor_parallel),
    )


def fullest_rank(shape: ModelShape, config: Config, mean_tokens: int) -> RankMemory:
    """Memory of the rank that needs most; of several, the one of the earliest stage."""
    microbatch = microbatch_of(config, mean_tokens)
    ranks = (rank_memory(shape, config, microbatch, n) for n in range(config.parallel.pipeline))
    return max(ranks, key=lambda memory: memory.total)
