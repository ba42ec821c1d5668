"""`megatron-rl plan-weights CONFIG`: bytes of a weight sync between ranks.

It makes the trainer's plan from sizes, without weights, device or other process.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.plan.plan import Hardware
from megatron_rl.plan.trainer_memory import ITEM_BYTES
from megatron_rl.plan.weight_sync import (
    PAPER_WEIGHT_SYNC_S,
    WeightSyncCost,
    sync_cost,
    sync_rate,
)
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.layout.copies import model_copies, places_of, turns_before
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes
from megatron_rl.weights.sync.relays import Bindings

SHOWN_RANKS = 16


@dataclass(frozen=True)
class Forecast:
    """One weight sync to all generators, in bytes."""

    sent: tuple[int, ...]
    """By trainer rank."""
    received: tuple[int, ...]
    """By rank of each engine."""
    model_bytes: int
    rounds: int
    """Rounds of each engine's exchange."""
    peak_bytes: int
    """Maximum memory of a rank in one exchange, without its parameters."""
    bucket_bytes: int
    direct: int
    """Number of engines that the trainer serves directly."""
    cost: WeightSyncCost

    @property
    def spread_bytes(self) -> int:
        """Difference of the largest and the smallest sender."""
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
    table.add_row("trainer ranks send", f"{_megabytes(total)}, {ratio}")
    cost = found.cost
    served = f"serving {cost.turns} engines each"
    if config.weights.method == "host":
        served = f"serving {-(-config.generator.replicas // cost.copies)} engines each at once"
    table.add_row("copies of the trainer's model", f"{cost.copies}, {served}")
    if cost.is_relayed:
        table.add_row("engines that engines serve", str(config.generator.replicas - found.direct))
    table.add_row("ranks of a process group", str(cost.group_ranks))
    table.add_row("rounds of each engine", str(found.rounds))
    share = f"{found.peak_bytes / found.bucket_bytes:.2f} times expert.weights.bucket_bytes"
    table.add_row("memory of a rank, at most", f"{_megabytes(found.peak_bytes)}, {share}")
    table.add_row(
        "a weight sync takes",
        f"{cost.whole_seconds:.2f} s; the paper: under {PAPER_WEIGHT_SYNC_S:g} s",
    )
    if cost.is_overlapped:
        table.add_row("the trainer meanwhile", "computes the next step, up to its optimizer")
    rate = f"{sync_rate(config.weights) / 1e9:g} GB/s a rank"
    way = "by way of host memory" if config.weights.method == "host" else "over NCCL"
    table.add_row("its transfers", f"{cost.seconds:.2f} s {way} at {rate}")
    table.add_row("by the senders' bandwidth alone", f"{cost.least_seconds:.2f} s")
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
    """The forecast of a configuration. Raises InputError for impossible sizes."""
    shape = read_shape(config.model.path)
    check_parallel(shape, config.parallel)
    itemsize = ITEM_BYTES[config.model.dtype]
    copies = model_copies(shape, places_of(config.parallel))
    receivers = _receivers(shape, config, len(copies.slices))
    plan = _plan(dict(enumerate(copies.slices)), receivers, itemsize, config.weights.bucket_bytes)
    bindings = Bindings(len(copies.ranks))
    bindings.bind([f"generator-{number}" for number in range(config.generator.replicas)])
    served = Counter(bindings.of.values())
    if config.weights.relay:
        # In each of its turns a copy serves one engine of the relay tree.
        served = Counter({copy: turns_before(places) for copy, places in served.items()})
    sent, received = plan.sent_bytes(), plan.received_bytes()
    by_rank = {
        rank: served[number] * sent.get(place, 0)
        for number, ranks in enumerate(copies.ranks)
        for place, rank in enumerate(ranks)
    }
    return Forecast(
        sent=tuple(by_rank[rank] for rank in range(config.parallel.world_size)),
        received=tuple(received[rank] for rank in sorted(receivers)),
        model_bytes=itemsize * sum(math.prod(size) for size in hf_shapes(shape).values()),
        rounds=len(plan.rounds),
        peak_bytes=plan.peak_bytes(),
        bucket_bytes=config.weights.bucket_bytes,
        direct=served.total(),
        cost=sync_cost(
            shape,
            config.generator,
            config.weights,
            copies=copies.ranks,
            item_bytes=itemsize,
            turn_s=Hardware.turn_s,
        ),
    )


def _receivers(shape: ModelShape, config: Config, first: int) -> dict[int, list[Slice]]:
    ranks = config.generator.tensor_parallel
    if config.generator.engine == "hf":
        return {first: hf_slices(shape)}
    try:
        expert = config.generator.expert_parallel
        return {
            first + rank: engine_slices(shape, Share(rank, ranks), expert_parallel=expert)
            for rank in range(ranks)
        }
    except ValueError as error:
        raise InputError(f"generator.tensor_parallel = {ranks} is not possible: {error}") from error


def _plan(
    senders: dict[int, list[Slice]],
    receivers: dict[int, list[Slice]],
    itemsize: int,
    bucket_bytes: int,
) -> Plan:
    try:
        return make_plan(senders, receivers, itemsize=itemsize, bucket_bytes=bucket_bytes)
    except ValueError as error:
        raise InputError(
            f"expert.weights.bucket_bytes = {bucket_bytes} is not possible: {error}"
        ) from error


def _range(sizes: Sequence[int]) -> str:
    return f"{_megabytes(min(sizes))}, {_megabytes(max(sizes))}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f} MB"
