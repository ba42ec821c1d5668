"""The first signal asks a node that only serves to leave the run; a second one ends it at once.

A scheduler may signal all nodes. Then a vital one asks the whole run to stop after a checkpoint,
for which the trainer needs its generators, so this node stays until the run ends.

Used by `other_node.py`, in the launcher's one thread.
"""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Self

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.process import ENDING_SIGNALS, Interrupted
from megatron_rl.protocol.stop_request import has_stopped, is_stop_requested

_OTHERS_S = 2.0
"""Time in which the request of another node to stop the run is seen here."""


class HasLeft(Exception):
    """The node has left the run."""


class LeaveOnSignal(Closing):
    """While it is entered, the first signal asks the node to leave; in place of `OrderlyStop`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._asked_at: float | None = None
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
        if self._asked_at is not None:
            raise Interrupted(128 + number)
        self._asked_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the node leaves now: it was asked to, and the run is not asked to stop."""
        if self._asked_at is None or time.monotonic() - self._asked_at < _OTHERS_S:
            return False
        return not is_stop_requested(self._run_dir)

    def check(self, *, has_trained: bool) -> str:
        """Nothing to say: the first node leads the end of a run that is asked to stop."""
        return ""

    def conclude(self) -> None:
        """After the end of training: raise Interrupted if it stopped as asked."""
        if has_stopped(self._run_dir):
            raise Interrupted(128 + signal.SIGTERM)

    def close(self) -> None:
        """Let signals raise Interrupted again."""
        self._entered -= 1
        if not self._entered:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers.clear()
