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
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.exchange.memory import Handle, SharedMemory, open_shared, synchronize
from megatron_rl.weights.exchange.orders import Call, key
from megatron_rl.weights.exchange.packets import ParcelEnd
from megatron_rl.weights.exchange.plan import Plan
from megatron_rl.weights.exchange.transport import Round, Transport, Wait, deal

_GLANCE = timedelta(seconds=0.5)
"""How often a sender that waits for a receiver looks whether that one has given up."""


class Location(msgspec.Struct, frozen=True):
    """Where a parcel lies."""

    handle: Handle
    start: int
    """Bytes from the beginning."""


class SharedTransport(Transport):
    """Through memory of the sender that the receivers on the same host open."""

    stages_all = True

    def __init__(self, store: dist.Store, rank: int, device: torch.device) -> None:
        super().__init__(store, rank, device)
        self._memories: dict[int, SharedMemory] = {}
        """Of this sender, by half."""
        self._in_use: list[list[tuple[int, str, str]]] = [[], []]
        """By half: (receiver, key `full/...`, key `taken/...`) of each parcel there."""
        self._opened: dict[Handle, Tensor] = {}
        """Of senders: a half serves many parcels, but is mapped once a transfer."""

    def begin(self, call: Call, plan: Plan, *, replica: str = "", holds: int = -1) -> None:
        self.close()
        super().begin(call, plan, replica=replica, holds=holds)
        self._first_receiver = plan.senders

    def lend(self, parcels: Round) -> None:
        """On a sender: wait until the half is free; a receiver needs no buffer."""
        if not self._replica:
            self._await_taken(1 - self._half)
            super().lend(parcels)

    def _allocate(self, size: int) -> Tensor:
        # Receivers that still have the old memory mapped keep it until the transfer ends.
        if (old := self._memories.pop(self._half, None)) is not None:
            old.close()
            del old
        self._memories[self._half] = SharedMemory(size, self._device)
        return self._memories[self._half].tensor

    def send(self, parcels: Round) -> Wait:
        """Say where the parcels lie; there is nothing to wait for."""
        # Another process reads this memory: the copies into it must have ended.
        synchronize(self._device)
        start = 0
        for end in parcels:
            full = self._next_key("full", self._rank, end.peer)
            taken = self._next_key("taken", self._rank, end.peer)
            location = Location(self._memories[self._half].handle(), start)
            self._store.set(full, msgspec.json.encode(location))
            self._in_use[self._half].append((end.peer, full, taken))
            start += end.nbytes
        # When the memory may be used again is learnt from the keys, in `lend`.
        return lambda: None

    def receive(self, parcels: Round, onward: Round) -> Wait:
        """Each parcel gets its bytes when it is waited for; none is handed on."""
        keys = [self._next_key("full", end.peer, self._rank) for end in parcels]

        def arrive() -> None:
            for full, end in zip(keys, parcels, strict=True):
                self._arrive(full, end)

        return arrive

    def _arrive(self, full: str, end: ParcelEnd) -> None:
        self._store.wait([full], self.left())
        location = msgspec.json.decode(self._store.get(full), type=Location)
        if location.handle not in self._opened:
            self._opened[location.handle] = open_shared(location.handle)
        deal(end.packets, self._opened[location.handle][location.start :])

    def release(self, parcels: Round) -> None:
        """Tell the senders by the keys `taken/...`, which `_await_taken` waits for."""
        # The copies into the parameters may still run on the device.
        synchronize(self._device)
        for end in parcels:
            taken = self._next_key("taken", end.peer, self._rank)
            self._store.set(f"{taken}/{self._replica}", b"")

    def finish(self) -> None:
        """Wait until all has been taken, and give the memory back."""
        for half in (0, 1):
            self._await_taken(half)
        self.close()

    def forget(self, replicas: Iterable[str]) -> None:
        """There are no groups. A receiver that failed keeps nothing of the senders' memory."""
        self._opened = {}

    def close(self) -> None:
        """Let go of the memory: this rank's, and that of others."""
        for memory in self._memories.values():
            memory.close()
        self._memories, self._halves = {}, [None, None]
        self._in_use, self._opened = [[], []], {}

    def _await_taken(self, half: int) -> None:
        ends_at = self.ends_at()
        for receiver, full, taken in self._in_use[half]:
            for replica in self._call.replicas:
                self._await_one(receiver, replica, taken, ends_at)
            # No key is used twice; left there, they would pile up with every weight sync.
            self._store.delete_key(full)
        self._in_use[half].clear()

    def _await_one(self, receiver: int, replica: str, taken: str, ends_at: float) -> None:
        taken, engine_rank = f"{taken}/{replica}", receiver - self._first_receiver
        # A receiver that fails sets its report, and never the key.
        report = key("done", self._call.attempt, replica, engine_rank)
        while not self._store.check([taken]):
            # A sound receiver sets the key and then its report, maybe both since the last look.
            if self._store.check([report]) and not self._store.check([taken]):
                raise RuntimeError(f"rank {engine_rank} of {replica} gave up")
            if time.monotonic() > ends_at:
                raise RuntimeError(f"{replica} did not take its slices in time")
            # Not longer than a look at the report may be late.
            with suppress(dist.DistStoreError):
                self._store.wait([taken], _GLANCE)
        self._store.delete_key(taken)
