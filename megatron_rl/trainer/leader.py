"""Values of one rank of each model replica, on all ranks of its replica.

Used by trainer ranks. Only the leader of a replica, its first rank, talks to other processes.
Everything passes host memory: ranks that wait for their leader leave the GPU to other work.
"""

import torch
import torch.distributed as dist

from megatron_rl.weights.sync.control import Control

TURN_S = 2.0
"""How long a leader waits between two collectives: well below expert.train.collective_timeout_s."""
PIECE_BYTES = 64 << 20
"""A frame is broadcast in pieces of at most this size."""


class FromLeader:
    """Broadcasts within a replica, and agreement among all of them."""

    def __init__(
        self, group: dist.ProcessGroup, control: Control, timeout_s: float = 600.0
    ) -> None:
        """group: the ranks of this rank's replica, for tensors in host memory.

        timeout_s: how long one rank waits for the others between two turns.
        """
        self._group, self._control, self._timeout_s = group, control, timeout_s
        self._leader = dist.get_global_rank(group, 0)
        self.is_leader = group.rank() == 0

    def broadcast(self, frame: bytearray | None) -> bytearray:
        """The leader's frame, on every rank of the replica; each rank holds it once."""
        size = torch.tensor([len(frame or b"")])
        dist.broadcast(size, src=self._leader, group=self._group)
        received = bytearray(int(size)) if frame is None else frame
        if received:
            for piece in torch.frombuffer(received, dtype=torch.uint8).split(PIECE_BYTES):
                dist.broadcast(piece, src=self._leader, group=self._group)
        return received

    def all_have(self, frame: bytearray) -> bool:
        """Whether every trainer rank has one."""
        return self._control.all(bool(frame), self._timeout_s)
