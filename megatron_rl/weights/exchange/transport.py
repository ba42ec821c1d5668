"""How packets get from trainer ranks to engine ranks: a process group, or memory that both share.

Shared by trainer ranks and engines; needs torch and messages alone. `Channel` is what one rank
keeps between the transfers to one generator, a `Transport` serves one transfer.

Over a group two rounds are in flight, whose buffers lie in two spaces that are used in turn: on the
ranks' devices or, with HOST, in host memory wherever the parameters lie. In shared memory there are
the sender's two spaces alone: receivers copy from them into their parameters. Both sides speak
about them by keys of the exchange's store; K counts the parcels of one sender to one receiver:

| key | set by | says |
|---|---|---|
| `full/ATTEMPT/SENDER/RECEIVER/K` | sender | where the parcel lies |
| `taken/ATTEMPT/SENDER/RECEIVER/K` | receiver | its place may be used again |
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.group import (
    Work,
    close_group,
    connect_group,
    is_of_devices,
    join_group,
    start_batch,
)
from megatron_rl.weights.exchange.memory import Handle, SharedMemory, open_shared, synchronize
from megatron_rl.weights.exchange.packets import Packet

IPC = "ipc"
"""In the place of a collective backend: shared memory."""
HOST = "host"
"""In its place: gloo, by way of host memory. No kernel waits for another rank."""
_GLANCE_S = 0.5
"""How often a sender that waits for a receiver looks whether that one has given up."""
Parcels = Sequence[list[Packet]]


class Transport(Protocol):
    """One end of a transfer. Peers are ranks among those of the trainer and the engine."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes of buffers at once."""

    def lend(self, parcels: Parcels, ends_at: float, *, is_sender: bool) -> None:
        """Give the staged packets of the next round their buffers."""

    def send(self, peers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Start a work for each packet of each parcel."""

    def receive(self, peers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Start a work for each packet; it has its bytes when the work is over."""

    def release(self, peers: Sequence[int]) -> None:
        """A receiver needs one more parcel's bytes no longer: the oldest of each of these senders.

        Called when the parcel's content is in the parameters, once a parcel, in the order of
        `receive`. Senders whose buffers the receiver reads may fill them anew from then on.
        """

    def finish(self, ends_at: float) -> None:
        """On a sender: wait until its buffers are needed no more."""


def stages_all(backend: str) -> bool:
    """Whether packets never lie in the parameters themselves; the same at both ends."""
    return backend in (IPC, HOST)


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


class GroupTransport:
    """Point to point in a process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        buffers: Buffers,
        *,
        is_pinned: bool = False,
    ) -> None:
        """device: of the buffers; is_pinned: they lie in host memory, and what they are filled from
        or copied to does not."""
        self._group, self._device, self._buffers = group, device, buffers
        self._is_pinned = is_pinned
        self._has_devices = is_of_devices(dist.get_backend(group))

    @property
    def peak_bytes(self) -> int:
        """Most bytes of buffers at once."""
        return self._buffers.nbytes

    def lend(self, parcels: Parcels, ends_at: float, *, is_sender: bool) -> None:
        """In the space of the last but one round, whose packets have arrived by now."""
        packets = _staged(parcels)
        size = sum(packet.nbytes for packet in packets)
        _deal(packets, self._buffers.next(size, self._device, is_pinned=self._is_pinned))

    def send(self, peers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Start a work for each packet of each parcel."""
        return self._start(dist.isend, peers, parcels)

    def receive(self, peers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Start a work for each packet of each parcel."""
        return self._start(dist.irecv, peers, parcels)

    def _start(
        self, operation: Callable[..., object], peers: Sequence[int], parcels: Parcels
    ) -> list[list[Work]]:
        # By group_peer, the rank in the group: its members share no default group, so a global rank
        # means nothing to them.
        ops = [
            dist.P2POp(operation, packet.data, group=self._group, group_peer=peer)
            for peer, packets in zip(peers, parcels, strict=True)
            for packet in packets
        ]
        works = self._started(ops) if ops else []
        # gloo returns a work for each operation, NCCL a single one for the whole batch.
        each = iter(works if len(works) == len(ops) else works * len(ops))
        return [[next(each) for _ in packets] for packets in parcels]

    def _started(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        if self._has_devices:
            return start_batch(ops, self._device)
        return dist.batch_isend_irecv(ops)

    def release(self, peers: Sequence[int]) -> None:
        """Nothing: a sender learns of it from its works."""

    def finish(self, ends_at: float) -> None:
        """Nothing, for the same reason."""


class _Location(msgspec.Struct, frozen=True):
    """Where a parcel lies."""

    handle: Handle
    start: int
    """Bytes from the beginning."""


class SharedTransport:
    """Through memory of the sender that the receivers on the same host open."""

    def __init__(self, store: dist.Store, rank: int, attempt: int, device: torch.device) -> None:
        self._store, self._rank, self._attempt, self._device = store, rank, attempt, device
        self._halves: list[SharedMemory | None] = [None, None]
        self._in_use: list[list[tuple[int, str]]] = [[], []]
        """By half: (receiver, key that says it was taken) of each parcel there."""
        self._rounds = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._released: Counter[int] = Counter()
        self._opened: dict[Handle, Tensor] = {}
        self.peak_bytes = 0

    def lend(self, parcels: Parcels, ends_at: float, *, is_sender: bool) -> None:
        """On a sender: wait until the half is free; a receiver needs no buffer."""
        if not is_sender:
            return
        half = self._rounds % 2
        self._rounds += 1
        self._await_taken(half, ends_at)
        packets = _staged(parcels)
        size, held = sum(packet.nbytes for packet in packets), self._halves[half]
        if size and (held is None or held.tensor.nbytes < size):
            # Receivers that still have the old memory mapped keep it until the transfer ends.
            if held is not None:
                held.close()
            self._halves[half] = held = SharedMemory(size, self._device)
            lent = sum(each.tensor.nbytes for each in self._halves if each is not None)
            self.peak_bytes = max(self.peak_bytes, lent)
        if held is not None:
            _deal(packets, held.tensor)

    def send(self, peers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Say where the parcels lie; there is nothing to wait for."""
        half = (self._rounds - 1) % 2
        held, start = self._halves[half], 0
        # Another process reads this memory: the copies into it must have ended.
        synchronize(self._device)
        for peer, packets in zip(peers, parcels, strict=True):
            assert held is not None
            location = msgspec.json.encode(_Location(held.handle(), start))
            number = self._sent[peer]
            self._sent[peer] += 1
            self._store.set(self._key("full", self._rank, peer, number), location)
            self._in_use[half].append((peer, self._key("taken", self._rank, peer, number)))
            start += sum(packet.nbytes for packet in packets)
        # No works: when the memory may be used again is learnt from the keys, in `lend`.
        return [[] for _ in peers]

    def receive(self, peers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """The first work of a parcel gives all of its packets their bytes."""
        works: list[list[Work]] = []
        for peer, packets in zip(peers, parcels, strict=True):
            key = self._key("full", peer, self._rank, self._received[peer])
            self._received[peer] += 1
            arrival = _Arrival(self, key, packets)
            works.append([arrival] * len(packets))
        return works

    def arrive(self, key: str, packets: Sequence[Packet], timeout: timedelta) -> None:
        """Wait for a parcel and give its packets their bytes."""
        self._store.wait([key], timeout)
        location = msgspec.json.decode(self._store.get(key), type=_Location)
        # No key is used twice; left there, they would pile up in the store with every weight sync.
        self._store.delete_key(key)
        handle = location.handle
        # A half serves many parcels, but is mapped into this process once a transfer.
        if handle not in self._opened:
            self._opened[handle] = open_shared(handle)
        _deal(packets, self._opened[handle][location.start :])

    def release(self, peers: Sequence[int]) -> None:
        """Tell the senders by the keys `taken/...`, which `_await_taken` waits for."""
        # The copies into the parameters may still run on the device.
        synchronize(self._device)
        for peer in peers:
            number = self._released[peer]
            self._released[peer] += 1
            self._store.set(self._key("taken", peer, self._rank, number), b"")

    def finish(self, ends_at: float) -> None:
        """Wait until all has been taken, and give the memory back."""
        for half, held in enumerate(self._halves):
            self._await_taken(half, ends_at)
            if held is not None:
                held.close()
        self._halves = [None, None]

    def _await_taken(self, half: int, ends_at: float) -> None:
        for receiver, key in self._in_use[half]:
            # A receiver that fails sets its report, and never the key.
            report = f"done/{self._attempt}/{receiver}"
            while not self._store.check([key]):
                # A sound receiver sets the key and then its report, maybe both since the last look.
                if self._store.check([report]) and not self._store.check([key]):
                    raise RuntimeError(f"engine rank {receiver} gave up")
                if time.monotonic() > ends_at:
                    raise RuntimeError("the exchange of weights passed its deadline")
                self._glance(key)
            self._store.delete_key(key)
        self._in_use[half].clear()

    def _glance(self, key: str) -> None:
        """Wait for a key, but not longer than a look at the report may be late."""
        try:
            self._store.wait([key], timedelta(seconds=_GLANCE_S))
        except dist.DistStoreError:
            return

    def _key(self, kind: str, sender: int, receiver: int, number: int) -> str:
        return f"{kind}/{self._attempt}/{sender}/{receiver}/{number}"


class _Arrival:
    """A parcel that a sender has put, or will put, into its shared memory."""

    def __init__(self, transport: SharedTransport, key: str, packets: Sequence[Packet]) -> None:
        self._transport, self._key, self._packets = transport, key, packets
        self._is_over = False

    def wait(self, timeout: timedelta) -> None:
        """Until it is there."""
        if not self._is_over:
            self._transport.arrive(self._key, self._packets, timeout)
        self._is_over = True


class Channel:
    """One rank's end of all transfers to one generator."""

    def __init__(self, store: dist.TCPStore, rank: int, buffers: Buffers) -> None:
        """rank: among the ranks of the trainer and the engine, in this order.

        buffers: no other channel uses them at the same time.
        """
        self.store, self.rank = store, rank
        self._buffers = buffers
        self._group: dist.ProcessGroup | None = None

    def open(self, order: Receive, device: torch.device, ends_at: float) -> Transport:
        """The transport of a transfer; the first one forms the group.

        Raises RuntimeError (torch's own) when that fails. device: of the parameters. ends_at:
        monotonic time.
        """
        if order.backend == IPC:
            return SharedTransport(self.store, self.rank, order.attempt, device)
        is_by_host = order.backend == HOST
        own = torch.device("cpu") if is_by_host else device
        if self._group is None:
            group = join_group(
                self.store,
                self.rank,
                order.world_size,
                name=order.group_name,
                backend=dist.Backend.GLOO if is_by_host else order.backend,
                timeout_s=max(0.001, ends_at - time.monotonic()),
            )
            # Backends connect the ranks in a group's first operation, where all must take part; a
            # round may leave some of them out.
            try:
                connect_group(group, own, ends_at)
            except RuntimeError:
                # A begun transfer must not continue during training.
                close_group(group)
                raise
            self._group = group
        is_pinned = own != device
        return GroupTransport(self._group, own, self._buffers, is_pinned=is_pinned)

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank there fail then."""
        if self._group is not None:
            close_group(self._group)
        self._group = None


def _staged(parcels: Parcels) -> list[Packet]:
    return [packet for packets in parcels for packet in packets if packet.is_staged]


def _deal(packets: Sequence[Packet], memory: Tensor) -> None:
    """Give the packets their bytes, one after the other."""
    start = 0
    for packet in packets:
        packet.data = memory[start : start + packet.nbytes]
        start += packet.nbytes
