"""Parameters of each trainer rank, and among how many ranks what is divided. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.weights.layout.place import like_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share


def stage_kinds(
    shape: ModelShape, parallel: ParallelConfig, stage: int, within: Collection[int] | None = None
) -> list[tuple[ModelShape, int]]:
    """`ModelShape.kinds` of a pipeline stage: of all its layers, or of those in `within`."""
    place = replace(like_of(parallel), pipeline=Share(stage, parallel.pipeline))
    layers = place.layers(shape.layers)
    return shape.kinds([n for n in layers if within is None or n in within])


def dense_shards(parallel: ParallelConfig) -> int:
    """Ranks over which the optimizer state of parameters outside experts is divided."""
    return parallel.data * parallel.context if parallel.distributed_optimizer else 1


def expert_shards(parallel: ParallelConfig) -> int:
    """As `dense_shards` for experts: ranks of a stage that hold the same experts."""
    sharing = parallel.tensor * parallel.data * parallel.context
    sharing //= parallel.expert * parallel.expert_tensor
    return sharing if parallel.distributed_optimizer else 1


def sequence_shards(parallel: ParallelConfig) -> int:
    """Tensor ranks over which tokens are divided outside attention and MLP."""
    return parallel.tensor if parallel.divides_positions else 1


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


def stage_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int) -> RankParameters:
    """Parameters of each rank of pipeline stage `stage`.

    A tied output matrix on the last of several stages is a copy of the embedding.
    """
    kinds = stage_kinds(shape, parallel, stage)
    vocabulary = shape.padded_vocab(parallel.tensor) // parallel.tensor * shape.hidden
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    dense = sum(count * _dense_layer(kind, parallel.tensor) for kind, count in kinds)
    dense += is_first * vocabulary
    if is_last:
        dense += shape.hidden
        dense += 0 if shape.is_tied and is_first else vocabulary
    experts = shape.experts // parallel.expert * expert_parameters(shape) // parallel.expert_tensor
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
    return stage_parameters(shape, ParallelConfig(), 0).total - padding


def active_parameters(shape: ModelShape) -> int:
    """Elements used for one token: all but the unchosen experts."""
    idle = (shape.experts - shape.experts_per_token) * (shape.layers - shape.dense_layers)
    return model_parameters(shape) - idle * expert_parameters(shape)
