"""Division of the model among trainer ranks, and parameters of each rank. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share


@dataclass(frozen=True)
class Division:
    """Ranks along each dimension, and the sharding."""

    tensor: int = 1
    pipeline: int = 1
    ends: tuple[int, int] = (0, 0)
    """Layers of the first and the last stage; 0: as in the stages between them."""
    virtual_stages: int = 1
    """Chunks of layers on each pipeline rank."""
    data: int = 1
    context: int = 1
    """Ranks that share the tokens of a sequence."""
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that share one expert."""
    is_sequence_parallel: bool = False
    is_optimizer_sharded: bool = False
    """Megatron's distributed optimizer."""

    def stage_kinds(
        self, shape: ModelShape, stage: int, within: Collection[int] | None = None
    ) -> list[tuple[ModelShape, int]]:
        """`ModelShape.kinds` of a pipeline stage: of all its layers, or of those in `within`."""
        place = Place(
            pipeline=Share(stage, self.pipeline), chunks=self.virtual_stages, ends=self.ends
        )
        layers = place.layers(shape.layers)
        return shape.kinds([n for n in layers if within is None or n in within])

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def dense_shards(self) -> int:
        """Ranks over which the optimizer state of parameters outside experts is divided."""
        return self.data * self.context if self.is_optimizer_sharded else 1

    @property
    def expert_shards(self) -> int:
        """As `dense_shards` for experts: ranks of a stage that hold the same experts."""
        if not self.is_optimizer_sharded:
            return 1
        return self.tensor * self.data * self.context // (self.expert * self.expert_tensor)

    @property
    def sequence_shards(self) -> int:
        """Tensor ranks over which tokens are divided outside attention and MLP."""
        return self.tensor if self.is_sequence_parallel else 1


def division_of(parallel: ParallelConfig) -> Division:
    """The division of a configuration."""
    return Division(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        ends=(parallel.first_stage_layers, parallel.last_stage_layers),
        virtual_stages=parallel.virtual_stages,
        data=parallel.data,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        is_sequence_parallel=parallel.divides_positions,
        is_optimizer_sharded=parallel.distributed_optimizer,
    )


@dataclass(frozen=True)
class RankParameters:
    """Elements on one rank; vocabulary padding is included."""

    dense: int
    """Parameters outside experts, replicated over data-parallel and context-parallel ranks."""
    expert: int
    """Parameters of experts, replicated over the ranks of a stage with the same experts."""

    @property
    def total(self) -> int:
        """All elements."""
        return self.dense + self.expert


def stage_parameters(shape: ModelShape, division: Division, stage: int) -> RankParameters:
    """Parameters of each rank of pipeline stage `stage`.

    A tied output matrix on the last of several stages is a copy of the embedding.
    """
    kinds = division.stage_kinds(shape, stage)
    vocabulary = shape.padded_vocab(division.tensor) // division.tensor * shape.hidden
    is_first, is_last = stage == 0, stage == division.pipeline - 1
    dense = sum(count * _dense_layer(kind, division.tensor) for kind, count in kinds)
    dense += is_first * vocabulary
    if is_last:
        dense += shape.hidden
        dense += 0 if shape.is_tied and is_first else vocabulary
    experts = shape.experts // division.expert * expert_parameters(shape) // division.expert_tensor
    return RankParameters(dense, sum(count for kind, count in kinds if kind.experts) * experts)


def _dense_layer(shape: ModelShape, tensor: int) -> int:
    """Elements of one layer on one rank, without the experts that a router chooses."""
    divided = attention_parameters(shape) - latent_parameters(shape)
    if shape.has_qkv_bias:
        divided += shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    divided += shape.heads * shape.has_sinks
    whole = 2 * shape.hidden + latent_parameters(shape)
    if shape.kv_rank:
        whole += shape.q_rank + shape.kv_rank
    if shape.norms_all_heads:
        divided += shape.head_dim * (shape.heads + shape.kv_heads)
    elif shape.has_qk_norm:
        whole += 2 * shape.head_dim
    if shape.has_biases:
        whole += shape.hidden
    if shape.experts:
        whole += shape.experts * (shape.hidden + shape.is_router_corrected + shape.has_biases)
        divided += 3 * shape.hidden * shape.shared_ffn
    else:
        divided += 3 * shape.hidden * shape.ffn
    return divided // tensor + whole


def attention_parameters(shape: ModelShape) -> int:
    """Elements of the projections of one layer."""
    if shape.kv_rank:
        queries = (shape.q_rank or shape.hidden) * shape.head_dim
        keys_and_values = shape.kv_rank * (shape.nope_dim + shape.value_dim)
        each_head = queries + keys_and_values + shape.value_dim * shape.hidden
        return latent_parameters(shape) + shape.heads * each_head
    return shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)


def latent_parameters(shape: ModelShape) -> int:
    """Elements of one layer's projections to latents, which every tensor rank has whole."""
    return shape.hidden * (shape.q_rank + shape.latent_dim) if shape.kv_rank else 0


def expert_parameters(shape: ModelShape) -> int:
    """Elements of one expert of one layer; 0 without experts."""
    biases = (2 * shape.moe_ffn + shape.hidden) * shape.has_biases
    return 3 * shape.hidden * shape.moe_ffn + biases


def model_parameters(shape: ModelShape) -> int:
    """Elements of the whole model, without vocabulary padding."""
    padding = (shape.padded_vocab(1) - shape.vocab) * shape.hidden * (1 if shape.is_tied else 2)
    return stage_parameters(shape, Division(), 0).total - padding


def active_parameters(shape: ModelShape) -> int:
    """Elements used for one token: all but the unchosen experts."""
    idle = (shape.experts - shape.experts_per_token) * (shape.layers - shape.dense_layers)
    return model_parameters(shape) - idle * expert_parameters(shape)
