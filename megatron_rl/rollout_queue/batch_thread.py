"""Deals batches to ranks in a thread, so that the queue's loop answers its peers meanwhile.

Used by the rollout queue's server. Two threads:

| thread           | does                        | waits for, woken by    | ends                 |
|------------------|-----------------------------|------------------------|----------------------|
| the queue's loop | puts one order at a time,   | nothing; it looks each | after `close`        |
|                  | takes the dealt batch       | `LOOK_S` for the batch |                      |
| `batches`        | reads replayed groups,      | the next order         | at `close`, or at an |
|                  | deals the order             |                        | error                |

The loop never writes to the groups of an order. The threads meet at SimpleQueues alone:
`record_files.py` says why.
"""

import logging
import queue
import threading

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.types import RankBatch
from megatron_rl.rollout_queue.batches import BatchOrder, Fill, deal_batch, fill_minibatch

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""While a batch is dealt, the loop sleeps for at most this long."""
CLOSE_S = 30.0
"""Deadline for a batch that is being dealt when the run ends."""


class BatchMaker:
    """Deals one batch at a time, in the caller's thread."""

    def __init__(self, fill: Fill = fill_minibatch) -> None:
        """fill: the shares of a planned minibatch."""
        self._fill = fill
        self._batch: list[RankBatch] | None = None
        self.is_busy = False
        """A batch was put that `take` has not returned yet."""

    def put(self, order: BatchOrder) -> None:
        """Deal a batch, or let it be dealt."""
        assert not self.is_busy
        self.is_busy = True
        self._deal(order)

    def _deal(self, order: BatchOrder) -> None:
        self._batch = deal_batch(order, self._fill)

    def take(self) -> list[RankBatch] | None:
        """The batch, once, as soon as it is dealt; else None. Raises what dealing raised."""
        batch, self._batch = self._batch, None
        self.is_busy = self.is_busy and batch is None
        return batch


class BatchThread(BatchMaker, Closing):
    """Deals one batch at a time, in a thread."""

    def __init__(self, fill: Fill = fill_minibatch) -> None:
        super().__init__(fill)
        self._orders: queue.SimpleQueue[BatchOrder | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._dealt: queue.SimpleQueue[list[RankBatch] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._dealt.put(deal_batch(order, self._fill))
            except BaseException as error:  # noqa: BLE001 the loop raises it in `take`
                self._dealt.put(error)
                return

    def _deal(self, order: BatchOrder) -> None:
        self._orders.put(order)

    def take(self) -> list[RankBatch] | None:
        """The batch, once, as soon as it is dealt; else None. Raises what dealing raised."""
        if self._dealt.empty():
            return None
        dealt = self._dealt.get()
        if isinstance(dealt, BaseException):
            raise dealt
        self.is_busy = False
        return dealt

    def close(self) -> None:
        """End the thread; a batch that is not taken yet is forgotten."""
        self._orders.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("a batch is still being dealt after %.0f s: nobody waits for it", CLOSE_S)
