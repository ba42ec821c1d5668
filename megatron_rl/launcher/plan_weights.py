"""`megatron-rl plan-weights CONFIG`: what a publish will move between which ranks.

The plan is that of the trainer, made from sizes alone: no weights, device or other process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.sizing.trainer_memory import ITEM_BYTES
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape
from megatron_rl.weights.layout.slices import Slice
from megatron_rl.weights.layout.tensor_shards import Share
from megatron_rl.weights.layout.trainer_layout import Place, hf_shapes, place_of, trainer_slices

SHOWN_RANKS = 16


@dataclass(frozen=True)
class Forecast:
    """One publish to all generators, in bytes."""

    sent: tuple[int, ...]
    """By trainer rank."""
    received: tuple[int, ...]
    """By rank of each engine."""
    model_bytes: int
    rounds: tuple[int, ...]
    """By engine."""
    peak_bytes: int
    """Most memory of any rank beside its parameters."""
    bucket_bytes: int

    @property
    def spread_bytes(self) -> int:
        """By how much the senders differ."""
        return max(self.sent) - min(self.sent)


def plan_weights(config: Config, console: Console) -> None:
    """Print the forecast of a configuration. Raises InputError."""
    found = forecast(config)
    table = Table("quantity", "value")
    table.add_row("model", _megabytes(found.model_bytes))
    table.add_row("a trainer rank sends, least and most", _range(found.sent))
    table.add_row("an engine rank receives, least and most", _range(found.received))
    total = sum(found.sent)
    ratio = f"{total / found.model_bytes:.3f} times the model"
    table.add_row("all ranks send", f"{_megabytes(total)}, {ratio}")
    table.add_row("rounds of each engine", ", ".join(map(str, found.rounds)))
    share = f"{found.peak_bytes / found.bucket_bytes:.2f} times weights.bucket_bytes"
    table.add_row("memory of a rank, at most", f"{_megabytes(found.peak_bytes)}, {share}")
    console.print(table, markup=False)
    if len(found.sent) <= SHOWN_RANKS:
        for rank, size in enumerate(found.sent):
            console.print(f"trainer rank {rank} sends {_megabytes(size)}", highlight=False)
    if found.spread_bytes > found.bucket_bytes:
        console.print(
            f"warning: trainer ranks differ by {_megabytes(found.spread_bytes)}, more than a "
            f"bucket of {_megabytes(found.bucket_bytes)}: the slowest sets the pace",
            highlight=False,
        )


def forecast(config: Config) -> Forecast:
    """What a publish of this configuration moves. Raises InputError for impossible sizes."""
    shape = read_shape(config.model.path)
    check_parallel(shape, config.parallel)
    itemsize = ITEM_BYTES[config.model.dtype]
    senders = _senders(shape, config)
    receivers = _receivers(shape, config)
    loads: dict[int, int] = {}
    plans = [
        _plan(senders, receivers, itemsize, config.weights.bucket_bytes, loads)
        for _ in range(config.generator.replicas)
    ]
    received = plans[0].received_bytes()
    return Forecast(
        sent=tuple(loads.get(rank, 0) for rank in senders),
        received=tuple(received[rank] for rank in sorted(receivers)),
        model_bytes=itemsize * sum(math.prod(size) for size in hf_shapes(shape).values()),
        rounds=tuple(len(plan.rounds) for plan in plans),
        peak_bytes=max(plan.peak_bytes() for plan in plans),
        bucket_bytes=config.weights.bucket_bytes,
    )


def _senders(shape: ModelShape, config: Config) -> dict[int, list[Slice]]:
    parallel = config.parallel
    like = Place(
        Share(0, parallel.tensor),
        Share(0, parallel.pipeline),
        Share(0, parallel.expert),
        Share(0, parallel.expert_tensor),
        parallel.virtual_stages,
    )
    ranks = range(parallel.world_size)
    return {rank: trainer_slices(shape, place_of(rank, len(ranks), like)) for rank in ranks}


def _receivers(shape: ModelShape, config: Config) -> dict[int, list[Slice]]:
    first, ranks = config.parallel.world_size, config.generator.tensor_parallel
    if config.generator.engine == "hf":
        return {first: hf_slices(shape)}
    try:
        return {first + rank: engine_slices(shape, Share(rank, ranks)) for rank in range(ranks)}
    except ValueError as error:
        raise InputError(f"generator.tensor_parallel = {ranks} is not possible: {error}") from error


def _plan(
    senders: dict[int, list[Slice]],
    receivers: dict[int, list[Slice]],
    itemsize: int,
    bucket_bytes: int,
    loads: dict[int, int],
) -> Plan:
    try:
        return make_plan(
            senders, receivers, itemsize=itemsize, bucket_bytes=bucket_bytes, loads=loads
        )
    except ValueError as error:
        raise InputError(f"weights.bucket_bytes = {bucket_bytes} is not possible: {error}") from (
            error
        )


def _range(sizes: Sequence[int]) -> str:
    return f"{_megabytes(min(sizes))}, {_megabytes(max(sizes))}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f} MB"
