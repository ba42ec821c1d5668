"""The first signal stops training after a checkpoint; a second one, or a deadline, at once.

Outside of training the first signal and a request (`RUN/stop`) end the run at once: a checkpoint or
a finished part of an evaluation holds what is done. Used by `node.py`, in the launcher's one
thread. See `protocol/stop_request.py`.
"""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Self

from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.process import ENDING_SIGNALS, Interrupted
from megatron_rl.protocol.stop_request import has_stopped, is_stop_requested, request_stop


class OrderlyStop(Closing):
    """While it is entered, a signal asks the run to stop instead of raising Interrupted."""

    def __init__(self, run_dir: Path, limit_s: float, last_step: int) -> None:
        """limit_s: longest time from the request to the end of training. last_step: of the run."""
        self._run_dir = run_dir
        self._limit_s, self._last_step = limit_s, last_step
        self.is_training = False
        """Whether it is entered."""
        self._signal: int | None = None
        """The first signal."""
        self._asked_at: float | None = None
        """time.monotonic() when this launcher learned of the request."""
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        self.is_training = True
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

        has_trained: a step has ended in this training; if not, there is nothing to save. Raises
        Interrupted when the run should end now, OSError.
        """
        if self._asked_at is None:
            if not self._is_asked():
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

    def _is_asked(self) -> bool:
        return self._signal is not None or is_stop_requested(self._run_dir)

    def conclude(self) -> None:
        """After the end of training: raise Interrupted if the run is asked to stop.

        If no checkpoint holds the last step, the rest of the run continues until the limit.
        """
        if has_stopped(self._run_dir):
            self._end()
        if not self._is_asked():
            return
        if self._last_step in complete_checkpoints(self._run_dir / CHECKPOINTS):
            self._end()
        self._asked_at = self._asked_at or time.monotonic()

    def _end(self) -> None:
        raise Interrupted(128 + (self._signal or signal.SIGTERM))

    def close(self) -> None:
        """Let signals raise Interrupted again."""
        self.is_training = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()
