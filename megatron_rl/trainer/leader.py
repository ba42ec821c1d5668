"""What one rank of each model replica has, on all ranks of its replica.

Used by trainer ranks. Only the leader of a replica, its first rank, talks to other processes.
"""

import torch
import torch.distributed as dist

TURN_S = 2.0
"""How long a leader waits between two collectives: well below train.collective_timeout_s."""


class FromLeader:
    """Broadcasts within a replica, and agreement among all of them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        world: dist.ProcessGroup | None = None,
    ) -> None:
        """group: the ranks of this rank's replica; world: all trainer ranks, by default."""
        self._group, self._device, self._world = group, device, world
        self._leader = dist.get_global_rank(group, 0)
        self.is_leader = group.rank() == 0

    def broadcast(self, frame: bytes | None) -> bytes:
        """The leader's frame, on every rank of the replica."""
        size = torch.tensor([len(frame or b"")], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=self._leader, group=self._group)
        if not int(size):
            return b""
        if frame is None:
            payload = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        else:
            payload = torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(self._device)
        dist.broadcast(payload, src=self._leader, group=self._group)
        return payload.cpu().numpy().tobytes()

    def all_have(self, frame: bytes) -> bool:
        """Whether every trainer rank has one."""
        flag = torch.tensor([bool(frame)], dtype=torch.int64, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._world)
        return bool(flag)
