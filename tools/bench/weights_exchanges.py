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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_rl.weights.exchange import lanes
from megatron_rl.weights.exchange.group import Patience, Work, wait_until
from megatron_rl.weights.exchange.packets import Packet, digest
from megatron_rl.weights.exchange.parcels import Ends, Received, payload_bytes
from megatron_rl.weights.exchange.transport import GroupTransport

RAW, FLOOR, GLOO = "raw", "floor", "gloo"
SO_MAX_PACING_RATE = 47
"""Bytes per second, socket(7); not in the module `socket`. TCP paces itself since Linux 4.13."""
Rounds = Sequence[Sequence[list[Packet]]]
Move = Callable[[Ends, Rounds, GroupTransport, Patience], None]


def send_floor(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, patience: Patience, **_: object
) -> int:
    """`parcels.send` without checks: its packets, and digests of the copied packets."""

    def fill(packet: Packet) -> None:
        for place, held in packet.staged(dtype):
            held.copy_(place)
        if packet.is_staged:
            digest(packet.payload)

    _send(ends, [[end.packets for end in each] for each in ends], transport, patience, fill)
    return transport.peak_bytes


def receive_floor(
    ends: Ends, transport: GroupTransport, *, dtype: torch.dtype, patience: Patience, **_: object
) -> Received:
    """`parcels.receive` without checks: digests each packet, and copies staged packets."""
    started = time.monotonic()

    def empty(packet: Packet) -> None:
        digest(packet.payload)
        for place, held in packet.staged(dtype):
            place.copy_(held)

    _receive(ends, [[end.packets for end in each] for each in ends], transport, patience, empty)
    seconds = time.monotonic() - started
    return Received(payload_bytes(ends, dtype), transport.peak_bytes, seconds)


def _plain(ends: Ends) -> Rounds:
    """One packet per parcel, in memory that every other round uses again."""
    sizes = [[sum(packet.nbytes for packet in end.packets) for end in each] for each in ends]
    largest = max(map(sum, sizes))
    rounds = []
    for number, lengths in enumerate(sizes):
        buffers = _memory(number % 2, largest)[: sum(lengths)].split(lengths) if lengths else ()
        rounds.append([[Packet([], each.nbytes, each)] for each in buffers])
    return rounds


def _most(rounds: Rounds) -> int:
    sizes = [sum(packet.nbytes for packets in each for packet in packets) for each in rounds]
    return 2 * max(sizes)


@functools.cache
def _memory(half: int, size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


@torch.no_grad()
def _send(
    ends: Ends,
    rounds: Rounds,
    transport: GroupTransport,
    patience: Patience,
    fill: Callable[[Packet], None] | None = None,
) -> None:
    """As `parcels.send`. fill: makes a packet ready; None: it is."""
    flying: list[Work] = []
    for each, held in zip((*ends, ()), (*rounds, ()), strict=True):
        if fill is not None:
            transport.lend(held, patience, is_sender=True)
            _apply(fill, held)
        works = transport.send([end.peer for end in each], held)
        _wait(flying, patience)
        flying = [work for parcel in works for work in parcel]


@torch.no_grad()
def _receive(
    ends: Ends,
    rounds: Rounds,
    transport: GroupTransport,
    patience: Patience,
    empty: Callable[[Packet], None] | None = None,
) -> None:
    """As `parcels.receive`. empty: takes a packet that has arrived; None: it is discarded."""
    arrived: Sequence[list[Packet]] = ()
    for each, held in zip((*ends, ()), (*rounds, ()), strict=True):
        if empty is not None:
            transport.lend(held, patience, is_sender=False)
        works, onward = transport.receive([end.peer for end in each], held, arrived)
        if empty is not None:
            _apply(empty, arrived)
        _wait([*onward, *(work for parcel in works for work in parcel)], patience)
        arrived = held


def _broadcast(ends: Ends, rounds: Rounds, transport: GroupTransport, patience: Patience) -> None:
    """All parcels of a lane by its root's broadcasts, two rounds in flight."""
    flying: list[Work] = []
    for each, held in zip((*ends, ()), (*rounds, ()), strict=True):
        works = []
        for end, packets in zip(each, held, strict=True):
            # At the root the peer is the receiver, whose lane it is.
            lane = transport._lanes.get(end.peer) or next(iter(transport._lanes.values()))
            for packet in packets:
                work = dist.broadcast(packet.data, group_src=0, group=lane.group, async_op=True)
                works.append(work)
        _wait(flying, patience)
        flying = works


def _apply(function: Callable[[Packet], None], parcels: Sequence[list[Packet]]) -> None:
    for packet in (packet for packets in parcels for packet in packets):
        function(packet)


def _wait(works: Sequence[Work], patience: Patience) -> None:
    for work in works:
        wait_until(work, patience.ends_at())


def _send_plain(
    move: Move, ends: Ends, transport: GroupTransport, *, patience: Patience, **_: object
) -> int:
    """`parcels.send` of plain bytes by `move`."""
    rounds = _plain(ends)
    move(ends, rounds, transport, patience)
    return _most(rounds)


def _receive_plain(
    move: Move,
    ends: Ends,
    transport: GroupTransport,
    *,
    dtype: torch.dtype,
    patience: Patience,
    **_: object,
) -> Received:
    """`parcels.receive` of plain bytes by `move`, which are discarded."""
    started, rounds = time.monotonic(), _plain(ends)
    move(ends, rounds, transport, patience)
    return Received(payload_bytes(ends, dtype), _most(rounds), time.monotonic() - started)


SEND = {
    RAW: partial(_send_plain, _send),
    FLOOR: send_floor,
    GLOO: partial(_send_plain, _broadcast),
}
RECEIVE = {
    RAW: partial(_receive_plain, _receive),
    FLOOR: receive_floor,
    GLOO: partial(_receive_plain, _broadcast),
}


@contextmanager
def limited_links(bytes_per_s: int) -> Iterator[None]:
    """In the block, each gloo connection of an exchange sends at most `bytes_per_s`; 0: no limit.

    In a sender this limits an engine rank served by one rank, as if it had its own link. The kernel
    delays the packets of a full link; the sender's other connections continue.
    """
    connect = lanes.connect_group

    def connect_limited(*arguments: object) -> None:
        connect(*arguments)
        limit_connections(bytes_per_s)

    with patch.object(lanes, "connect_group", connect_limited if bytes_per_s else connect):
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
