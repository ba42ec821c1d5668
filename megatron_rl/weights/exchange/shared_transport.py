"""Parcels through memory that trainer ranks share with engine ranks of the same host.

Shared by trainer ranks and engines; needs torch and messages alone. A sender's two spaces are used
in turn; receivers copy from them into their parameters, all engines at once. Both sides speak about
them by keys of the store; K counts the parcels of one sender to one receiver:

| key | set by | says |
|---|---|---|
| `full/ATTEMPT/SENDER/RECEIVER/K` | sender | where the parcel lies |
| `taken/ATTEMPT/SENDER/RECEIVER/K/REPLICA` | receiver | its place may be used again |
"""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.exchange.group import Patience, Work
from megatron_rl.weights.exchange.memory import Handle, SharedMemory, open_shared, synchronize
from megatron_rl.weights.exchange.packets import Packet
from megatron_rl.weights.exchange.transport import Parcels, Round, deal, parcel_key, staged

_GLANCE_S = 0.5
"""How often a sender that waits for a receiver looks whether that one has given up."""


def done_key(attempt: int, replica: str, rank: int) -> str:
    """Set by an engine rank to its report of a transfer. rank: among the engine's."""
    return f"done/{attempt}/{replica}/{rank}"


class _Location(msgspec.Struct, frozen=True):
    """Where a parcel lies."""

    handle: Handle
    start: int
    """Bytes from the beginning."""


class SharedTransport:
    """Through memory of the sender that the receivers on the same host open."""

    def __init__(
        self, store: dist.Store, order: Round, first: int, rank: int, device: torch.device,
        replica: str = "",
    ) -> None:  # fmt: skip
        """first: receiver that is an engine's rank 0. rank: in the plan. replica: of a receiver."""
        self._store, self._order, self._first = store, order, first
        self._rank, self._device, self._replica = rank, device, replica
        self._halves: list[SharedMemory | None] = [None, None]
        self._in_use: list[list[tuple[int, int]]] = [[], []]
        """By half: (receiver, number) of each parcel there."""
        self._rounds = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._released: Counter[int] = Counter()
        self._opened: dict[Handle, Tensor] = {}
        self.peak_bytes = 0

    def lend(self, parcels: Parcels, patience: Patience, *, is_sender: bool) -> None:
        """On a sender: wait until the half is free; a receiver needs no buffer."""
        if not is_sender:
            return
        half = self._rounds % 2
        self._rounds += 1
        self._await_taken(half, patience.ends_at())
        packets = staged(parcels)
        size, held = sum(packet.nbytes for packet in packets), self._halves[half]
        if size and (held is None or held.tensor.nbytes < size):
            # Receivers that still have the old memory mapped keep it until the transfer ends.
            if held is not None:
                held.close()
            self._halves[half] = held = SharedMemory(size, self._device)
            lent = sum(each.tensor.nbytes for each in self._halves if each is not None)
            self.peak_bytes = max(self.peak_bytes, lent)
        if held is not None:
            deal(packets, held.tensor)

    def send(self, receivers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Say where the parcels lie; there is nothing to wait for."""
        half = (self._rounds - 1) % 2
        held, start = self._halves[half], 0
        # Another process reads this memory: the copies into it must have ended.
        synchronize(self._device)
        for receiver, packets in zip(receivers, parcels, strict=True):
            assert held is not None
            location = msgspec.json.encode(_Location(held.handle(), start))
            number = self._sent[receiver]
            self._sent[receiver] += 1
            self._store.set(self._key("full", self._rank, receiver, number), location)
            self._in_use[half].append((receiver, number))
            start += sum(packet.nbytes for packet in packets)
        # No works: when the memory may be used again is learnt from the keys, in `lend`.
        return [[] for _ in receivers]

    def receive(
        self, senders: Sequence[int], parcels: Parcels, onward: Parcels
    ) -> tuple[list[list[Work]], list[Work]]:
        """The first work of a parcel gives all of its packets their bytes; none is handed on."""
        works: list[list[Work]] = []
        for sender, packets in zip(senders, parcels, strict=True):
            key = self._key("full", sender, self._rank, self._received[sender])
            self._received[sender] += 1
            arrival = _Arrival(self, key, packets)
            works.append([arrival] * len(packets))
        return works, []

    def arrive(self, key: str, packets: Sequence[Packet], timeout: timedelta) -> None:
        """Wait for a parcel and give its packets their bytes."""
        self._store.wait([key], timeout)
        location = msgspec.json.decode(self._store.get(key), type=_Location)
        handle = location.handle
        # A half serves many parcels, but is mapped into this process once a transfer.
        if handle not in self._opened:
            self._opened[handle] = open_shared(handle)
        deal(packets, self._opened[handle][location.start :])

    def release(self, senders: Sequence[int]) -> None:
        """Tell the senders by the keys `taken/...`, which `_await_taken` waits for."""
        # The copies into the parameters may still run on the device.
        synchronize(self._device)
        for sender in senders:
            number = self._released[sender]
            self._released[sender] += 1
            key = self._key("taken", sender, self._rank, number)
            self._store.set(f"{key}/{self._replica}", b"")

    def finish(self, patience: Patience) -> None:
        """Wait until all has been taken, and give the memory back."""
        for half, held in enumerate(self._halves):
            self._await_taken(half, patience.ends_at())
            if held is not None:
                held.close()
        self._halves = [None, None]

    def _await_taken(self, half: int, ends_at: float) -> None:
        for receiver, number in self._in_use[half]:
            for replica in self._order.replicas:
                self._await_one(receiver, number, replica, ends_at)
            # No key is used twice; left there, they would pile up with every weight sync.
            self._store.delete_key(self._key("full", self._rank, receiver, number))
        self._in_use[half].clear()

    def _await_one(self, receiver: int, number: int, replica: str, ends_at: float) -> None:
        key = f"{self._key('taken', self._rank, receiver, number)}/{replica}"
        # A receiver that fails sets its report, and never the key.
        report = done_key(self._order.attempt, replica, receiver - self._first)
        while not self._store.check([key]):
            # A sound receiver sets the key and then its report, maybe both since the last look.
            if self._store.check([report]) and not self._store.check([key]):
                raise RuntimeError(f"rank {receiver - self._first} of {replica} gave up")
            if time.monotonic() > ends_at:
                raise RuntimeError(f"{replica} did not take its slices in time")
            self._glance(key)
        self._store.delete_key(key)

    def _glance(self, key: str) -> None:
        """Wait for a key, but not longer than a look at the report may be late."""
        try:
            self._store.wait([key], timedelta(seconds=_GLANCE_S))
        except dist.DistStoreError:
            return

    def _key(self, kind: str, sender: int, receiver: int, number: int) -> str:
        return parcel_key(kind, self._order.attempt, sender, receiver, number)


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
