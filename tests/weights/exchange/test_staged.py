"""Parameters that are staged: their memory comes with the first slice and goes when all came."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.group_transport import GroupTransport
from megatron_rl.weights.exchange.orders import Call, Report, key
from megatron_rl.weights.exchange.parcels import (
    StagedParameters,
    incoming,
    outgoing,
    receive,
    send,
)
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.layout.slices import Slice
from tests.distributed import run_ranks
from tests.weights.exchange.test_folder import WIDE, play
from tests.weights.made_up import allocate

COUNT, ROWS, COLUMNS, BUCKET_BYTES = 12, 32, 8, 512
NAMES = [f"layer.{number}" for number in range(COUNT)]


class Sums(StagedParameters):
    """Keeps the sum of each matrix that came whole."""

    def __init__(self, names: list[str]) -> None:
        super().__init__({name: torch.empty(ROWS, COLUMNS, device="meta") for name in names})
        self.sums: dict[str, float] = {}
        self.held: dict[str, Tensor] = {}
        self.most = 0
        self.missing: dict[str, int] = {}

    def begin(self, elements: Mapping[str, int]) -> None:
        self.missing = dict(elements)

    def __getitem__(self, name: str) -> Tensor:
        held = self.held.setdefault(name, torch.zeros(ROWS, COLUMNS))
        self.most = max(self.most, len(self.held))
        return held

    def arrived(self, name: str, elements: int) -> None:
        self.missing[name] -= elements
        if not self.missing[name]:
            self.sums[name] = float(self.held.pop(name).sum())

    def finish(self) -> int:
        assert not self.held and not any(self.missing.values())
        return self.most

    def drop(self) -> None:
        self.held.clear()


def plan() -> Plan:
    slices = [Slice(name, 0, 0, ROWS, COLUMNS, name, 0, 0) for name in NAMES]
    return make_plan({0: slices}, {1: slices}, itemsize=4, bucket_bytes=BUCKET_BYTES)


def matrices() -> dict[str, Tensor]:
    drawn = torch.randn(COUNT, ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    return dict(zip(NAMES, drawn, strict=True))


def exchange(stages_all: bool) -> tuple[dict[str, float], int, int] | None:
    """Rank 0 sends to two engines in a row: their sums, the most staged, and the payload."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    transport = GroupTransport(store, min(rank, 1), torch.device("cpu"), "gloo")
    call = Call(0, group="lanes", replicas=("a", "b"), left_s=20.0, wait_s=20.0)
    transport.begin(call, plan(), replica=("", "a", "b")[rank])
    options = {"dtype": torch.float32, "version": 5}
    if rank == 0:
        rounds = plan().of_sender(0)
        ends = outgoing(rounds, matrices(), torch.float32, stages_all=stages_all)
        send(ends, transport, **options)
        dist.barrier()
        return None
    held = Sums(NAMES)
    rounds = incoming(plan().of_receiver(1), held, torch.float32, stages_all=stages_all)
    found = receive(rounds, transport, staged=held, **options)
    # What was staged is reported together with the buffers.
    most = found.peak_bytes - transport.peak_bytes
    assert found.damaged == 0
    dist.barrier()
    return held.sums, most, found.payload_bytes


@pytest.mark.parametrize("stages_all", [False, True])
def test_staged_parameters_arrive_whole_and_few_at_a_time(stages_all: bool) -> None:
    _, *engines = run_ranks(exchange, 3, stages_all)
    for sums, most, payload_bytes in engines:
        assert sums == {name: float(held.sum()) for name, held in matrices().items()}
        # A matrix takes two rounds and more. Three rounds are asked for and not yet told of.
        assert most <= 3
        assert payload_bytes == 4 * COUNT * ROWS * COLUMNS


def test_rounds_that_were_not_asked_for_take_no_memory() -> None:
    held = Sums(NAMES)
    rounds = iter(incoming(plan().of_receiver(1), held, torch.float32, stages_all=False))
    assert held.most == 0
    next(rounds)
    assert held.most == 1


class Noted(StagedParameters):
    """Notes the beginning and the failure of each transfer."""

    def __init__(self, like: dict[str, Tensor]) -> None:
        super().__init__(like)
        self.events: list[str] = []

    def begin(self, elements: Mapping[str, int]) -> None:
        self.events.append("begin")

    def arrived(self, name: str, elements: int) -> None:
        pass

    def finish(self) -> int:
        return 0

    def drop(self) -> None:
        self.events.append("drop")


def test_a_transfer_that_is_called_off_frees_what_was_staged(tmp_path: Path) -> None:
    with play(tmp_path) as run:
        staged = Noted(allocate(run.layouts.kind.slices(WIDE, 0)))
        rank = EngineRank(lambda: staged, 0, run.dtype, may_pad_ffn=False)
        run.store.set(key("go", 0), msgspec.json.encode(Call(0)))
        rank.take(run._receive("a", 0, 0))
        report = run._read(key("done", 0, "a", 0), Report)
        assert "called the transfer off" in report.error and staged.events == ["begin", "drop"]
        rank.leave()
