"""Slices between two processes over NCCL, and through memory of one GPU.

Each test is a row of docs/gpu-evidence.md. NCCL takes two GPUs, or one that both processes share:
it refuses that unless they seem to be on different hosts.
"""

import os
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.group_transport import open_transport
from megatron_rl.weights.exchange.orders import Call, Report
from megatron_rl.weights.exchange.packets import word_sums
from megatron_rl.weights.exchange.parcels import incoming, outgoing, receive, send
from megatron_rl.weights.exchange.plan import make_plan
from megatron_rl.weights.exchange.transport import IPC
from megatron_rl.weights.layout.slices import Slice
from tests.distributed import run_ranks
from tests.ports import free_port

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 1024, 3000
CUT = 1201
LIMIT_S = 60.0


def matrix(rows: int, columns: int) -> Tensor:
    numbers = torch.Generator().manual_seed(3)
    return torch.randn(rows, columns, generator=numbers).bfloat16()


def device_of(rank: int, backend: str) -> torch.device:
    """A GPU for each rank, or one for both."""
    count = torch.cuda.device_count() if backend == "nccl" else 1
    if count == 1:
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def exchange(
    port: int, expected_version: int, backend: str = "nccl"
) -> tuple[bool, Report | None, int]:
    """Rank 0 holds a matrix, rank 1 its two halves by columns and a vector.

    Returns (whether all is right, what was received, most bytes of buffers).
    """
    rank = int(os.environ["RANK"])
    device = device_of(rank, backend)
    store = open_store("127.0.0.1", port, is_master=rank == 0, timeout_s=LIMIT_S)
    whole, vector = matrix(ROWS, COLUMNS), matrix(1, 77)[0]
    vector_slice = Slice("v", 0, 0, 77, 1, "v", 0, 0)
    halves = [
        Slice("m", 0, 0, ROWS, CUT, "left", 0, 0),
        Slice("m", 0, CUT, ROWS, COLUMNS - CUT, "right", 0, 0),
    ]
    plan = make_plan(
        {0: [Slice("m", 0, 0, ROWS, COLUMNS, "m", 0, 0), vector_slice]},
        {1: [*halves, vector_slice]},
        itemsize=2,
        bucket_bytes=1 << 20,
    )
    call = Call(0, 1, 0, "cuda", ("engine",), LIMIT_S, LIMIT_S)
    transport = open_transport(
        store, rank, device, backend=backend, dtype=torch.bfloat16, folder=""
    )
    transport.begin(call, plan, replica="engine" if rank else "")
    if rank == 0:
        held = {"m": whole.to(device), "v": vector.to(device)}
        ends = outgoing(plan.of_sender(0), held, torch.bfloat16, stages_all=transport.stages_all)
        send(ends, transport, dtype=torch.bfloat16, version=1)
        # The store is here.
        store.wait(["over"], timedelta(seconds=LIMIT_S))
        return True, None, transport.peak_bytes
    held = {
        "left": torch.zeros(ROWS, CUT, dtype=torch.bfloat16, device=device),
        "right": torch.zeros(ROWS, COLUMNS - CUT, dtype=torch.bfloat16, device=device),
        "v": torch.zeros(77, dtype=torch.bfloat16, device=device),
    }
    ends = incoming(plan.of_receiver(1), held, torch.bfloat16, stages_all=transport.stages_all)
    result = receive(ends, transport, dtype=torch.bfloat16, version=expected_version)
    store.set("over", "")
    found = torch.cat([held["left"], held["right"]], 1).cpu()
    is_right = torch.equal(found, whole) and torch.equal(held["v"].cpu(), vector)
    return is_right, result, result.peak_bytes


def test_slices_arrive_over_nccl_bit_for_bit_in_two_buckets() -> None:
    (_, _, sent_peak), (is_right, received, peak) = run_ranks(
        exchange, 2, free_port(), 1, timeout_s=2 * LIMIT_S
    )
    assert is_right and received is not None
    assert (received.damaged, received.payload_bytes) == (0, 2 * (ROWS * COLUMNS + 77))
    assert max(sent_peak, peak) <= 2 << 20


def test_slices_pass_through_memory_that_two_processes_share_on_one_gpu() -> None:
    (_, _, sent_peak), (is_right, received, peak) = run_ranks(
        exchange, 2, free_port(), 1, IPC, timeout_s=2 * LIMIT_S
    )
    assert is_right and received is not None
    assert (received.damaged, received.payload_bytes) == (0, 2 * (ROWS * COLUMNS + 77))
    assert 0 < sent_peak <= 2 << 20 and peak == 0


def test_another_version_is_noticed_on_the_device() -> None:
    _, (_, received, _) = run_ranks(exchange, 2, free_port(), 2, timeout_s=2 * LIMIT_S)
    assert received is not None and received.damaged > 0


def digests() -> tuple[str, list[int], list[int]]:
    payload = matrix(64, 4099)[:, :4096].contiguous().view(-1).view(torch.uint8)
    host, device = word_sums(payload), word_sums(payload.cuda())
    return device.device.type, host.tolist(), device.tolist()


def test_the_sums_are_taken_on_the_device_and_are_those_of_the_host() -> None:
    device, host_words, device_words = run_ranks(digests, 1)[0]
    assert device == "cuda" and device_words == host_words
