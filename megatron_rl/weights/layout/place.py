"""Where a rank stands among those that divide a model, and one parameter that they divide.

Used by trainer ranks and conversions; pure functions of sizes, which need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.parallel import stage_layers
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Layout, Piece, Share

if TYPE_CHECKING:
    from megatron_rl.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Place:
    """Position of a rank among the ranks that divide the model."""

    tensor: Share = Share()
    pipeline: Share = Share()
    expert: Share = Share()
    expert_tensor: Share = Share()
    chunks: int = 1
    """Chunks of the model on each stage, with equal numbers of layers."""
    ends: tuple[int, int] = (0, 0)
    """Layers of the first and of the last stage; 0: as in the stages between them."""

    def layers(self, count: int) -> list[int]:
        """The layers of the rank, of `count`, in the order of its chunks.

        The stages' first chunks come before all second ones, as in the interleaved schedule.
        Source: arXiv 2104.04473, section 2.2.
        """
        if any(self.ends):
            sizes = stage_layers(count, self.pipeline.size, *self.ends)
            first = sum(sizes[: self.pipeline.rank])
            return list(range(first, first + sizes[self.pipeline.rank]))
        # Part p of the model is chunk p // stages of stage p % stages.
        stage, parts = self.pipeline, self.pipeline.size * self.chunks
        firsts = range(stage.rank, parts, stage.size)
        return [layer for part in firsts for layer in Share(part, parts).of(count)]


def like_of(parallel: ParallelConfig) -> Place:
    """Place of rank 0 of a trainer that is not running; its shares have the sizes of all."""
    return Place(
        Share(0, parallel.tensor),
        Share(0, parallel.pipeline),
        Share(0, parallel.expert),
        Share(0, parallel.expert_tensor),
        parallel.virtual_stages,
        (parallel.first_stage_layers, parallel.last_stage_layers),
    )


def place_of(rank: int, world_size: int, like: Place) -> Place:
    """Place of a world rank among shares of the sizes of `like`.

    Megatron's order "tp-cp-ep-dp-pp": tensor ranks stand next to each other, stages farthest apart.
    Experts divide the ranks of a stage anew, those that share one next to each other.
    """
    # Context and data ranks hold the same parameters, so neither appears in a place.
    stage_ranks = world_size // like.pipeline.size
    inside = rank % stage_ranks
    return Place(
        Share(inside % like.tensor.size, like.tensor.size),
        Share(rank // stage_ranks, like.pipeline.size),
        Share(inside // like.expert_tensor.size % like.expert.size, like.expert.size),
        Share(inside % like.expert_tensor.size, like.expert_tensor.size),
        like.chunks,
        like.ends,
    )


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    Names hold `{layer}`, counted over all chunks of the rank, and those of experts `{expert}`,
    counted from the rank's first. Experts have separate tensor ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    hf_shapes: Callable[[ModelShape], list[tuple[int, ...]]]
    is_trained: bool = True
    """False: a float32 buffer, in folders and checkpoints but in no weight sync."""

    @property
    def is_expert(self) -> bool:
        """Whether each expert of a layer has this parameter."""
        return "{expert}" in self.megatron

    def pieces(self, shape: ModelShape, place: Place) -> list[Piece]:
        """The pieces of the rank's parameter."""
        # A vector counts as a matrix of one column: see `slices.py`.
        sizes = [(size[0], size[1] if len(size) > 1 else 1) for size in self.hf_shapes(shape)]
        return self.layout(sizes, place.expert_tensor if self.is_expert else place.tensor, shape)
