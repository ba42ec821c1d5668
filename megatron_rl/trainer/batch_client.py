"""Batches from the rollout queue, for all ranks of the trainer.

Runs in trainer ranks. Exchanges NextBatch / RankBatch / Stop, WeightsSynced, and SaveState /
QueueState with the queue. The leader of each data-parallel replica (its first rank) talks to the
queue. All ranks that work on the same sequences (tensor, context, pipeline) get its answers.

A message may be lost with a connection: the leader repeats its request every REASK_S, and drops
answers to older requests. A restarted trainer reads the batches since its checkpoint from
RUN/batches instead (`Stored`).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from megatron_rl.backend.profiling import span
from megatron_rl.config.tree import Config
from megatron_rl.protocol import wire
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.endpoints import BATCHES
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.sequence_cost import SequenceCost, find_cost
from megatron_rl.protocol.stored_batches import BATCHES as FOLDER
from megatron_rl.protocol.stored_batches import deal_again, read_batch, read_share
from megatron_rl.protocol.types import (
    AnyMessage,
    NextBatch,
    RankBatch,
    SaveState,
    Stop,
    WeightsSynced,
)
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.trainer.leader import TURN_S, Leader

_ANSWER = RankBatch | Stop
REASK_S = 5.0
STOP_S = 15.0
"""The longest wait for Stop after the last weight sync: the queue may have ended with its Stop."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """Stored batches of this run, which a trainer trains on again."""

    folder: Path
    steps: range
    budget_tokens: int
    """As `deal_again`, like the next."""
    cost: SequenceCost

    @classmethod
    def of(cls, cfg: Config, run_dir: Path, steps: range) -> Self:
        """Batches of a run. Raises InputError if the model folder gives no sizes."""
        cost = find_cost(cfg.train.packing, cfg.model.path)
        return cls(run_dir / FOLDER, steps, cfg.train.microbatch_tokens, cost)

    def read(self, step: int, rank: int, dp_size: int) -> bytearray:
        """The joined frames of a rank's share. Raises InputError."""
        size, share = read_share(self.folder, step, rank)
        if size == dp_size:
            return share
        dealt = deal_again(
            read_batch(self.folder, step), dp_size, budget_tokens=self.budget_tokens, cost=self.cost
        )
        return wire.join_frames(wire.encode_frames(dealt[rank]))


