"""The leader of a model replica reads from another process; every rank of the replica gets it.

Used by trainer ranks. The leader is the first rank of the replica, and the only one with sockets.
Frames pass host memory: ranks that wait for their leader leave the GPU to other work.
"""

from collections.abc import Callable

import torch.distributed as dist

from megatron_rl.weights.sync.control import Control, broadcast

TURN_S = 2.0
"""The longest time a leader polls between two collectives: well below
expert.train.collective_timeout_s."""


class Leader:
    """The leader of this rank's model replica."""

    def __init__(
        self, group: dist.ProcessGroup, control: Control, timeout_s: float = 600.0
    ) -> None:
        """group: the ranks of the replica, for tensors in host memory. control: all trainer ranks.

        timeout_s: how long a rank waits for the others after each poll.
        """
        self._group, self._control, self._timeout_s = group, control, timeout_s
        self.is_this_rank = group.rank() == 0

    def read(
        self,
        poll: Callable[[], bytearray],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bytearray:
        """The frame that `poll` returns on the leader, on every rank of the replica.

        poll: called on the leader; waits up to TURN_S, and returns an empty frame for "not yet".
        meanwhile: called on every rank between polls. Collective over all trainer ranks: returns
        when each replica has its frame. No collective waits longer than a poll, so the timeout of
        collectives can stay short.
        """
        frame = bytearray()
        while True:
            frame = frame or broadcast(poll() if self.is_this_rank else None, self._group)
            if self._control.all(bool(frame), self._timeout_s):
                return frame
            meanwhile()
