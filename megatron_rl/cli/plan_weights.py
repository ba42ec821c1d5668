"""`megatron-rl plan-weights CONFIG`: bytes of a weight sync between ranks.

It makes the trainer's plan from sizes, without weights, device or other process.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.printing import show_table
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.plan.communicators import (
    INIT_S,
    INIT_S_PER_RANK,
    Communicators,
    find_communicators,
)
from megatron_rl.plan.plan import Hardware
from megatron_rl.plan.trainer_memory import ITEM_BYTES
from megatron_rl.plan.weight_sync import PAPER_WEIGHT_SYNC_S, WeightSyncCost, sync_cost, sync_rate
from megatron_rl.weights.exchange.plan import EngineKind, Layouts, Plan
from megatron_rl.weights.layout.place import like_of
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape
from megatron_rl.weights.layout.trainer_layout import hf_shapes, untrained

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
    """Rounds of the transfer."""
    peak_bytes: int
    """Maximum memory of a rank in a transfer, without its parameters."""
    bucket_bytes: int
    lane_ranks: int
    """Ranks of the largest process group: trainer ranks, and a rank of each engine."""
    rank_lanes: int
    """Most process groups of a trainer rank."""
    cost: WeightSyncCost
    communicators: Communicators | None = None
    """None: the weights do not travel over NCCL."""

    @property
    def excess_bytes(self) -> int:
        """How much more the busiest trainer rank sends than the fullest engine rank receives."""
        return max(self.sent) - max(self.received)


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
    table.add_row("process groups", f"{cost.lanes}, of at most {found.lane_ranks} ranks")
    table.add_row("process groups of a trainer rank", f"at most {found.rank_lanes}")
    table.add_row("rounds", str(found.rounds))
    share = f"{found.peak_bytes / found.bucket_bytes:.2f} times expert.weights.bucket_bytes"
    table.add_row("memory of a rank, at most", f"{_megabytes(found.peak_bytes)}, {share}")
    table.add_row(
        "a weight sync takes",
        f"{cost.whole_seconds:.2f} s; the paper: under {PAPER_WEIGHT_SYNC_S:g} s",
    )
    if cost.is_overlapped:
        table.add_row("the trainer meanwhile", "computes the next step, up to its optimizer")
    rate = f"{sync_rate(config.weights) / 1e9:g} GB/s a rank"
    way = "by way of files" if config.weights.method == "folder" else "over NCCL"
    table.add_row("its transfer", f"{cost.seconds:.2f} s {way} at {rate}")
    table.add_row("a transfer to a single engine", f"{cost.one_s:.2f} s")
    if found.communicators is not None:
        for name, value in _communicator_rows(found.communicators):
            table.add_row(name, value)
    show_table(console, table)
    if len(found.sent) <= SHOWN_RANKS:
        for rank, size in enumerate(found.sent):
            console.print(f"trainer rank {rank} sends {_megabytes(size)}", highlight=False)
    if found.excess_bytes > found.bucket_bytes:
        console.print(
            f"warning: a trainer rank sends {_megabytes(found.excess_bytes)} more than any engine "
            "rank receives: it sets the pace. More trainer ranks would share the sending",
            highlight=False,
        )
    deadline_s = config.weights.deadline_s
    if found.communicators is not None and max(found.communicators.starts_s) > deadline_s:
        console.print(
            "warning: the first weight sync may fail, because its communicators may start later "
            f"than expert.weights.deadline_s={deadline_s:g}: raise it",
            highlight=False,
        )


def _communicator_rows(found: Communicators) -> Iterator[tuple[str, str]]:
    yield "communicators of a trainer rank", f"at most {_megabytes(found.trainer_bytes)}"
    yield "communicators of an engine rank", f"at most {_megabytes(found.engine_bytes)}"
    assumed = f"{INIT_S:g} s each and {INIT_S_PER_RANK:g} s a rank"
    yield "start of all communicators", f"{sum(found.starts_s):.1f} s, if {assumed}: an estimate"
    yield (
        "start for a generator that joins",
        f"{found.join_s:.1f} s, and of all at the next version",
    )


def forecast(config: Config) -> Forecast:
    """The forecast of a configuration. Raises InputError for impossible sizes."""
    shape = read_shape(config.model.path)
    check_parallel(shape, config.parallel)
    itemsize, kept = ITEM_BYTES[config.model.dtype], untrained(shape)
    plan = _plan(config, shape, itemsize)
    sent, received = plan.sent_bytes(), plan.received_bytes()
    roots = [plan.roots(receiver) for receiver in plan.receivers]
    return Forecast(
        sent=tuple(sent.get(rank, 0) for rank in range(config.parallel.world_size)),
        received=tuple(received[rank] for rank in plan.receivers),
        model_bytes=itemsize
        * sum(math.prod(size) for name, size in hf_shapes(shape).items() if name not in kept),
        rounds=len(plan.rounds),
        peak_bytes=plan.peak_bytes(),
        bucket_bytes=config.weights.bucket_bytes,
        lane_ranks=max(map(len, roots)) + config.generator.replicas,
        rank_lanes=max(sum(rank in each for each in roots) for rank in sent),
        cost=sync_cost(shape, config, fixed_s=Hardware.fixed_s),
        communicators=find_communicators(config, roots),
    )


def _plan(config: Config, shape: ModelShape, itemsize: int) -> Plan:
    generator, bucket_bytes = config.generator, config.weights.bucket_bytes
    ranks = generator.tensor_parallel
    kind = EngineKind(generator.engine, ranks, expert_parallel=generator.expert_parallel)
    try:
        # First: its errors are of other keys than those of the plan.
        kind.slices(shape, 0)
    except ValueError as error:
        raise InputError(f"generator.tensor_parallel = {ranks} is not possible: {error}") from error
    layouts = Layouts(
        shape,
        like_of(config.parallel),
        config.parallel.world_size,
        kind,
        itemsize,
        bucket_bytes,
        few_senders=config.weights.method == "reshard",
    )
    try:
        return layouts.plan()
    except ValueError as error:
        raise InputError(
            f"expert.weights.bucket_bytes = {bucket_bytes} is not possible: {error}"
        ) from error


def _range(sizes: Sequence[int]) -> str:
    return f"{_megabytes(min(sizes))}, {_megabytes(max(sizes))}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f} MB"
