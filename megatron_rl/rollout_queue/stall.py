"""Detects stalls of the queue's loop (`LoopClock`) and of the whole run (`StallDeadline`).

Used by the rollout queue. While its loop is stalled (a slow disk, a suspended machine), messages of
peers wait unread. That time must not count as silence of peers, so all limits use `LoopClock`.
"""

import logging
import math
import time
from collections.abc import Callable

from megatron_rl.config.tree import Config
from megatron_rl.protocol.wire import DeadlineExceeded

log = logging.getLogger(__name__)

STALL_S = 2.0
"""The loop reads the clock at least once a second; a longer gap than this is a stall."""


class LoopClock:
    """A monotonic clock without stalls of the loop; call `read` in every pass."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, *, begin: float | None = None
    ) -> None:
        """begin: the first reading; None: that of `monotonic`."""
        offset_s = 0.0 if begin is None else begin - monotonic()
        self._monotonic = lambda: monotonic() + offset_s
        self._read_at = self._monotonic()
        self._unix_offset_s = time.time() - self._read_at
        self.stalled_s = 0.0
        """Seconds of all stalls so far."""

    def start(self) -> None:
        """The loop begins; earlier time is not a stall."""
        self._read_at = self._monotonic()

    def read(self) -> float:
        """Monotonic seconds without stalls."""
        at = self._monotonic()
        gap_s = at - self._read_at
        self._read_at = at
        if gap_s > STALL_S:
            self.stalled_s += gap_s - STALL_S
            log.warning("the queue's loop stood still for %.1f s: nobody's silence counts", gap_s)
        # CLOCK_MONOTONIC stands still while the host is suspended.
        offset_s = time.time() - at
        if abs(moved_s := offset_s - self._unix_offset_s) > STALL_S:
            log.warning("the time of day moved by %.1f s: recorded times follow it", moved_s)
            self._unix_offset_s = offset_s
        return at - self.stalled_s

    def unix_s(self, at: float) -> float:
        """Unix seconds of a reading. One from before a stall or suspension is late by it."""
        return at + self.stalled_s + self._unix_offset_s


class UnixTime:
    """Converts times of a `LoopClock` to unix seconds, also those of a process that was killed."""

    def __init__(self) -> None:
        self.clock: LoopClock | None = None
        self.offset_s = 0.0
        """Without a clock: unix seconds at time 0."""
        self.ended: tuple[tuple[float, float], ...] = ()
        """As in the ledger's `Began`."""

    def end_launch(self, at: float) -> None:
        """The launcher ended at this time: later times may be hours later. Call without a clock."""
        self.ended += ((at, self.offset_s),)

    def __call__(self, at: float) -> float:
        """Unix seconds of a time."""
        for last, offset_s in self.ended:
            if at <= last:
                return at + offset_s
        return at + self.present_offset_s

    @property
    def present_offset_s(self) -> float:
        """Unix seconds at time 0, by the present offset."""
        return self.offset_s if self.clock is None else self.clock.unix_s(0.0)


_DISMISS_S = 5.0
"""Time for trainer ranks to ask once more after the last weight sync, and be told to stop."""


class StallDeadline:
    """Time of the last progress. Heartbeats are not progress: a hanging engine sends them too.

    Until the trainer's first message the queue has no deadline where supervised training comes
    before it, or where another launcher starts all processes again: the launcher watches the ranks,
    whose waits have deadlines.
    """

    def __init__(self, config: Config, now: float) -> None:
        self._config = config
        self._moved_at = now
        self._version = -1
        self._is_trainer_expected = True

    def await_trainer(self) -> None:
        """Wait for `expect_trainer` without a limit: the launcher watches what comes before."""
        self._is_trainer_expected = False

    def expect_trainer(self, now: float) -> None:
        """Supervised training, if any, is over: count from now on."""
        if not self._is_trainer_expected:
            self._is_trainer_expected = True
            self._moved_at = now

    def note_progress(self, now: float) -> None:
        """Note a completion, a score, a batch, a weight sync or a saved state."""
        self._moved_at = now

    def note_version(self, version: int, now: float) -> None:
        """Note the version that the trainer reports; -1: none.

        Another one than before is progress, an earlier one too: a restarted trainer repeats steps.
        """
        if version not in (self._version, -1):
            self._version = version
            self.note_progress(now)

    @property
    def dismissal_s(self) -> float:
        """Limit for trainer ranks to ask once more after the end of training."""
        if not self._is_trainer_expected:
            return math.inf
        # The last checkpoint is copied between the last weight sync and the last request. A run
        # that is asked to stop has one whatever its configuration says.
        return _DISMISS_S + self._config.checkpoint.write_timeout_s

    def check(self, now: float, *, is_work_out: bool, state: str) -> None:
        """Raise DeadlineExceeded, with the state of the queue, when nothing moved for too long.

        is_work_out: a peer has work or a rank waits for a batch. Otherwise peers may be starting or
        the trainer saving, so these limits are added.
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
