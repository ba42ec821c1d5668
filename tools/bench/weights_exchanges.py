"""Exchanges that tools.bench.weights compares the product's with: raw and floor.

They run in trainer ranks and in ranks of engines, in the place of `parcels.send` and `receive`.
`raw` is as many plain bytes in as few packets as can be. `floor` is the product's packets with what
no exchange can do without that sends from where slices lie and finds out damage: a digest at either
end, and copies of what lies in no run. Neither checks, agrees on or reports anything.
"""

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.weights.exchange.memory.digests import digest
from megatron_rl.weights.exchange.packets import Packet
from megatron_rl.weights.exchange.parcels import Ends, Received, payload_bytes
from megatron_rl.weights.exchange.transport import GroupTransport
from tools.bench.weights_figures import FLOOR, RAW


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


def send_floor(
    ends: Ends,
    transport: GroupTransport,
    *,
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> int:
    """As `parcels.send`, without checks: its packets, and digests of those that are copied."""

    def fill(packets: Sequence[Packet]) -> None:
        for packet in packets:
            for place, held in packet.staged(dtype):
                held.copy_(place)
            if packet.is_staged:
                digest(packet.payload)

    _exchange_packets(ends, transport, dist.isend, ends_at, before=fill)
    return transport.peak_bytes


def receive_floor(
    ends: Ends,
    transport: GroupTransport,
    *,
    dtype: torch.dtype,
    version: int,
    ends_at: float,
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
    before: Callable[[Sequence[Packet]], None] = lambda packets: None,
    after: Callable[[Packet], None] = lambda packet: None,
) -> None:
    """The packets from and to where they lie, two rounds in flight."""
    flying: list[tuple[Packet, dist.Work]] = []
    for parcels in (*ends, ()):
        held = [end.packets for end in parcels]
        transport.lend(held, ends_at, is_sender=operation is dist.isend)
        for packets in held:
            before(packets)
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
