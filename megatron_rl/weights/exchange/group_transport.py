"""Packets through process groups: each byte is sent and received at most once by each rank.

Shared by trainer ranks and engines; needs torch and messages alone.

Rank r of every engine needs the same bytes. A *lane* is a process group of the trainer ranks that
have something for rank r, its roots, and of rank r of each engine. A root sends a packet once, to
the first engine; each engine hands it on to the next one, while the following round arrives:

    root ──> engine 1 ──> engine 2 ──> engine 3

No two ranks can wait for each other forever: engine k works on round t - k when a root works on
round t, so all operations have one order in time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.folder_transport import FolderTransport
from megatron_rl.weights.exchange.group import (
    close_group,
    is_of_devices,
    join_group,
    start_batch,
)
from megatron_rl.weights.exchange.orders import Call
from megatron_rl.weights.exchange.plan import Plan
from megatron_rl.weights.exchange.shared_transport import SharedTransport
from megatron_rl.weights.exchange.transport import FOLDER, IPC, Round, Transport, Wait


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
        return self.sources[0 if self.place else self.roots.index(sender)]

    @property
    def sources(self) -> Sequence[int]:
        """All who hand parcels to this engine, as ranks in the group."""
        if self.place < 0:
            return ()
        return (self.first + self.place - 1,) if self.place else range(self.first)

    @property
    def next(self) -> int | None:
        """To whom this rank hands parcels on; None: it is the last engine."""
        return self.first + self.place + 1 if self.place + 1 < self.replicas else None


class GroupTransport(Transport):
    """Point to point in the lanes of this rank, which last while their engines stay together."""

    def __init__(self, store: dist.Store, rank: int, device: torch.device, backend: str) -> None:
        """backend: of the groups."""
        super().__init__(store, rank, device)
        self._backend = backend
        self._groups: dict[str, tuple[tuple[str, ...], dict[int, Lane]]] = {}
        """By name: its generators, and this rank's lanes by receiver."""

    @property
    def lanes(self) -> Mapping[int, Lane]:
        """The lanes of the present transfer, by receiver. An engine rank has one.

        Looked up, not kept: gloo's sockets close when nobody holds a group that was left.
        """
        return self._groups[self._call.group][1]

    def begin(self, call: Call, plan: Plan, *, replica: str = "", holds: int = -1) -> None:
        """The first transfer of a group forms its lanes; if that fails, `forget` must follow."""
        super().begin(call, plan, replica=replica, holds=holds)
        if call.group not in self._groups:
            # An engine is in one group at a time: it leaves the old one for the new one.
            self.forget(call.replicas)
            self._groups[call.group] = call.replicas, {}
            # In the same order on all trainer ranks.
            for receiver in [self._rank] if replica else plan.receivers:
                roots = tuple(plan.roots(receiver))
                if replica or self._rank in roots:
                    lane = self._join(receiver, roots, len(plan.receivers))
                    self._groups[call.group][1][receiver] = lane

    def _join(self, receiver: int, roots: tuple[int, ...], engine_ranks: int) -> Lane:
        call, replica = self._call, self._replica
        place = call.replicas.index(replica) if replica else -1
        group = join_group(
            self._store,
            len(roots) + place if replica else roots.index(self._rank),
            self._members(receiver, roots, engine_ranks),
            name=f"{call.group}/{receiver}",
            backend=self._backend,
            timeout_s=self.left().total_seconds(),
        )
        lane = Lane(group, roots, len(call.replicas), place)
        try:
            self._meet(lane)
        except RuntimeError:
            # A begun transfer must not continue during training.
            close_group(group)
            raise
        return lane

    def _meet(self, lane: Lane) -> None:
        """Send an element along the lane. Raises RuntimeError when the others do not come in time.

        NCCL connects the ranks in a group's first operation, where all must take part; a round may
        leave some out. Not in a collective, for which NCCL would keep a GB of buffers.
        """
        ends = [(dist.irecv, rank) for rank in lane.sources]
        if lane.next is not None:
            ends.append((dist.isend, lane.next))
        ops = [
            _op(operation, torch.zeros(1, device=self._device), lane, rank)
            for operation, rank in ends
        ]
        self._wait(self._start(ops))

    def _members(self, receiver: int, roots: tuple[int, ...], engine_ranks: int) -> list[int]:
        """The plan's numbers, continued by the ranks of each further engine."""
        engines = range(len(self._call.replicas))
        return [*roots, *(receiver + engine_ranks * number for number in engines)]

    def send(self, parcels: Round) -> Wait:
        """Start the packets of a lane together."""
        works: list[dist.Work] = []
        for end in parcels:
            lane = self.lanes[end.peer]
            works += self._start(
                [_op(dist.isend, each.data, lane, lane.first) for each in end.packets]
            )
        return lambda: self._wait(works)

    def receive(self, parcels: Round, onward: Round) -> Wait:
        """Start both in one batch: over NCCL the one would otherwise wait for the other."""
        [lane] = self.lanes.values()
        ops = [
            _op(dist.irecv, packet.data, lane, lane.source(end.peer))
            for end in parcels
            for packet in end.packets
        ]
        if (to := lane.next) is not None:
            ops += [
                _op(dist.isend, packet.data, lane, to) for end in onward for packet in end.packets
            ]
        works = self._start(ops)
        return lambda: self._wait(works)

    def _start(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        if not ops:
            return []
        if is_of_devices(self._backend):
            return start_batch(ops, self._device)
        return dist.batch_isend_irecv(ops)

    def _wait(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait(self.left())

    def forget(self, replicas: Iterable[str]) -> None:
        """Leave all groups with these generators. Peers that wait for this rank there fail."""
        for name, (members, lanes) in list(self._groups.items()):
            if not set(members).isdisjoint(replicas):
                del self._groups[name]
                for lane in lanes.values():
                    close_group(lane.group)

    def close(self) -> None:
        """Leave all groups."""
        for members, _ in list(self._groups.values()):
            self.forget(members)


def _op(operation: Callable[..., object], data: Tensor, lane: Lane, peer: int) -> dist.P2POp:
    # By group_peer, the rank in the group: its members share no default group, so a global rank
    # means nothing to them.
    return dist.P2POp(operation, data, group=lane.group, group_peer=peer)


def open_transport(
    store: dist.Store, rank: int, device: torch.device, *, backend: str, dtype: torch.dtype,
    folder: str, syncer: str = "",
) -> Transport:  # fmt: skip
    """The transport of a backend; dtype, folder, syncer: see `FolderTransport`."""
    if backend == FOLDER:
        return FolderTransport(store, rank, device, Folder(folder), dtype, syncer)
    if backend == IPC:
        return SharedTransport(store, rank, device)
    return GroupTransport(store, rank, device, backend)
