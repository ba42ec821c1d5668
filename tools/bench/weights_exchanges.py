"""raw, floor and gloo: the exchanges that tools.bench.weights compares with the product's.

They replace `parcels.send` and `receive` in trainer ranks and engine ranks. `raw` sends equally
many plain bytes in the fewest packets, from engine to engine as the product does. `floor` sends the
product's packets with a digest at each end and copies of scattered slices: the least work of an
exchange that sends slices in place and detects damage. `gloo` broadcasts the bytes of each parcel
by gloo's own collective; it needs a single trainer rank. None checks, agrees on or reports
anything.
"""

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_rl.weights.exchange import group_transport
from megatron_rl.weights.exchange.group_transport import GroupTransport
from megatron_rl.weights.exchange.orders import Report
from megatron_rl.weights.exchange.packets import Packet, digest
from megatron_rl.weights.exchange.parcels import Ends, payload_bytes
from megatron_rl.weights.exchange.transport import Round, Wait

RAW, FLOOR, GLOO = "raw", "floor", "gloo"
SO_MAX_PACING_RATE = 47
"""Bytes per second, socket(7); not in the module `socket`. TCP paces itself since Linux 4.13."""


def send_raw(ends: Ends, transport: GroupTransport, **_: object) -> None:
    """`parcels.send` with plain bytes."""
    _send(_plain(ends, transport), transport)


def receive_raw(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, **_: object
) -> Report:
    """`parcels.receive` of plain bytes, which are discarded."""
    started, rounds = time.monotonic(), _plain(ends, transport)
    _receive(rounds, transport)
    return _report(ends, transport, dtype, started)


def send_floor(ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, **_: object) -> None:
    """`parcels.send` without checks: its packets, and digests of the copied packets."""

    def fill(packet: Packet) -> None:
        for place, held in packet.staged(dtype):
            held.copy_(place)
        if packet.is_staged:
            digest(packet.payload)

    _send(ends, transport, fill)


def receive_floor(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, **_: object
) -> Report:
    """`parcels.receive` without checks: digests each packet, and copies staged packets."""
    started = time.monotonic()

    def empty(packet: Packet) -> None:
        digest(packet.payload)
        for place, held in packet.staged(dtype):
            place.copy_(held)

    _receive(ends, transport, empty)
    return _report(ends, transport, dtype, started)


def send_gloo(ends: Ends, transport: GroupTransport, **_: object) -> None:
    """`parcels.send` by broadcasts of plain bytes."""
    _broadcast(_plain(ends, transport), transport)


def receive_gloo(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, **_: object
) -> Report:
    """`parcels.receive` by broadcasts of plain bytes, which are discarded."""
    started, rounds = time.monotonic(), _plain(ends, transport)
    _broadcast(rounds, transport)
    return _report(ends, transport, dtype, started)


SEND = {RAW: send_raw, FLOOR: send_floor, GLOO: send_gloo}
RECEIVE = {RAW: receive_raw, FLOOR: receive_floor, GLOO: receive_gloo}


def _plain(ends: Ends, transport: GroupTransport) -> Ends:
    """One packet per parcel, in memory that every other round uses again."""
    largest = max(sum(end.nbytes for end in each) for each in ends)
    transport.peak_bytes = 2 * largest
    rounds = []
    for number, each in enumerate(ends):
        lengths = [end.nbytes for end in each]
        buffers = _memory(number % 2, largest)[: sum(lengths)].split(lengths) if lengths else ()
        rounds.append(
            [
                end._replace(packets=[Packet([], buffer.nbytes, buffer)])
                for end, buffer in zip(each, buffers, strict=True)
            ]
        )
    return rounds


def _report(ends: Ends, transport: GroupTransport, dtype: torch.dtype, started: float) -> Report:
    return Report(
        payload_bytes=payload_bytes(ends, dtype),
        peak_bytes=transport.peak_bytes,
        seconds=time.monotonic() - started,
    )


@functools.cache
def _memory(half: int, size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


@torch.no_grad()
def _send(
    ends: Ends, transport: GroupTransport, fill: Callable[[Packet], None] | None = None
) -> None:
    """As `parcels.send`. fill: makes a packet ready; None: it is."""
    wait: Wait = _nothing
    for each in (*ends, ()):
        if fill is not None:
            transport.lend(each)
            _apply(fill, each)
        before, wait = wait, transport.send(each)
        before()


@torch.no_grad()
def _receive(
    ends: Ends, transport: GroupTransport, empty: Callable[[Packet], None] | None = None
) -> None:
    """As `parcels.receive`. empty: takes a packet that has arrived; None: it is discarded."""
    arrived: Round = ()
    for each in (*ends, ()):
        if empty is not None:
            transport.lend(each)
        wait = transport.receive(each, arrived)
        if empty is not None:
            _apply(empty, arrived)
        wait()
        arrived = each


def _broadcast(ends: Ends, transport: GroupTransport) -> None:
    """All parcels of a lane by its root's broadcasts, two rounds in flight."""
    flying: list[dist.Work] = []
    for each in (*ends, ()):
        works = []
        for end in each:
            # At the root the peer is the receiver, whose lane it is.
            lane = transport.lanes.get(end.peer) or next(iter(transport.lanes.values()))
            for packet in end.packets:
                work = dist.broadcast(packet.data, group_src=0, group=lane.group, async_op=True)
                works.append(work)
        for work in flying:
            work.wait(transport.left())
        flying = works


def _nothing() -> None:
    """Before the first round."""


def _apply(do: Callable[[Packet], None], parcels: Round) -> None:
    for packet in (packet for end in parcels for packet in end.packets):
        do(packet)


@contextmanager
def limited_links(bytes_per_s: int) -> Iterator[None]:
    """In the block, each gloo connection of an exchange sends at most `bytes_per_s`; 0: no limit.

    In a sender this limits an engine rank served by one rank, as if it had its own link. The kernel
    delays the packets of a full link; the sender's other connections continue.
    """
    join = group_transport.join_group

    def join_limited(*arguments: object, **options: object) -> object:
        group = join(*arguments, **options)
        limit_connections(bytes_per_s)
        return group

    with patch.object(group_transport, "join_group", join_limited if bytes_per_s else join):
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
