"""Deals and stores batches in a thread, so that the queue's loop answers its peers meanwhile.

Used by the rollout queue's server. Two threads:

| thread           | does                          | waits for      | ends                       |
|------------------|-------------------------------|----------------|----------------------------|
| the queue's loop | puts one order at a time, and | nothing        | after `close`              |
|                  | looks for the dealt batch     |                |                            |
| `batches`        | reads replayed groups, deals, | the next order | at `close`, or at an error |
|                  | stores the dealt batch        |                |                            |

The loop never writes to the groups of an order. The threads share only SimpleQueues
(`record_files.py` says why).
"""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, steps_by_name
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import write_when_room
from megatron_rl.protocol.stored_batches import BATCHES, remove_batches, write_batch
from megatron_rl.protocol.types import RankBatch
from megatron_rl.rollout_queue.batches import BatchOrder, Fill, deal_batch, fill_minibatch

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""The loop sleeps for at most this long while a batch is dealt."""
CLOSE_S = 30.0
"""Deadline for a batch that is being dealt when the run ends."""


def store_batch(run_dir: Path, shares: list[RankBatch], *, keep_last: int, limit_s: float) -> None:
    """Store a batch before any rank gets it, and remove those that are not needed any more.

    keep_last: number of newest checkpoints whose later batches are kept (`stored_batches.py`).
    limit_s: how long a full disk is waited for. Raises WriteFailed.
    """
    folder = run_dir / BATCHES
    write_when_room(folder, partial(_write, folder, shares), limit_s=limit_s)
    # The newest checkpoint may still be written, so it does not count.
    steps = sorted(steps_by_name(run_dir / CHECKPOINTS))[-keep_last - 1 :]
    if len(steps) > 1:
        remove_batches(folder, before=steps[0])


def _write(folder: Path, shares: list[RankBatch]) -> None:
    folder.mkdir(exist_ok=True)
    write_batch(folder, shares)


Store = Callable[[list[RankBatch]], None]


class BatchMaker:
    """Deals one batch at a time, in the caller's thread."""

    def __init__(self, fill: Fill = fill_minibatch, store: Store | None = None) -> None:
        """fill: computes the shares of a planned minibatch. store: keeps a dealt batch."""
        self._fill, self._store = fill, store
        self.batch: list[RankBatch] = []
        """Shares of the latest batch by data-parallel rank; empty while it is dealt."""
        self.is_busy = False
        """`look` has not yet found the batch of the last order."""
        self._dealt_now: list[RankBatch] | None = None

    def put(self, order: BatchOrder) -> None:
        """Start to deal a batch, and forget the batch before it."""
        assert not self.is_busy
        self.is_busy, self.batch = True, []
        self._deal(order)

    def _deal(self, order: BatchOrder) -> None:
        self._dealt_now = self._made(order)

    def _made(self, order: BatchOrder) -> list[RankBatch]:
        shares = deal_batch(order, self._fill)
        if self._store is not None:
            self._store(shares)
        return shares

    def _take_dealt(self) -> list[RankBatch] | None:
        return self._dealt_now

    def look(self) -> bool:
        """Whether a batch has been dealt since the last look.

        Raises the error of `deal_batch` or of the store.
        """
        dealt = self._take_dealt() if self.is_busy else None
        if dealt is None:
            return False
        self.batch, self.is_busy = dealt, False
        return True


class BatchThread(BatchMaker, Closing):
    """Deals one batch at a time, in a thread."""

    def __init__(self, fill: Fill = fill_minibatch, store: Store | None = None) -> None:
        super().__init__(fill, store)
        self._orders: queue.SimpleQueue[BatchOrder | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._dealt: queue.SimpleQueue[list[RankBatch] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._dealt.put(self._made(order))
            except BaseException as error:  # noqa: BLE001 the loop raises it in `take`
                self._dealt.put(error)
                return

    def _deal(self, order: BatchOrder) -> None:
        self._orders.put(order)

    def _take_dealt(self) -> list[RankBatch] | None:
        if self._dealt.empty():
            return None
        dealt = self._dealt.get()
        if isinstance(dealt, BaseException):
            raise dealt
        return dealt

    def close(self) -> None:
        """End the thread; a batch that was not found is lost."""
        self._orders.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("a batch is still being dealt after %.0f s: nobody waits for it", CLOSE_S)
