"""The process groups of one rank: made for a set of engines, kept from transfer to transfer.

Shared by trainer ranks and engines; needs torch and messages alone.
"""

import time

import torch
import torch.distributed as dist

from megatron_rl.weights.exchange.group import Patience, close_group, connect_group, join_group
from megatron_rl.weights.exchange.plan import Plan
from megatron_rl.weights.exchange.shared_transport import SharedTransport
from megatron_rl.weights.exchange.transport import (
    IPC,
    Buffers,
    GroupTransport,
    Lane,
    Round,
    Transport,
)


class Lanes:
    """One rank's lanes with a set of engines, from its first transfer on."""

    def __init__(self, store: dist.TCPStore, plan: Plan, rank: int, buffers: Buffers) -> None:
        """rank: of the plan. buffers: nobody else uses them during a transfer."""
        self._store, self._plan, self._rank, self._buffers = store, plan, rank, buffers
        self._lanes: dict[int, Lane] | None = None

    def open(
        self,
        order: Round,
        backend: str,
        device: torch.device,
        patience: Patience,
        replica: str = "",
    ) -> Transport:
        """The transport of a transfer; the first one forms the groups.

        device: of the parameters. replica: of an engine rank. Raises RuntimeError (torch's own)
        when that fails; then there is nothing but `close`.
        """
        first = self._plan.senders
        if backend == IPC:
            return SharedTransport(self._store, order, first, self._rank, device, replica)
        if self._lanes is None:
            self._lanes = {}
            place = order.replicas.index(replica) if replica else -1
            receivers = [self._rank] if replica else self._plan.receivers
            # In the same order on all trainer ranks; an engine rank has a single one.
            for receiver in receivers:
                roots = tuple(self._plan.roots(receiver))
                if replica or self._rank in roots:
                    rank = len(roots) + place if replica else roots.index(self._rank)
                    group = self._join(order, receiver, len(roots), rank, backend, device, patience)
                    self._lanes[receiver] = Lane(group, roots, len(order.replicas), place)
        return GroupTransport(self._lanes, device, self._buffers)

    def _join(
        self, order: Round, receiver: int, roots: int, rank: int, backend: str,
        device: torch.device, patience: Patience,
    ) -> dist.ProcessGroup:  # fmt: skip
        group = join_group(
            self._store,
            rank,
            roots + len(order.replicas),
            name=f"{order.group}/{receiver}",
            backend=backend,
            timeout_s=max(0.001, patience.ends_at() - time.monotonic()),
        )
        # Backends connect the ranks in a group's first operation, where all must take part; a
        # round may leave some of them out.
        try:
            connect_group(group, device, patience.ends_at())
        except RuntimeError:
            # A begun transfer must not continue during training.
            close_group(group)
            raise
        return group

    def close(self) -> None:
        """Leave the groups. Peers that wait for this rank there fail then."""
        for lane in (self._lanes or {}).values():
            close_group(lane.group)
        self._lanes = None
