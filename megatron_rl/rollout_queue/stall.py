"""What stands still: the queue's loop (`LoopClock`), or the whole run (`StallDeadline`).

Used by the rollout queue. While its loop stands still (a slow disk, a suspended machine) peers send
messages and nobody reads. That time counts as no peer's silence: every limit of the queue is
measured by this clock.
"""

import logging
import time
from collections.abc import Callable

from megatron_rl.config.tree import Config
from megatron_rl.protocol.wire import DeadlineExceeded

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


_DISMISS_S = 5.0
"""After the last weight sync trainer ranks have this long to ask once more and be told to stop."""


class StallDeadline:
    """When something moved last. Heartbeats are no progress: an engine that hangs sends them too.

    While supervised training precedes the trainer's first weight sync nothing can move here, for as
    long as that takes: the launcher watches its ranks, whose collectives have deadlines. Only from
    when the trainer is expected does its silence count.
    """

    def __init__(self, config: Config, now: float) -> None:
        self._config = config
        self._moved_at = now
        self._is_trainer_expected = True

    def await_cold_start(self) -> None:
        """Supervised training comes first: wait for `expect_trainer` without a limit."""
        self._is_trainer_expected = False

    def expect_trainer(self, now: float) -> None:
        """Supervised training, if there was any, is over: count from here on."""
        if not self._is_trainer_expected:
            self._is_trainer_expected = True
            self._moved_at = now

    def note_progress(self, now: float) -> None:
        """Something moved: a completion, a score, a batch, a weight sync, a state."""
        self._moved_at = now

    @property
    def dismissal_s(self) -> float:
        """How long the queue waits, once training is over, for trainer ranks to ask once more."""
        # A last checkpoint is copied between the last weight sync and the last request.
        checkpoint = self._config.checkpoint
        return _DISMISS_S + (checkpoint.write_timeout_s if checkpoint.every_steps else 0.0)

    def check(self, now: float, *, is_work_out: bool, state: str) -> None:
        """Raise DeadlineExceeded, with the state of the queue, when nothing moved for too long.

        is_work_out: somebody was asked for something, or asks the queue for a batch. Otherwise the
        others may be starting, or the trainer saving, which their own limits add to.
        """
        if not self._is_trainer_expected:
            return
        config = self._config
        limit_s = config.train.batch_timeout_s
        if not is_work_out:
            saving_s = config.checkpoint.write_timeout_s if config.checkpoint.every_steps else 0.0
            limit_s += max(config.start_and_join_s, saving_s)
        silent_s = now - self._moved_at
        if silent_s > limit_s:
            raise DeadlineExceeded(f"nothing moved for {silent_s:.0f} s: {state}")
