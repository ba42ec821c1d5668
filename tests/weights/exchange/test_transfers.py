"""Rounds of parcels between processes; nobody waits longer than the deadline."""

import os
import signal
import time
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_rl.weights.exchange.group_transport import GroupTransport
from megatron_rl.weights.exchange.orders import Call, Report
from megatron_rl.weights.exchange.parcels import incoming, outgoing, receive, send
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.exchange.shared_transport import SharedTransport
from megatron_rl.weights.exchange.transport import Transport
from megatron_rl.weights.layout.slices import Slice
from tests.distributed import run_ranks

CPU = torch.device("cpu")
LARGE_ROWS, LARGE_COLUMNS = 16, 1 << 20
"""64 MB of float32: more than the sockets' buffers take."""


def filled(*size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def open_transport(
    plan: Plan, kind: str = "group", *, wait_s: float = 60.0, timeout_s: float = 90.0
) -> Transport:
    """Senders, then the ranks of one engine; the transfer has begun."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank, store = dist.get_rank(), default_store()
    is_shared = kind == "shared"
    transport = (
        SharedTransport(store, rank, CPU) if is_shared else GroupTransport(store, rank, CPU, "gloo")
    )
    call = Call(0, group="lanes", replicas=("engine",), left_s=60.0, wait_s=wait_s)
    transport.begin(call, plan, replica="engine" if rank >= plan.senders else "")
    return transport


def default_store() -> dist.Store:
    return distributed_c10d._get_default_store()


def count_buffers(monkeypatch_target: Any) -> list[int]:
    """Bytes of buffers that are alive, and the most that ever were: [now, most]."""
    count = [0, 0]
    real = monkeypatch_target.empty

    def gone(size: int) -> None:
        count[0] -= size

    def counted(size: int, *, dtype: torch.dtype, **others: Any) -> Tensor:
        if dtype != torch.uint8:
            return real(size, dtype=dtype, **others)
        memory = np.empty(size, dtype=np.uint8)
        weakref.finalize(memory, gone, size)
        count[0] += size
        count[1] = max(count)
        return torch.from_numpy(memory)

    monkeypatch_target.empty = counted
    return count


def exchange_between_four(kind: str) -> tuple[int, int, Report | None, bool]:
    """Ranks 0 and 1 hold halves of a matrix by columns, 2 and 3 take halves by rows.

    Returns (peak as reported, peak as counted, what was received, whether it is right).
    """
    stages_all = kind != "group"
    rows, columns, bucket_bytes = 64, 10, 512
    halves = [(0, 7), (7, 3)]
    senders = {
        number: [Slice("m", 0, start, rows, width, "a", 0, 0)]
        for number, (start, width) in enumerate(halves)
    }
    receivers = {
        2 + number: [Slice("m", 32 * number, 0, 32, columns, "b", 0, 0)] for number in range(2)
    }
    plan = make_plan(senders, receivers, itemsize=4, bucket_bytes=bucket_bytes)
    assert len(plan.rounds) >= 4
    transport, rank = open_transport(plan, kind), dist.get_rank()
    matrix = filled(rows, columns)
    count = count_buffers(torch)
    options: dict[str, Any] = {"dtype": torch.float32, "version": 3}
    if rank < 2:
        start, width = halves[rank]
        parameters = {"a": matrix[:, start : start + width].contiguous()}
        ends = outgoing(plan.of_sender(rank), parameters, torch.float32, stages_all=stages_all)
        send(ends, transport, **options)
        result, is_right = None, True
    else:
        parameters = {"b": torch.zeros(32, columns)}
        ends = incoming(plan.of_receiver(rank), parameters, torch.float32, stages_all=stages_all)
        result = receive(ends, transport, **options)
        assert result.peak_bytes == transport.peak_bytes
        is_right = torch.equal(parameters["b"], matrix[32 * (rank - 2) :][:32])
    # Both ends have let go of the memory that they shared.
    if isinstance(transport, SharedTransport):
        assert not transport._memories and not transport._opened
    peak = transport.peak_bytes
    assert count[1] <= 2 * bucket_bytes and peak <= plan.peak_bytes()
    dist.barrier()
    return peak, count[1], result, is_right


@pytest.mark.parametrize("kind", ["group", "staged", "shared"])
def test_several_rounds_arrive_within_two_buckets_of_memory(kind: str) -> None:
    ends = run_ranks(exchange_between_four, 4, kind)
    for rank, (peak, counted, result, is_right) in enumerate(ends):
        assert is_right
        # Shared memory is the senders' and is none of torch's.
        assert counted == (0 if kind == "shared" else peak)
        assert (peak > 0) == (kind != "shared" or rank < 2)
        if result is not None:
            assert (result.damaged, result.payload_bytes) == (0, 32 * 10 * 4)
            assert 0 < result.seconds < 60


def transfer(deadline_s: float, role: str) -> tuple[str, float]:
    """Rank 0 sends 64 MB to rank 1 in rounds; one of them may do as `role` says instead."""
    is_sender = dist_rank() == 0
    plays = role.startswith("sender" if is_sender else "receiver")
    if plays and role.endswith("dies") and os.fork():
        os.wait()
        return "", 0.0
    plan = make_plan(
        {0: [Slice("m", 0, 0, LARGE_ROWS, LARGE_COLUMNS, "a", 0, 0)]},
        {1: [Slice("m", 0, 0, LARGE_ROWS, LARGE_COLUMNS, "a", 0, 0)]},
        itemsize=4,
        bucket_bytes=33 << 20,
    )
    transport = open_transport(plan, wait_s=deadline_s)
    if plays:
        return play_dead(role)
    started = time.monotonic()
    parameters = {"a": torch.ones(LARGE_ROWS, LARGE_COLUMNS)}
    options: dict[str, Any] = {"dtype": torch.float32, "version": 0}
    try:
        if is_sender:
            send(outgoing(plan.of_sender(0), parameters, torch.float32), transport, **options)
        else:
            ends = incoming(plan.of_receiver(1), parameters, torch.float32)
            receive(ends, transport, **options)
    except RuntimeError as error:
        seconds = time.monotonic() - started
        default_store().set("over", "")
        return f"{type(error).__name__}: {error}", seconds
    return "", time.monotonic() - started


def dist_rank() -> int:
    return int(os.environ["RANK"])


def play_dead(role: str) -> tuple[str, float]:
    """Die, or sleep until the other rank has given up."""
    if role.endswith("dies"):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    default_store().wait(["over"], timedelta(seconds=60))
    return "", 0.0


@pytest.mark.parametrize(
    ("role", "deadline_s"),
    [("receiver sleeps", 1), ("sender sleeps", 1), ("receiver dies", 60), ("sender dies", 60)],
)
def test_a_peer_that_stops_costs_the_deadline_and_one_that_dies_less(
    role: str, deadline_s: float
) -> None:
    error, seconds = run_ranks(transfer, 2, deadline_s, role)[int(role.startswith("sender"))]
    # The sleeper awakes after the error; the bound is far below its sleep and the longer deadline.
    assert seconds < 20 and (seconds >= 1 if role.endswith("sleeps") else error)
    assert "imed out" in error or role.endswith("dies"), error


def test_large_rounds_are_sent_in_time() -> None:
    assert [error for error, _ in run_ranks(transfer, 2, 60.0, "none")] == ["", ""]
