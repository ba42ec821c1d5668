"""What both ends of a weight sync know of each other, so that both compute the same plan.

Used by trainer ranks and engine ranks; pure. A `Layouts` has a few hundred bytes, whatever the size
of the model: rank 0 puts it into the store, the plan itself travels nowhere.
"""

import functools
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from megatron_rl.protocol.types import Hello
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.layout.engine_layout import (
    engine_slices,
    expert_place,
    hf_slices,
    trained_parameters,
)
from megatron_rl.weights.layout.place import Place, place_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import trained_slices

T = TypeVar("T")


class EngineKind(msgspec.Struct, frozen=True):
    """All on which the slices of an engine depend; see `Hello` for the fields."""

    engine: str
    world_size: int
    ffn_multiple: int = 1
    expert_parallel: int = 1

    def slices(self, shape: ModelShape, rank: int) -> list[Slice]:
        """Slices of one rank. Raises ValueError for ranks that do not divide the model."""
        if self.engine == "hf":
            return hf_slices(shape)
        return engine_slices(
            shape,
            Share(rank, self.world_size),
            expert_parallel=self.expert_parallel,
            ffn_multiple=self.ffn_multiple,
        )

    def trained(self, shape: ModelShape, rank: int, parameters: Mapping[str, T]) -> dict[str, T]:
        """Those parameters of one rank that its slices cover."""
        place = expert_place(Share(rank, self.world_size), self.expert_parallel)
        return trained_parameters(shape, parameters, place)


def kind_of(hello: Hello) -> EngineKind:
    """Kind of a generator's engine."""
    return EngineKind(
        hello.engine, hello.world_size, hello.ffn_multiple, hello.expert_parallel
    )  # fmt: skip


class Layouts(msgspec.Struct, frozen=True):
    """How trainer and engines of one kind divide the model, and how it is cut for transport."""

    shape: ModelShape
    like: Place
    """Place of any trainer rank: its shares have the sizes of all."""
    trainer_ranks: int
    kind: EngineKind
    itemsize: int
    """Bytes of an element on the wire."""
    bucket_bytes: int

    def plan(self) -> Plan:
        """The plan; rank r of each engine is receiver `trainer_ranks + r`. Raises ValueError."""
        return _plan_of(self)


@functools.lru_cache(maxsize=4)
def _plan_of(layouts: Layouts) -> Plan:
    shape, trainers = layouts.shape, layouts.trainer_ranks
    senders = {
        rank: trained_slices(shape, place_of(rank, trainers, layouts.like))
        for rank in range(trainers)
    }
    receivers = {
        trainers + rank: layouts.kind.slices(shape, rank) for rank in range(layouts.kind.world_size)
    }
    return make_plan(
        senders, receivers, itemsize=layouts.itemsize, bucket_bytes=layouts.bucket_bytes
    )
