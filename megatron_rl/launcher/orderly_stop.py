"""The first signal stops training after a checkpoint; a second one, or a deadline, at once.

Used by `node.py`, in the launcher's one thread. See `protocol/stop_request.py`.
"""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Self

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.process import ENDING_SIGNALS, Interrupted
from megatron_rl.protocol.stop_request import has_stopped, is_stop_requested, request_stop


class OrderlyStop(Closing):
    """While it is entered, a signal asks the run to stop instead of raising Interrupted."""

    def __init__(self, run_dir: Path, limit_s: float) -> None:
        """limit_s: longest time from the request to the end of training."""
        self._run_dir = run_dir
        self._limit_s = limit_s
        self._is_entered = False
        self._signal: int | None = None
        """The first signal."""
        self._asked_at: float | None = None
        """time.monotonic() when this launcher learned of the request."""
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._is_entered = True
        for number in ENDING_SIGNALS:
            # A launcher under `nohup` outlives its terminal.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise Interrupted(128 + number)
        self._signal = number

    def check(self, *, has_trained: bool) -> str:
        """Pass a new request on; returns the text about it, else "".

        has_trained: a step has ended since the start of this phase; if not, there is nothing to
        save. Raises Interrupted when the run should end now, OSError.
        """
        if not self._is_entered:
            return ""
        if self._asked_at is None:
            if self._signal is None and not is_stop_requested(self._run_dir):
                return ""
            if not has_trained:
                self._end()
            request_stop(self._run_dir)
            self._asked_at = time.monotonic()
            return (
                f"stopping: a checkpoint of the current step is saved first, for at most "
                f"{self._limit_s:.0f} s (expert.checkpoint.stop_timeout_s); a second signal ends "
                "the run at once"
            )
        if time.monotonic() - self._asked_at > self._limit_s:
            self._end()
        return ""

    def conclude(self) -> None:
        """After the end of training: raise Interrupted if it stopped as asked."""
        if has_stopped(self._run_dir):
            self._end()

    def _end(self) -> None:
        raise Interrupted(128 + (self._signal or signal.SIGTERM))

    def close(self) -> None:
        """Let signals raise Interrupted again."""
        self._is_entered = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()
