"""Takes the parcels of tools.bench.weights inside every rank of its SGLang servers.

Stands in the place of the product's loader. Under an exchange whose name begins with RAW it
receives plain bytes and throws them away: the floor of what any exchange of so many bytes takes.
Each transfer leaves a line beside the server's log: how much the process grew meanwhile.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from generation import sglang_loader
from generation.sglang_orders import ORDERS_VARIABLE, read_order
from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange import receiver
from megatron_rl.weights.exchange.parcels import Ends, Received, payload_bytes, receive
from megatron_rl.weights.exchange.receiver import Receiver
from megatron_rl.weights.exchange.transport import GroupTransport
from tools.bench.weights_figures import RAW

LOADER = "tools.bench.weights_loader.load"


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Obey the engine's order."""
    order = read_order().order
    if not isinstance(order, Receive):
        return
    path = Path(os.environ[ORDERS_VARIABLE])
    with noted_growth(path.with_suffix(f".growth-{os.getpid()}.jsonl"), order.group_name):
        method = order.group_name.partition("-")[0]
        with patch.object(receiver, "receive", receive_raw if method == RAW else receive):
            _receiver(model, method).take(order)


@functools.cache
def _receiver(model: torch.nn.Module, method: str) -> Receiver:
    """The product's, one a method: each keeps its group between the turns of the others."""
    return sglang_loader._receiver.__wrapped__(model)


@contextmanager
def noted_growth(path: Path, name: str) -> Iterator[None]:
    """Append {"name", "bytes"} to a file: how much this process grew at most meanwhile."""
    start_peak()
    before = resident_bytes("VmRSS")
    yield
    with path.open("a") as file:
        file.write(json.dumps({"name": name, "bytes": resident_bytes("VmHWM") - before}) + "\n")


def start_peak() -> None:
    """Let VmHWM of this process start anew."""
    # See proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(key: str) -> int:
    """Of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {key}")


def send_raw(
    ends: Ends,
    transport: GroupTransport,
    *,
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> int:
    """As `parcels.send`, but of plain bytes."""
    return _exchange(ends, transport._group, dist.isend, ends_at)


def receive_raw(
    ends: Ends,
    transport: GroupTransport,
    *,
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> Received:
    """As `parcels.receive`, but of plain bytes, which nobody looks at."""
    started = time.monotonic()
    peak = _exchange(ends, transport._group, dist.irecv, ends_at)
    return Received(payload_bytes(ends, dtype), peak, time.monotonic() - started)


def _exchange(
    ends: Ends, group: dist.ProcessGroup, operation: Callable[..., object], ends_at: float
) -> int:
    """One packet a parcel, two rounds in flight, in memory that is kept and already mapped."""
    sizes = [[sum(packet.nbytes for packet in end.packets) for end in each] for each in ends]
    largest = max(map(sum, sizes))
    flying: list[dist.Work] = []
    for number, (parcels, lengths) in enumerate(zip(ends, sizes, strict=True)):
        buffers = _memory(number % 2, largest)[: sum(lengths)].split(lengths) if lengths else ()
        ops = [
            dist.P2POp(operation, buffer, group=group, group_peer=end.peer)
            for end, buffer in zip(parcels, buffers, strict=True)
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        _wait(flying, ends_at)
        flying = works
    _wait(flying, ends_at)
    return 2 * largest


@functools.cache
def _memory(half: int, size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def _wait(works: Sequence[dist.Work], ends_at: float) -> None:
    for work in works:
        work.wait(timedelta(seconds=max(0.001, ends_at - time.monotonic())))
