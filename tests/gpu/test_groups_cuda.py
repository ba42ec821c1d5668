"""Exchange groups over NCCL beside a trainer's own default group, which is bound to a device.

Each test is a row of docs/gpu-evidence.md. Rank 0 is the trainer, rank 1 the engine. NCCL takes two
GPUs, or one that both processes share: see `test_exchange_cuda.py`.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rl.weights.exchange.group import open_store, start_batch
from megatron_rl.weights.exchange.group_transport import GroupTransport
from megatron_rl.weights.exchange.orders import Call
from megatron_rl.weights.exchange.plan import Move, Parcel, Plan
from tests.distributed import run_ranks
from tests.gpu.test_exchange_cuda import device_of
from tests.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
LIMIT_S = 60.0
DEADLINE_S = 10.0
WATCHDOG_S = 75.0
"""Longer than the watchdog of a group that failed waits before it ends the process."""
NUMBERS = 1 << 20
PLAN = Plan(((Parcel(0, 1, (Move(1, 1, "a", 0, 0, "a", 0, 0),)),),), 2, 1)
"""One root, one receiver."""
ENVIRONMENT = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(int(DEADLINE_S))}


def begin(port: int) -> tuple[GroupTransport, torch.device, dist.TCPStore]:
    """This rank's end; the trainer also gets a default group, made as the backend makes it."""
    rank = int(os.environ["RANK"])
    device = device_of(rank, "nccl")
    store = open_store("127.0.0.1", port, is_master=rank == 0, timeout_s=LIMIT_S)
    if rank == 0:
        own = dist.PrefixStore("trainer", store)
        dist.init_process_group("nccl", store=own, rank=0, world_size=1, device_id=device)
        assert own_sum(device) == 3.0
    return GroupTransport(store, rank, device, "nccl"), device, store


def form(transport: GroupTransport, limit_s: float, name: str = "exchange") -> None:
    """Open the lane of the only engine rank, or fail in time."""
    call = Call(0, 1, 0, name, ("engine",), limit_s, limit_s)
    transport.begin(call, PLAN, replica="engine" if transport._rank else "")


def own_sum(device: torch.device) -> float:
    """What the trainer's own collectives give: 3."""
    tensor = torch.full((5,), 3.0, device=device)
    dist.all_reduce(tensor)
    return float(tensor.mean())


def sent_beside_a_bound_group(port: int) -> bool:
    transport, device, store = begin(port)
    form(transport, LIMIT_S)
    numbers = torch.arange(NUMBERS, device=device, dtype=torch.float32)
    data = numbers if transport._rank == 0 else torch.zeros_like(numbers)
    operation = dist.isend if transport._rank == 0 else dist.irecv
    op = dist.P2POp(operation, data, group=transport.lanes[1].group, group_peer=1 - transport._rank)
    for work in start_batch([op], device):
        work.wait(timedelta(seconds=LIMIT_S))
    if transport._rank == 0:
        store.wait(["over"], timedelta(seconds=LIMIT_S))
        bound = dist.distributed_c10d._get_default_group().bound_device_id
        return bound == device and own_sum(device) == 3.0
    store.set("over", "")
    return torch.equal(data, numbers)


def test_an_exchange_group_forms_beside_a_default_group_that_is_bound_to_a_device() -> None:
    assert run_ranks(
        sent_beside_a_bound_group, 2, free_port(), timeout_s=2 * LIMIT_S, env=ENVIRONMENT
    ) == [True, True]


def stalled_while_forming(port: int) -> tuple[float, bool]:
    transport, device, store = begin(port)
    if transport._rank == 1:
        # The store's own address is all that it has taken of the exchange.
        store.wait(["over"], timedelta(seconds=4 * LIMIT_S))
        return 0.0, True
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        form(transport, DEADLINE_S)
    waited_s = time.monotonic() - started
    time.sleep(WATCHDOG_S)
    is_alive = own_sum(device) == 3.0
    store.set("over", "")
    return waited_s, is_alive


def test_an_engine_that_stalls_while_a_group_forms_costs_the_deadline(
    record_property: Callable[[str, object], None],
) -> None:
    (waited_s, is_alive), _ = run_ranks(
        stalled_while_forming, 2, free_port(), timeout_s=5 * LIMIT_S, env=ENVIRONMENT
    )
    record_property("figure", f"given up after {waited_s:.1f} of {DEADLINE_S:.0f} s")
    assert is_alive and DEADLINE_S - 1 < waited_s < 2 * DEADLINE_S


def failed_transfer(port: int) -> tuple[float, bool]:
    transport, device, store = begin(port)
    form(transport, LIMIT_S)
    if transport._rank == 1:
        # It never takes what is sent to it.
        store.wait(["over"], timedelta(seconds=4 * LIMIT_S))
        form_another(transport, device)
        return 0.0, True
    data = torch.ones(64 * NUMBERS, device=device)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        op = dist.P2POp(dist.isend, data, group=transport.lanes[1].group, group_peer=1)
        for work in start_batch([op], device):
            work.wait(timedelta(seconds=DEADLINE_S))
    transport.close()
    waited_s = time.monotonic() - started
    time.sleep(WATCHDOG_S)
    is_alive = own_sum(device) == 3.0
    store.set("over", "")
    form_another(transport, device)
    return waited_s, is_alive


def form_another(failed: GroupTransport, device: torch.device) -> None:
    """In the thread in which a transfer failed."""
    again = GroupTransport(failed._store, failed._rank, device, "nccl")
    form(again, LIMIT_S, "again")


def test_a_failed_transfer_leaves_the_trainer_alive(
    record_property: Callable[[str, object], None],
) -> None:
    (waited_s, is_alive), _ = run_ranks(
        failed_transfer, 2, free_port(), timeout_s=5 * LIMIT_S, env=ENVIRONMENT
    )
    record_property("figure", f"given up after {waited_s:.1f} of {DEADLINE_S:.0f} s")
    assert is_alive and waited_s < 3 * DEADLINE_S
