"""How many parameters a trainer rank holds. Pure."""

from dataclasses import dataclass

from megatron_rl.plan.division import Division
from megatron_rl.weights.layout.shape import ModelShape


@dataclass(frozen=True)
class RankParameters:
    """Elements on one rank; vocabulary padding is included."""

    dense: int
    """Outside experts: replicated over data-parallel and context-parallel ranks."""
    expert: int
    """Of experts: replicated over the ranks of a stage that hold the same experts."""

    @property
    def total(self) -> int:
        """All elements."""
        return self.dense + self.expert


def stage_parameters(shape: ModelShape, division: Division, stage: int) -> RankParameters:
    """Parameters of each rank of pipeline stage `stage`.

    A tied output matrix on the last of several stages is a copy of the embedding.
    """
    layers = division.stage_layers(shape.layers, stage)
    vocabulary = shape.padded_vocab(division.tensor) // division.tensor * shape.hidden
    is_first, is_last = stage == 0, stage == division.pipeline - 1
    dense = layers * _dense_layer(shape, division.tensor)
    dense += is_first * vocabulary
    if is_last:
        dense += shape.hidden
        dense += 0 if shape.is_tied and is_first else vocabulary
    experts = shape.experts // division.expert * expert_parameters(shape) // division.expert_tensor
    return RankParameters(dense, layers * experts)


def _dense_layer(shape: ModelShape, tensor: int) -> int:
    """Elements of one layer on one rank, without experts."""
    divided = attention_parameters(shape)
    if shape.has_qkv_bias:
        divided += shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    whole = 2 * shape.hidden
    if shape.has_qk_norm:
        whole += 2 * shape.head_dim
    if shape.experts:
        whole += shape.experts * shape.hidden
    else:
        divided += 3 * shape.hidden * shape.ffn
    return divided // tensor + whole


def attention_parameters(shape: ModelShape) -> int:
    """Elements of the four projections of one layer."""
    return shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)


def expert_parameters(shape: ModelShape) -> int:
    """Elements of one expert of one layer; 0 without experts."""
    return 3 * shape.hidden * shape.moe_ffn


def model_parameters(shape: ModelShape) -> int:
    """Elements of the whole model, without vocabulary padding."""
    padding = (shape.padded_vocab(1) - shape.vocab) * shape.hidden * (1 if shape.is_tied else 2)
    return stage_parameters(shape, Division(), 0).total - padding


def active_parameters(shape: ModelShape) -> int:
    """Elements that take part in one token: all but the experts that were not chosen."""
    idle = shape.experts - shape.experts_per_token
    return model_parameters(shape) - shape.layers * idle * expert_parameters(shape)
