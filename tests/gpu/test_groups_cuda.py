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
from msgspec.structs import replace

from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.group import open_store, start_batch, wait_until
from megatron_rl.weights.exchange.transport import Buffers, Channel
from tests.distributed import run_ranks
from tests.gpu.test_exchange_cuda import device_of
from tests.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
LIMIT_S = 60.0
DEADLINE_S = 10.0
WATCHDOG_S = 75.0
"""Longer than the watchdog of a group that failed waits before it ends the process."""
NUMBERS = 1 << 20
ENVIRONMENT = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(int(DEADLINE_S))}


def begin(port: int) -> tuple[Channel, Receive, torch.device, dist.TCPStore]:
    """This rank's end; the trainer also gets a default group, made as the backend makes it."""
    rank = int(os.environ["RANK"])
    device = device_of(rank, "nccl")
    store = open_store("127.0.0.1", port, is_master=rank == 0, timeout_s=LIMIT_S)
    if rank == 0:
        own = dist.PrefixStore("trainer", store)
        dist.init_process_group("nccl", store=own, rank=0, world_size=1, device_id=device)
        assert own_sum(device) == 3.0
    order = Receive("127.0.0.1", port, "exchange", "nccl", 1, 2, 0, 1, DEADLINE_S)
    return Channel(store, rank, Buffers()), order, device, store


def own_sum(device: torch.device) -> float:
    """What the trainer's own collectives give: 3."""
    tensor = torch.full((5,), 3.0, device=device)
    dist.all_reduce(tensor)
    return float(tensor.mean())


def sent_beside_a_bound_group(port: int) -> bool:
    channel, order, device, store = begin(port)
    channel.open(order, device, time.monotonic() + LIMIT_S)
    numbers = torch.arange(NUMBERS, device=device, dtype=torch.float32)
    data = numbers if channel.rank == 0 else torch.zeros_like(numbers)
    operation = dist.isend if channel.rank == 0 else dist.irecv
    op = dist.P2POp(operation, data, group=channel._group, group_peer=1 - channel.rank)
    for work in start_batch([op], device):
        wait_until(work, time.monotonic() + LIMIT_S)
    if channel.rank == 0:
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
    channel, order, device, store = begin(port)
    if channel.rank == 1:
        # The store's own address is all that it has taken of the exchange.
        store.wait(["over"], timedelta(seconds=4 * LIMIT_S))
        return 0.0, True
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        channel.open(order, device, started + DEADLINE_S)
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
    channel, order, device, store = begin(port)
    channel.open(order, device, time.monotonic() + LIMIT_S)
    if channel.rank == 1:
        # It never takes what is sent to it.
        store.wait(["over"], timedelta(seconds=4 * LIMIT_S))
        form_another(channel, order, device)
        return 0.0, True
    data = torch.ones(64 * NUMBERS, device=device)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        op = dist.P2POp(dist.isend, data, group=channel._group, group_peer=1)
        for work in start_batch([op], device):
            wait_until(work, started + DEADLINE_S)
    channel.close()
    waited_s = time.monotonic() - started
    time.sleep(WATCHDOG_S)
    is_alive = own_sum(device) == 3.0
    store.set("over", "")
    form_another(channel, order, device)
    return waited_s, is_alive


def form_another(failed: Channel, order: Receive, device: torch.device) -> None:
    """In the thread in which a transfer failed."""
    again = Channel(failed.store, failed.rank, Buffers())
    again.open(replace(order, group_name="again"), device, time.monotonic() + LIMIT_S)


def test_a_failed_transfer_leaves_the_trainer_alive(
    record_property: Callable[[str, object], None],
) -> None:
    (waited_s, is_alive), _ = run_ranks(
        failed_transfer, 2, free_port(), timeout_s=5 * LIMIT_S, env=ENVIRONMENT
    )
    record_property("figure", f"given up after {waited_s:.1f} of {DEADLINE_S:.0f} s")
    assert is_alive and waited_s < 3 * DEADLINE_S
