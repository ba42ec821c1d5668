"""Publishing weights to the generators.

Runs in trainer ranks. Rank 0 exchanges Hello, JoinGroup, Pause, Bucket, Resume, LeaveGroup and
their Acks with the generators and broadcasts flattened buckets over the weight group; the other
ranks only take part in gathering tensors. Every wait has a deadline, and a generator's Failed ends
a broadcast that would else wait for ever.

What a bucket holds is the business of the `source`: any exchange that yields (names, tensors)
fits, e.g. gather-and-broadcast here, or a shard-to-shard plan later.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import (
    Ack,
    AnyMessage,
    Bucket,
    Failed,
    Hello,
    JoinGroup,
    LeaveGroup,
    Pause,
    Resume,
)
from megatron_rl.protocol.wire import DeadlineExceeded, Router
from megatron_rl.weights.group import close_group, open_group

log = logging.getLogger(__name__)

Buckets = Iterator[list[tuple[str, Tensor]]]
"""Full tensors under HF names, in buckets; empty on ranks other than 0."""

_POLL_S = 0.002


class PublishError(RuntimeError):
    """A generator could not take the weights; the text has its reason."""


class WeightPublisher:
    """Owns the weights endpoint and the weight group of a training phase."""

    def __init__(self, source: Callable[[], Buckets], link: "GeneratorLink | None") -> None:
        """source: called on every rank for each publish; link: rank 0 only."""
        self._source = source
        self._link = link
        self.metrics: list[Metric] = []
        """Of the last publish."""

    @property
    def engines(self) -> list[Hello]:
        """What each generator said of itself; [] on ranks other than 0."""
        return self._link.engines if self._link is not None else []

    def publish(self, version: int) -> None:
        """Bring all generators to `version`. Every rank calls it."""
        started = time.monotonic()
        for bucket in self._source():
            if self._link is not None:
                self._link.send_bucket(bucket, version)
        if self._link is not None:
            self._link.resume(version)
        self.metrics = [Metric("publish/s", time.monotonic() - started, "max")]

    def close(self) -> None:
        """Let the generators leave the weight group."""
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class GeneratorLink:
    """Rank 0's side of the conversation with all generators."""

    def __init__(
        self, router: Router, *, replicas: int, timeout_s: float, join_timeout_s: float
    ) -> None:
        self._router = router
        self._replicas = replicas
        self._timeout_s, self._join_timeout_s = timeout_s, join_timeout_s
        self._peers: dict[str, Hello] = {}
        self._group: dist.ProcessGroup | None = None
        self._is_paused = False

    @property
    def engines(self) -> list[Hello]:
        """What each generator said of itself."""
        return list(self._peers.values())

    def open(self, address: str, backend: str, group_name: str) -> None:
        """Wait for all generators and form the weight group with them, as its rank 0."""
        self._await_hellos()
        port = free_port(address)
        world_size = 1 + sum(hello.world_size for hello in self._peers.values())
        offset = 1
        for peer, hello in self._peers.items():
            join = JoinGroup(
                address, port, offset, world_size, group_name, backend, self._timeout_s
            )
            self._send(peer, join)
            offset += hello.world_size
        self._group = open_group(address, port, 0, world_size, group_name, backend, self._timeout_s)
        self._await_acks("JoinGroup")
        log.info("weight group of %d ranks is up", world_size)

    def send_bucket(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        """Broadcast one bucket; pauses the generators before the first one of a publish."""
        if not self._is_paused:
            self._send_all(Pause())
            self._await_acks("Pause")
            self._is_paused = True
        message = Bucket(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            version=version,
        )
        flat = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for _, tensor in bucket])
        self._send_all(message)
        early = self._broadcast(flat)
        self._await_acks("Bucket", waiting=set(self._peers) - early)

    def resume(self, version: int) -> None:
        """Let the generators continue under `version`."""
        self._send_all(Resume(version))
        self._await_acks("Resume")
        self._is_paused = False

    def close(self) -> None:
        """Dissolve the weight group; generators that are gone already do not matter."""
        if self._group is not None:
            for peer in self._peers:
                self._router.send(peer, LeaveGroup())
            close_group(self._group)
            self._group = None

    def _await_hellos(self) -> None:
        deadline = time.monotonic() + self._join_timeout_s
        while len(self._peers) < self._replicas:
            received = self._router.receive(deadline - time.monotonic())
            if received is None:
                raise DeadlineExceeded(
                    f"{len(self._peers)} of {self._replicas} generators said hello in "
                    f"{self._join_timeout_s:.0f} s: see logs/generator-*.log"
                )
            peer, message = received
            if isinstance(message, Hello):
                self._peers[peer] = message

    def _send(self, peer: str, message: AnyMessage) -> None:
        if not self._router.send(peer, message):
            raise PublishError(f"{peer} is gone; could not send {type(message).__name__}")

    def _send_all(self, message: AnyMessage) -> None:
        for peer in self._peers:
            self._send(peer, message)

    def _await_acks(self, name: str, waiting: set[str] | None = None) -> None:
        waiting = set(self._peers) if waiting is None else waiting
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            received = self._router.receive(deadline - time.monotonic())
            if received is None:
                raise DeadlineExceeded(
                    f"no answer to {name} from {sorted(waiting)} in {self._timeout_s:.0f} s"
                )
            peer, message = received
            _raise_if_failed(peer, message)
            if isinstance(message, Ack) and message.done == name:
                waiting.discard(peer)

    def _broadcast(self, flat: Tensor) -> set[str]:
        """Broadcast, ended early by a generator's Failed and late by the deadline.

        Returns the generators that acknowledged the bucket meanwhile.
        """
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + self._timeout_s
        acknowledged: set[str] = set()
        while not work.is_completed():
            received = self._router.receive(_POLL_S)
            if received is not None:
                peer, message = received
                _raise_if_failed(peer, message)
                if isinstance(message, Ack) and message.done == "Bucket":
                    acknowledged.add(peer)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"a broadcast of weights took over {self._timeout_s:.0f} s")
        work.wait(timedelta(seconds=self._timeout_s))
        return acknowledged


def free_port(address: str) -> int:
    """A port that nothing listens on now, for the weight group's rendezvous."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _raise_if_failed(peer: str, message: AnyMessage) -> None:
    if isinstance(message, Failed):
        raise PublishError(f"{peer} failed at {message.doing}: {message.reason}")
