"""How far the evaluation of a run is, by the rows of its queue. Pure, but for what it draws.

Used by the live view and `megatron-rl status`.
"""

from typing import Any

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.observe.health import duration_text
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DONE,
    COMPLETIONS_WANTED,
    EVALUATION_RUNNING,
)

Row = dict[str, Any]
_BAR_COLUMNS = 30


class EvaluationProgress:
    """Follows the rows of the metrics."""

    def __init__(self) -> None:
        self._first: Row | None = None
        """The first row about the evaluation that goes on; its sets count as one."""
        self._last: Row | None = None

    def note(self, row: Row) -> None:
        """Take in a row of any role."""
        if EVALUATION_RUNNING in row:
            if self._first is None or _base(self._first) != _base(row):
                self._first = row
            self._last = row
        elif "eval/n" in row or "activity/seconds" in row:
            # Its figures, or work of the queue without it; another set of it may follow.
            self._last = None

    def text(self) -> str:
        """One line about the evaluation that goes on; empty when none does."""
        if self._last is None:
            return ""
        done, wanted = self._last[COMPLETIONS_DONE], self._last[COMPLETIONS_WANTED]
        label = self._last[EVALUATION_RUNNING]
        text = f"evaluation {label}: {done:,} of {wanted:,} completions scored"
        left_s = self._left_s()
        return text if left_s is None else f"{text}, about {duration_text(left_s)} left"

    def bar(self) -> Table:
        """The same as a bar."""
        assert self._last is not None
        table = Table.grid(padding=(0, 1))
        bar = ProgressBar(
            self._last[COMPLETIONS_WANTED], self._last[COMPLETIONS_DONE], width=_BAR_COLUMNS
        )
        table.add_row(bar, Text(self.text()))
        return table

    def _left_s(self) -> float | None:
        """At the speed so far; None while there is none."""
        assert self._first is not None and self._last is not None
        done = self._last[COMPLETIONS_DONE]
        made = done - self._first[COMPLETIONS_DONE]
        seconds: float = self._last["time"] - self._first["time"]
        left: int = self._last[COMPLETIONS_WANTED] - done
        return seconds * left / made if made > 0 and seconds > 0 else None


def _base(row: Row) -> str:
    """Name of an evaluation without that of its set."""
    label: str = row[EVALUATION_RUNNING]
    return label.partition(".")[0]