class BatchClient(Closing):
    """Fetches this data-parallel rank's share of each batch."""

    def __init__(
        self,
        address: str,
        *,
        dp_rank: int,
        dp_size: int,
        leader: Leader,
        timeout_s: float,
        keys: Keys | None = None,
        label: str = "",
    ) -> None:
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._timeout_s = timeout_s
        self._leader = leader
        self._address, self._name, self._keys = address, f"trainer-{dp_rank}", keys
        self._label = label
        self._dealer = self._connect(self._name) if leader.is_this_rank else None
        self._aside: wire.Dealer | None = None
        self._requested_step = -1
        self._asked_at = 0.0
        self._held_version, self._is_final = -1, False
        """The last announcement."""
        self.stored: Stored | None = None
        """Batches to read instead of asking for them."""
        self.metrics: list[Metric] = []

    def _connect(self, name: str) -> wire.Dealer:
        return wire.Dealer(self._address, name, self._keys, endpoint=BATCHES, label=self._label)

    def request(self, step: int) -> None:
        """Ask for the batch of `step` before it is needed; it travels meanwhile."""
        if self._stored_with(step) is not None:
            return
        if self._dealer is not None and self._requested_step != step:
            self._ask(self._dealer, step)
        self._requested_step = step

    def _stored_with(self, step: int) -> Stored | None:
        """The stored batches, if that of the step is one of them."""
        return self.stored if self.stored is not None and step in self.stored.steps else None

    def _ask(self, dealer: wire.Dealer, step: int) -> None:
        self._asked_at = time.monotonic()
        # Data-parallel rank 0 alone announces versions.
        held = (self._held_version, self._is_final) if self._dp_rank == 0 else (-1, False)
        dealer.send(NextBatch(step, self._dp_rank, self._dp_size, *held))

    @span("wait for batch")
    def next(self, step: int, meanwhile: Callable[[], None] | None = None) -> RankBatch | None:
        """This rank's share of the batch of `step`; None when training ends.

        Every trainer rank must call it. meanwhile: collective over all trainer ranks, repeated
        until each has its share. Raises DeadlineExceeded after timeout_s.
        """
        started = time.monotonic()
        self.request(step)

        def wait_on() -> None:
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() - started > self._timeout_s:
                raise DeadlineExceeded(
                    f"the queue had no batch for step {step} in {self._timeout_s:.0f} s "
                    "(expert.train.batch_timeout_s, and expert.eval.timeout_s for each set of each "
                    "version that is evaluated meanwhile): see logs/queue.log"
                )

        frame = self._leader.read(partial(self._poll, step, started), wait_on)
        batch = wire.decode_frames(wire.split_frames(frame), _ANSWER)
        self.metrics = [Metric("wait/batch_s", time.monotonic() - started, "max")]
        return None if isinstance(batch, Stop) else batch

    def announce(self, version: int, *, is_final: bool) -> None:
        """Tell the queue that all generators hold `version`."""
        self._held_version, self._is_final = version, is_final
        if self._dealer is not None and self._dp_rank == 0:
            self._dealer.send(WeightsSynced(version, is_final))

    def announce_aside(self, version: int) -> None:
        """As `announce`, from another thread than the one that calls the other methods."""
        self._held_version = version
        if self._dealer is not None and self._dp_rank == 0:
            # A socket serves one thread at a time, and `next` may be waiting on the other socket.
            if self._aside is None:
                self._aside = self._connect(f"{self._name}-synced")
            self._aside.send(WeightsSynced(version, is_final=False))

    def queue_state(self, step: int, timeout_s: float) -> QueueState | None:
        """The queue's state after batch number `step`, on the first leader; None on other ranks.

        No request for a batch may be open. Raises DeadlineExceeded.
        """
        if self._dealer is None or self._dp_rank != 0:
            return None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._dealer.send(SaveState(step))
            ask_at = min(deadline, time.monotonic() + REASK_S)
            while (wait_s := ask_at - time.monotonic()) > 0:
                answer = self._dealer.receive(wait_s)
                if isinstance(answer, QueueState) and answer.step == step:
                    return answer
                self._note_dropped(answer)
        raise DeadlineExceeded(
            f"the queue did not tell its state after step {step} in {timeout_s:.0f} s "
            "(expert.checkpoint.queue_timeout_s): see logs/queue.log"
        )

    def _poll(self, step: int, started: float) -> bytearray:
        """On the leader: the answer's frames joined; empty when none came within a turn.

        started: when the wait for the batch of this step began.
        """
        assert self._dealer is not None
        if (stored := self._stored_with(step)) is not None:
            return stored.read(step, self._dp_rank, self._dp_size)
        now = time.monotonic()
        if self._is_final and now - started > STOP_S:
            log.warning("the last version is synced and the queue sent no stop: it may have ended")
            return wire.join_frames(wire.encode_frames(Stop("all is synced")))
        if now - self._asked_at > REASK_S:
            self._ask(self._dealer, step)
        frames = self._dealer.receive_frames(TURN_S)
        if frames is None:
            return bytearray()
        answer = self._dealer.decode(frames)
        if isinstance(answer, Stop) or (isinstance(answer, RankBatch) and answer.step == step):
            return wire.join_frames(frames)
        self._note_dropped(answer)
        return bytearray()

    def _note_dropped(self, answer: AnyMessage | None) -> None:
        """Log an answer to an older or a repeated request."""
        if answer is not None:
            log.info("%s came late or twice and is dropped", type(answer).__name__)

    def close(self) -> None:
        """Close the leader's sockets."""
        for dealer in (self._dealer, self._aside):
            if dealer is not None:
                dealer.close()
