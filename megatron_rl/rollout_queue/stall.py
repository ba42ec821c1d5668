"""The clock of the rollout queue's loop: monotonic seconds without the loop's own stalls.

Used by the rollout queue's server. While the loop stands still (a slow disk, a suspended machine)
peers speak and nobody reads. That time counts as nobody's silence, so every limit of the queue is
measured by this clock.
"""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

STALL_S = 2.0
"""The loop reads the clock at least once a second; what a gap has beyond this is a stall."""


class LoopClock:
    """Call `read` in every pass of the loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read_at = monotonic()
        self._unix_offset_s = time.time() - self._read_at
        self.stalled_s = 0.0
        """Seconds of all stalls so far."""

    def start(self) -> None:
        """The loop begins: the time before it is no stall."""
        self._read_at = self._monotonic()

    def read(self) -> float:
        """Seconds that count."""
        at = self._monotonic()
        gap_s = at - self._read_at
        self._read_at = at
        if gap_s > STALL_S:
            self.stalled_s += gap_s - STALL_S
            log.warning("the queue's loop stood still for %.1f s: nobody's silence counts", gap_s)
        return at - self.stalled_s

    def unix_s(self, at: float) -> float:
        """Unix seconds of a reading. One from before a stall is late by that stall."""
        return at + self.stalled_s + self._unix_offset_s
