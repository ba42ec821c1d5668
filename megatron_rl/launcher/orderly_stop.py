"""What the first signal to a launcher does; a second one ends the launcher at once.

`RUN/stop` does not count as the first one: another node may have made it before the signal that all
nodes get arrives here.

Used by `node.py` for vital nodes (`OrderlyStop`), and by `other_node.py` for nodes that only serve
(`LeaveOnSignal`), in the launcher's one thread. See `protocol/stop_request.py`.
"""

import signal
import time
from abc import abstractmethod
from pathlib import Path
from types import FrameType
from typing import Self

from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.process import ENDING_SIGNALS, Interrupted
from megatron_rl.protocol.stop_request import has_stopped, is_stop_requested, request_stop

_OTHERS_S = 2.0
"""Time in which the request of another node to stop the run is seen here."""


class FirstSignal(Closing):
    """While it is entered, once or more, the first signal is noted and a second one raises."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._signal: int | None = None
        """The first signal."""
        self._noted_at = 0.0
        """time.monotonic() of the first signal."""
        self._entered = 0
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._entered += 1
        if self._entered == 1:
            for number in ENDING_SIGNALS:
                # A launcher under `nohup` outlives its terminal.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise Interrupted(128 + number)
        self._signal, self._noted_at = number, time.monotonic()

    @abstractmethod
    def check(self, *, has_trained: bool) -> str:
        """Act on a new signal or request; returns the text about it, else "".

        has_trained: a step may have ended in this training; if not, there is nothing to save.
        """

    @abstractmethod
    def conclude(self) -> None:
        """After the end of training: raise Interrupted if it stopped as asked."""

    def close(self) -> None:
        """Let signals raise Interrupted again."""
        self._entered = max(0, self._entered - 1)
        if not self._entered:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers.clear()


class OrderlyStop(FirstSignal):
    """Passes the first signal on as a request to stop training after a checkpoint.

    Outside of training a signal or a request (`RUN/stop`) ends the run at once: a checkpoint or a
    finished part of an evaluation holds what is done.
    """

    def __init__(self, run_dir: Path, limit_s: float, last_step: int) -> None:
        """limit_s: longest time from the request to the end of training. last_step: of the run."""
        super().__init__(run_dir)
        self._limit_s, self._last_step = limit_s, last_step
        self._asked_at: float | None = None
        """time.monotonic() when this launcher learned of the request."""

    @property
    def is_training(self) -> bool:
        """Whether it is entered."""
        return self._entered > 0

    def check(self, *, has_trained: bool) -> str:
        """As in FirstSignal. Raises Interrupted when the run should end now, OSError."""
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
        """As in FirstSignal, also if the run is asked to stop and a checkpoint has the last step.

        Without such a checkpoint the rest of the run continues until the limit.
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


class LeaveOnSignal(FirstSignal):
    """Has the first signal ask the node to leave the run, unless the run is asked to stop.

    A scheduler may signal all nodes. Then a vital one asks the whole run to stop after a
    checkpoint, for which the trainer needs its generators, so this node stays until the run ends.
    """

    @property
    def is_due(self) -> bool:
        """Whether the node leaves now."""
        if self._signal is None or time.monotonic() - self._noted_at < _OTHERS_S:
            return False
        return not is_stop_requested(self._run_dir)

    def check(self, *, has_trained: bool) -> str:
        """Nothing to say: the first node leads the end of a run that is asked to stop.

        Raises Interrupted while the first node was never heard, as none leads the end then.
        """
        if not has_trained and (self._signal is not None or is_stop_requested(self._run_dir)):
            raise Interrupted(128 + (self._signal or signal.SIGTERM))
        return ""

    def conclude(self) -> None:
        """As in FirstSignal."""
        if has_stopped(self._run_dir):
            raise Interrupted(128 + signal.SIGTERM)
