"""How packets get from trainer ranks to engine ranks: process groups, or memory that both share.

Shared by trainer ranks and engines; needs torch and messages alone. A `Transport` serves
one transfer; `lanes.py` opens it.

Rank r of every engine needs the same bytes. A *lane* is a process group of the trainer ranks that
have something for rank r, its roots, and of rank r of each engine. A root sends a packet once, to
the first engine; each engine hands it on to the next one, while the following round arrives:

    root ──> engine 1 ──> engine 2 ──> engine 3

So every rank sends and receives each byte at most once, and n engines take only n - 1 rounds longer
than one. No two ranks can wait for each other forever: engine k works on round t - k when a root
works on round t, so all operations have one order in time.

Two rounds are in flight, whose buffers lie in two spaces that are used in turn. In shared memory
there are the sender's two spaces alone (`shared_transport.py`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.exchange.group import (
    Patience,
    Work,
    is_of_devices,
    start_batch,
)
from megatron_rl.weights.exchange.packets import Packet

IPC = "ipc"
"""In the place of a collective backend: shared memory."""
FOLDER = "folder"
"""In its place: files in a folder. No kernel waits for another rank."""
Parcels = Sequence[list[Packet]]


class Round(msgspec.Struct, frozen=True):
    """What rank 0 tells all ranks of a transfer; or, without replicas, that there is none."""

    attempt: int
    version: int = -1
    layouts: int = 0
    """Number of the layouts in the store."""
    group: str = ""
    """Prefix of the lanes' names. The same name, the same groups."""
    replicas: tuple[str, ...] = ()
    """Generators that take part, in the order in which they hand the packets on."""
    left_s: float = 0.0
    """Until the transfer's deadline."""
    wait_s: float = 0.0
    """Most that a rank waits for one round of packets."""
    base: int = -1
    """With FOLDER: version that most of them hold, to which a difference may be added; -1: none."""
    needs_whole: bool = True
    """Whether some of them do not hold it."""
    keeps: bool = False
    """Whether senders keep what they send, for the next difference."""
    is_end: bool = False
    """The weight sync is over."""

    def patience(self) -> Patience:
        """The limits of the transfer's waits, from now on."""
        return Patience(time.monotonic() + self.left_s, self.wait_s)


