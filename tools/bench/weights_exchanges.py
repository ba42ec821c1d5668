"""raw and floor: the exchanges that tools.bench.weights compares with the product's.

They replace `parcels.send` and `receive` in trainer ranks and engine ranks. `raw` sends equally
many plain bytes in the fewest packets. `floor` sends the product's packets with a digest at each
end and copies of scattered slices: the least work of an exchange that sends slices in place and
detects damage. Neither checks, agrees on or reports anything.
"""

import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_rl.weights.exchange import transport as transports
from megatron_rl.weights.exchange.packets import Packet, digest
from megatron_rl.weights.exchange.parcels import Ends, Received, payload_bytes
from megatron_rl.weights.exchange.transport import GroupTransport

RAW, FLOOR = "raw", "floor"
SO_MAX_PACING_RATE = 47
"""Bytes per second, socket(7); not in the module `socket`. TCP paces itself since Linux 4.13."""


def send_raw(ends: Ends, transport: GroupTransport, *, ends_at: float, **_: object) -> int:
    """`parcels.send` with plain bytes."""
    return _exchange(ends, transport._group, dist.isend, ends_at)


def receive_raw(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, ends_at: float, **_: object
) -> Received:
    """`parcels.receive` of plain bytes, which are discarded."""
    started = time.monotonic()
    peak = _exchange(ends, transport._group, dist.irecv, ends_at)
    return Received(payload_bytes(ends, dtype), peak, time.monotonic() - started)


def send_floor(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, ends_at: float, **_: object
) -> int:
    """`parcels.send` without checks: its packets, and digests of the copied packets."""

    def fill(packet: Packet) -> None:
        for place, held in packet.staged(dtype):
            held.copy_(place)
        if packet.is_staged:
            digest(packet.payload)

    _exchange_packets(ends, transport, dist.isend, ends_at, before=fill)
    return transport.peak_bytes


def receive_floor(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, ends_at: float, **_: object
) -> Received:
    """`parcels.receive` without checks: digests each packet, and copies staged packets."""
    started = time.monotonic()

    def empty(packet: Packet) -> None:
        digest(packet.payload)
        for place, held in packet.staged(dtype):
            place.copy_(held)

    _exchange_packets(ends, transport, dist.irecv, ends_at, after=empty)
    seconds = time.monotonic() - started
    return Received(payload_bytes(ends, dtype), transport.peak_bytes, seconds)


RECEIVE = {RAW: receive_raw, FLOOR: receive_floor}


@torch.no_grad()
def _exchange_packets(
    ends: Ends,
    transport: GroupTransport,
    operation: Callable[..., object],
    ends_at: float,
    *,
    before: Callable[[Packet], None] = lambda packet: None,
    after: Callable[[Packet], None] = lambda packet: None,
) -> None:
    """Exchange packets in place, two rounds in flight."""
    flying: list[tuple[Packet, dist.Work]] = []
    for round_ends in (*ends, ()):
        held = [end.packets for end in round_ends]
        transport.lend(held, ends_at, is_sender=operation is dist.isend)
        for packet in itertools.chain(*held):
            before(packet)
        each = [(end.peer, packet) for end in round_ends for packet in end.packets]
        works = _start([(peer, packet.data) for peer, packet in each], operation, transport._group)
        for packet, work in flying:
            _wait([work], ends_at)
            after(packet)
        flying = [(packet, work) for (_, packet), work in zip(each, works, strict=True)]


def _exchange(
    ends: Ends, group: dist.ProcessGroup, operation: Callable[..., object], ends_at: float
) -> int:
    """Exchange one packet per parcel, two rounds in flight, in reused memory."""
    sizes = [[sum(packet.nbytes for packet in end.packets) for end in each] for each in ends]
    largest = max(map(sum, sizes))
    flying: list[dist.Work] = []
    for number, (round_ends, lengths) in enumerate(zip(ends, sizes, strict=True)):
        buffers = _memory(number % 2, largest)[: sum(lengths)].split(lengths) if lengths else ()
        peers = [end.peer for end in round_ends]
        works = _start(list(zip(peers, buffers, strict=True)), operation, group)
        _wait(flying, ends_at)
        flying = works
    _wait(flying, ends_at)
    return 2 * largest


def _start(
    packets: Sequence[tuple[int, torch.Tensor]],
    operation: Callable[..., object],
    group: dist.ProcessGroup,
) -> list[dist.Work]:
    ops = [dist.P2POp(operation, data, group=group, group_peer=peer) for peer, data in packets]
    return dist.batch_isend_irecv(ops) if ops else []


@functools.cache
def _memory(half: int, size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def _wait(works: Sequence[dist.Work], ends_at: float) -> None:
    for work in works:
        work.wait(timedelta(seconds=max(0.001, ends_at - time.monotonic())))


@contextmanager
def limited_links(bytes_per_s: int) -> Iterator[None]:
    """In the block, each gloo connection of an exchange sends at most `bytes_per_s`; 0: no limit.

    In a sender this limits an engine rank served by one rank, as if it had its own link. The kernel
    delays the packets of a full link; the sender's other connections continue.
    """
    connect = transports.connect_group

    def connect_limited(*arguments: object) -> None:
        connect(*arguments)
        limit_connections(bytes_per_s)

    with patch.object(transports, "connect_group", connect_limited if bytes_per_s else connect):
        yield


def limit_connections(bytes_per_s: int) -> int:
    """Limit each TCP connection of this process; returns their number.

    gloo does not expose its sockets; the other connections, to a store or between control groups,
    carry little. The kernel paces (Linux only, no privileges).
    """
    limited = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue  # closed by another thread, or the folder's own
        try:
            link = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # no socket
        with link:
            is_tcp = link.family in (socket.AF_INET, socket.AF_INET6)
            if link.type == socket.SOCK_STREAM and is_tcp:
                link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
                limited += 1
    return limited
