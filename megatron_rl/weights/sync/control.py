"""Agreement of trainer ranks on values, and on whether all ranks succeeded.

Runs on every trainer rank, in its main thread, over one group for host memory.
"""

from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

T = TypeVar("T")
PIECE_BYTES = 64 << 20
"""A frame is broadcast in pieces of at most this size."""


def broadcast(frame: bytearray | None, group: dist.ProcessGroup) -> bytearray:
    """The frame of the group's first rank, on all its ranks; the other ranks pass None.

    Each rank holds the frame once. Collective over the group, whose tensors lie in host memory.
    """
    source = dist.get_global_rank(group, 0)
    size = torch.tensor([len(frame or b"")])
    dist.broadcast(size, src=source, group=group)
    received = bytearray(int(size)) if frame is None else frame
    if received:
        for piece in torch.frombuffer(received, dtype=torch.uint8).split(PIECE_BYTES):
            dist.broadcast(piece, src=source, group=group)
    return received


class Control:
    """A channel for small values over all trainer ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """group: of all trainer ranks, for tensors in host memory."""
        self._group = group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def share(self, value: Any, kind: type[T]) -> T:
        """Return rank 0's value on every rank; values of other ranks are ignored."""
        frame = bytearray(msgspec.msgpack.encode(value)) if self.rank == 0 else None
        return msgspec.msgpack.decode(broadcast(frame, self._group), type=kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        frame = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(frame)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(frame)] = frame
        frames = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(frames, padded, group=self._group)
        return [
            msgspec.msgpack.decode(frame[: int(size)].numpy().tobytes(), type=kind)
            for frame, size in zip(frames, sizes, strict=True)
        ]

    def all(self, is_good: bool, timeout_s: float = 0.0) -> bool:
        """Return whether `is_good` holds on every rank.

        timeout_s: how long to wait for the other ranks; 0: as long as the group allows. Raises
        RuntimeError (torch's own) when it has passed.
        """
        flag = torch.tensor([int(is_good)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        work.wait(timedelta(seconds=timeout_s))
        return bool(flag)
