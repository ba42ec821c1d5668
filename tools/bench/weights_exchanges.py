"""Exchanges that tools.bench.weights compares the product's with: raw and floor.

They run in trainer ranks and in ranks of engines, in place of `parcels.send` and `receive`.
`raw` is as many plain bytes in as few packets as can be. `floor` is the product's packets with what
no exchange can do without that sends from where slices lie and finds out damage: a digest at either
end, and copies of what lies in no run. Neither checks, agrees on or reports anything.

`limited_links` gives each receiver a link like one of its own: the kernel paces what a process
sends over TCP (Linux only, no privileges). A sender waits in the kernel for a peer whose link is
full; its other connections continue.
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
from tools.bench.weights_figures import FLOOR, RAW

SO_MAX_PACING_RATE = 47
"""Bytes per second, socket(7); the module `socket` lacks it. TCP paces itself since Linux 4.13."""


def send_raw(ends: Ends, transport: GroupTransport, *, ends_at: float, **_: object) -> int:
    """As `parcels.send`, but of plain bytes."""
    return _exchange(ends, transport._group, dist.isend, ends_at)


def receive_raw(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, ends_at: float, **_: object
) -> Received:
    """As `parcels.receive`, but of plain bytes, which nobody looks at."""
    started = time.monotonic()
    peak = _exchange(ends, transport._group, dist.irecv, ends_at)
    return Received(payload_bytes(ends, dtype), peak, time.monotonic() - started)


def send_floor(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, ends_at: float, **_: object
) -> int:
    """As `parcels.send`, without checks: its packets, and digests of those that are copied."""

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
    """As `parcels.receive`, without checks: each packet digested, and copied if it must be."""
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
    """The packets from and to where they lie, two rounds in flight."""
    flying: list[tuple[Packet, dist.Work]] = []
    for parcels in (*ends, ()):
        held = [end.packets for end in parcels]
        transport.lend(held, ends_at, is_sender=operation is dist.isend)
        for packet in itertools.chain(*held):
            before(packet)
        each = [(end.peer, packet) for end in parcels for packet in end.packets]
        ops = [
            dist.P2POp(operation, packet.data, group=transport._group, group_peer=peer)
            for peer, packet in each
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        for packet, work in flying:
            _wait([work], ends_at)
            after(packet)
        flying = [(packet, work) for (_, packet), work in zip(each, works, strict=True)]


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


@contextmanager
def limited_links(bytes_per_s: int) -> Iterator[None]:
    """In the block, each connection of an exchange over gloo sends at most so much from its start.

    In a sender: an engine rank that a single rank serves takes at most so much. 0: no limit.
    """
    if not bytes_per_s:
        yield
        return
    connect = transports.connect_group

    def connect_limited(*arguments: object) -> None:
        connect(*arguments)
        limit_connections(bytes_per_s)

    with patch.object(transports, "connect_group", connect_limited):
        yield


def limit_connections(bytes_per_s: int) -> int:
    """Limit each TCP connection that this process has now; how many they are.

    gloo does not say which sockets are its own. The others, to a store or between control groups,
    carry little.
    """
    limited = 0
    for link in _tcp_connections():
        link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        limited += 1
    return limited


def _tcp_connections() -> Iterator[socket.socket]:
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
            if link.type == socket.SOCK_STREAM and link.family in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                yield link