class Transport(Protocol):
    """One end of a transfer. Peers are ranks of the plan."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes of buffers at once."""

    def lend(self, parcels: Parcels, patience: Patience, *, is_sender: bool) -> None:
        """Give the staged packets of the next round their buffers."""

    def send(self, receivers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Start a work for each packet of each parcel."""

    def receive(
        self, senders: Sequence[int], parcels: Parcels, onward: Parcels
    ) -> tuple[list[list[Work]], list[Work]]:
        """Start to receive a round, and to hand the one before on to the next engine.

        Returns a work for each packet of each parcel, which has its bytes when the work is over,
        and the works of `onward`.
        """

    def release(self, senders: Sequence[int]) -> None:
        """A receiver needs one more parcel's bytes no longer: the oldest of each of these senders.

        Called when the parcel's content is in the parameters, once a parcel, in the order of
        `receive`. Senders whose buffers the receiver reads may fill them anew from then on.
        """

    def finish(self, patience: Patience) -> None:
        """On a sender: wait until its buffers are needed no more."""


def stages_all(backend: str) -> bool:
    """Whether packets never lie in the parameters themselves; the same at both ends."""
    return backend in (IPC, FOLDER)


class Buffers:
    """Two spaces for the rounds of a rank's transfers, used in turn.

    Kept from one transfer to the next, which would otherwise spend a tenth of its time on getting
    memory; at most twice the bytes of a round.
    """

    def __init__(self) -> None:
        self._halves: list[Tensor | None] = [None, None]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Of both."""
        return sum(half.nbytes for half in self._halves if half is not None)

    def next(self, size: int, device: torch.device, *, is_pinned: bool = False) -> Tensor:
        """The space of the last but one call, or a larger one: [at least size] uint8.

        is_pinned: a device reaches it without a copy by the driver.
        """
        half = self._turn
        self._turn = 1 - half
        held = self._halves[half]
        if held is None or held.nbytes < size or held.device != device:
            # Let the old memory go first: both at once would be three spaces.
            held = self._halves[half] = None
            held = self._halves[half] = torch.empty(
                size, dtype=torch.uint8, device=device, pin_memory=is_pinned
            )
        return held

    def drop(self) -> None:
        """Give the memory back, where no transfer runs."""
        self._halves = [None, None]


@dataclass(frozen=True)
class Lane:
    """One rank's group for a rank of all engines."""

    group: dist.ProcessGroup
    roots: tuple[int, ...]
    """Trainer ranks in it, which come first."""
    replicas: int
    place: int = -1
    """Of this rank's engine among the engines; -1 on a trainer rank."""

    @property
    def first(self) -> int:
        """The first engine's rank in the group."""
        return len(self.roots)

    def source(self, sender: int) -> int:
        """Who hands a sender's parcels to this engine, as a rank in the group."""
        return self.first + self.place - 1 if self.place else self.roots.index(sender)

    @property
    def next(self) -> int | None:
        """To whom this engine hands parcels on; None: it is the last."""
        return self.first + self.place + 1 if self.place + 1 < self.replicas else None


class GroupTransport:
    """Point to point in the lanes of this rank."""

    def __init__(self, lanes: Mapping[int, Lane], device: torch.device, buffers: Buffers) -> None:
        """lanes: by receiver; an engine rank has one. device: of the buffers."""
        self._lanes, self._device, self._buffers = lanes, device, buffers

    @property
    def peak_bytes(self) -> int:
        """Most bytes of buffers at once."""
        return self._buffers.nbytes

    def lend(self, parcels: Parcels, patience: Patience, *, is_sender: bool) -> None:
        """In the space of the last but one round, whose packets have arrived by now."""
        packets = staged(parcels)
        size = sum(packet.nbytes for packet in packets)
        deal(packets, self._buffers.next(size, self._device))

    def send(self, receivers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Start a work for each packet of each parcel; those of a lane together."""
        works = []
        for receiver, packets in zip(receivers, parcels, strict=True):
            lane = self._lanes[receiver]
            works.append(self._start([_op(dist.isend, each, lane, lane.first) for each in packets]))
        return works

    def receive(
        self, senders: Sequence[int], parcels: Parcels, onward: Parcels
    ) -> tuple[list[list[Work]], list[Work]]:
        """Start both in one batch: over NCCL the one would otherwise wait for the other."""
        [lane] = self._lanes.values()
        ops = [
            _op(dist.irecv, packet, lane, lane.source(sender))
            for sender, packets in zip(senders, parcels, strict=True)
            for packet in packets
        ]
        received = len(ops)
        if (to := lane.next) is not None:
            ops += [_op(dist.isend, packet, lane, to) for each in onward for packet in each]
        works = self._start(ops)
        each = iter(works[:received])
        return [[next(each) for _ in packets] for packets in parcels], works[received:]

    def _start(self, ops: list[dist.P2POp]) -> list[Work]:
        if not ops:
            return []
        if is_of_devices(dist.get_backend(ops[0].group)):
            works = start_batch(ops, self._device)
        else:
            works = dist.batch_isend_irecv(ops)
        # gloo returns a work for each operation, NCCL a single one for the whole batch.
        return works if len(works) == len(ops) else works * len(ops)

    def release(self, senders: Sequence[int]) -> None:
        """Nothing: a sender learns of it from its works."""

    def finish(self, patience: Patience) -> None:
        """Nothing, for the same reason."""


def _op(operation: Callable[..., object], packet: Packet, lane: Lane, peer: int) -> dist.P2POp:
    # By group_peer, the rank in the group: its members share no default group, so a global rank
    # means nothing to them.
    return dist.P2POp(operation, packet.data, group=lane.group, group_peer=peer)


def parcel_key(kind: str, attempt: int, sender: int, receiver: int, number: int) -> str:
    """Key of the store about one parcel. number: among those of the sender to the receiver."""
    return f"{kind}/{attempt}/{sender}/{receiver}/{number}"


def staged(parcels: Parcels) -> list[Packet]:
    """The packets that need a buffer."""
    return [packet for packets in parcels for packet in packets if packet.is_staged]


def deal(packets: Sequence[Packet], memory: Tensor) -> None:
    """Give the packets their bytes, one after the other."""
    start = 0
    for packet in packets:
        packet.data = memory[start : start + packet.nbytes]
        start += packet.nbytes
