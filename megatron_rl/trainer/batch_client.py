"""Batches from the rollout queue, for all ranks of the trainer.

Runs in trainer ranks. Exchanges NextBatch / RankBatch / Stop, Published, and SaveState / QueueState
with the queue. One leader per data-parallel replica (its first rank) talks to the queue and
broadcasts each answer, in the bytes that came, to all ranks that work on the same sequences
(tensor, context, pipeline). So the queue sees one peer per data-parallel rank, and every rank
decodes once.
"""

import time
from collections.abc import Callable

from megatron_rl.backend.profiling import span
from megatron_rl.protocol import wire
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import (
    NextBatch,
    Published,
    RankBatch,
    SaveState,
    Stop,
)
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from megatron_rl.trainer.leader import TURN_S, FromLeader

_ANSWER = RankBatch | Stop


class BatchClient(Closing):
    """Fetches this data-parallel rank's share of each batch."""

    def __init__(
        self,
        address: str,
        *,
        dp_rank: int,
        dp_size: int,
        replica: FromLeader,
        timeout_s: float,
        keys: Keys | None = None,
        label: str = "",
    ) -> None:
        """replica: of this rank."""
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._timeout_s = timeout_s
        self._replica = replica
        self._address, self._name, self._keys = address, f"trainer-{dp_rank}", keys
        self._label = label
        self._dealer = self._connect(self._name) if self._replica.is_leader else None
        self._aside: wire.Dealer | None = None
        self._requested_step = -1
        self.metrics: list[Metric] = []

    def _connect(self, name: str) -> wire.Dealer:
        return wire.Dealer(self._address, name, self._keys, label=self._label)

    def request(self, step: int) -> None:
        """Ask for the batch of `step` before it is needed: it comes while others work."""
        if self._dealer is not None and self._requested_step != step:
            self._dealer.send(NextBatch(step, self._dp_rank, self._dp_size))
        self._requested_step = step

    @span("wait for batch")
    def next(self, step: int, meanwhile: Callable[[], None] | None = None) -> RankBatch | None:
        """This rank's share of the batch of `step`; None when training ends.

        Every trainer rank must call it. meanwhile: collective over all trainer ranks, done again
        and again until each has its share. Raises DeadlineExceeded after timeout_s.
        """
        started = time.monotonic()
        self.request(step)
        frame = bytearray()
        # While the queue has no batch the leader broadcasts nothing, again and again: the others
        # wait in short collectives, so that the collective timeout can stay short too.
        while not self._replica.all_have(
            frame := frame or self._replica.broadcast(self._receive())
        ):
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() - started > self._timeout_s:
                raise DeadlineExceeded(
                    f"the queue had no batch for step {step} in {self._timeout_s:.0f} s "
                    "(train.batch_timeout_s + eval.timeout_s): see logs/queue.log"
                )
        batch = wire.decode_frames(wire.split_frames(frame), _ANSWER)
        self.metrics = [Metric("wait/batch_s", time.monotonic() - started, "max")]
        return None if isinstance(batch, Stop) else batch

    def announce(self, version: int, *, is_final: bool) -> None:
        """Tell the queue that all generators hold `version`."""
        if self._dealer is not None and self._dp_rank == 0:
            self._dealer.send(Published(version, is_final))

    def announce_aside(self, version: int) -> None:
        """As `announce`, by a thread other than the one that calls the other methods."""
        if self._dealer is not None and self._dp_rank == 0:
            # A socket serves one thread at a time, and `next` may be waiting at the other one.
            if self._aside is None:
                self._aside = self._connect(f"{self._name}-published")
            self._aside.send(Published(version, is_final=False))

    def queue_state(self, step: int, timeout_s: float) -> QueueState | None:
        """The queue's state after batch number `step`, on the first leader; None elsewhere.

        No request for a batch may be open. Raises DeadlineExceeded.
        """
        if self._dealer is None or self._dp_rank != 0:
            return None
        answer = self._dealer.request(SaveState(step), timeout_s)
        if not isinstance(answer, QueueState):
            raise WireError(f"the queue answered SaveState by {type(answer).__name__}")
        return answer

    def _receive(self) -> bytearray | None:
        """On the leader a message's frames joined, empty when none came for a while; else None."""
        if self._dealer is None:
            return None
        frames = self._dealer.receive_frames(TURN_S)
        return bytearray() if frames is None else wire.join_frames(frames)

    def close(self) -> None:
        """Close the leader's sockets."""
        for dealer in (self._dealer, self._aside):
            if dealer is not None:
                dealer.close()
