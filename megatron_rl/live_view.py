"""Shows a run while it goes: a live table on a terminal, else one plain line per step.

Used by `launch.py`, in its one thread: nothing is drawn but inside `refresh`. Reads the run's
`metrics.jsonl` as it grows.
"""

import json
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_rl.deaths import how_it_ended
from megatron_rl.protocol.config import Config
from megatron_rl.summary import RESTARTS
from megatron_rl.supervisor import Role

Row = dict[str, Any]

REFRESH_S = 0.5
_SHOWN_STEPS = 12
_SHOWN_WARNINGS = 4
_SFT_LINE_EVERY = 10
_COLUMNS = (
    # heading, metric, format
    ("reward", "rollout/reward", ".3f"),
    ("correct", "rollout/correct", ".3f"),
    ("length", "rollout/length_tokens", ".1f"),
    ("stale max", "queue/staleness_versions_max", ".0f"),
    ("gap", "train/logprob_gap", ".4f"),
    ("tok/s", "train/tokens_per_s", ".0f"),
    ("update s", "train/update_s", ".2f"),
    ("publish s", "publish/s", ".2f"),
    ("waited s", "wait/batch_s", ".2f"),
)


class MetricsTail:
    """Reads the rows that were added to a metrics file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip(self) -> None:
        """Pass over the rows that are there."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def read(self) -> list[Row]:
        """Complete new rows; a line that is still being written comes the next time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line]


class LiveView:
    """The view of one run; a context manager."""

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console()
        self._tail = MetricsTail(config.run.dir / "metrics.jsonl")
        self._steps: deque[Row] = deque(maxlen=_SHOWN_STEPS)
        self._evaluations: list[Row] = []
        self._warnings: deque[str] = deque(maxlen=_SHOWN_WARNINGS)
        self._sft: Row | None = None
        self._phase = "starting"
        self._started = time.monotonic()
        self._next_refresh = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # No refresh thread: children must be started by the main thread only, because Linux
            # ties their parent-death signal to the thread.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_rows()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def skip_rows(self) -> None:
        """Do not show what is in the metrics so far: an earlier launcher of the run has."""
        self._tail.skip()

    @property
    def last_step(self) -> int:
        """The last training step that was shown; -1 before the first."""
        return self._steps[-1]["step"] if self._steps else -1

    def enter_phase(self, phase: str) -> None:
        """Say what the run does now."""
        self._phase = phase
        self._say(f"[{time.monotonic() - self._started:6.1f} s] {phase}")

    def refresh(self, roles: dict[str, Role]) -> None:
        """Read new metrics and show them, at most every REFRESH_S."""
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_S
        self._take_rows()
        if self._live is not None:
            self._live.update(self._draw(roles), refresh=True)

    def _take_rows(self) -> None:
        for row in self._tail.read():
            if "eval/accuracy" in row:
                self._evaluations.append(row)
                self._say(evaluation_line(row))
            elif RESTARTS in row:
                self._warnings.append(restart_line(row))
                if self._live is None:
                    self._say(restart_line(row))
            elif row["source"] == "trainer" and "train/loss" in row:
                self._steps.append(row)
                if self._live is None:
                    self._say(step_line(row, self._config.train.steps))
            elif "train/loss" in row:
                self._sft = row
                if self._live is None and row["step"] % _SFT_LINE_EVERY == 0:
                    self._say(sft_line(row))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, roles: dict[str, Role]) -> Group:
        elapsed = time.monotonic() - self._started
        head = f"{self._phase}   {elapsed:.0f} s   {self._config.run.dir}"
        parts: list[Any] = [Text(head), Text(self._draw_roles(roles))]
        parts += [Text(line, style="yellow") for line in self._warnings]
        if self._sft is not None and not self._steps:
            parts.append(Text(sft_line(self._sft)))
        if self._steps:
            parts.append(self._draw_steps())
        return Group(*parts)

    def _draw_steps(self) -> Table:
        table = Table(title=f"last steps of {self._config.train.steps}", title_justify="left")
        for heading in ("step", *(column[0] for column in _COLUMNS)):
            table.add_column(heading, justify="right")
        for row in self._steps:
            table.add_row(str(row["step"]), *(_cell(row, name, form) for _, name, form in _COLUMNS))
        return table

    def _draw_roles(self, roles: dict[str, Role]) -> str:
        states = []
        for role in roles.values():
            state = "running" if role.ended is None else f"ended {role.exit_code}"
            if role.restart_at is not None:
                state += ", restarts"
            states.append(f"{role.name} {state}")
        return "   ".join(states)


def step_line(row: Row, total: int) -> str:
    """One plain line about a training step."""
    cells = [f"{heading} {_cell(row, name, form)}" for heading, name, form in _COLUMNS]
    return f"step {row['step']}/{total}: " + "  ".join(cells)


def sft_line(row: Row) -> str:
    """One plain line about a step of supervised fine-tuning."""
    return (
        f"{row['source']} step {row['step']}: loss {_cell(row, 'train/loss', '.4f')}  "
        f"lr {_cell(row, 'train/lr', '.2e')}  tok/s {_cell(row, 'train/tokens_per_s', '.0f')}"
    )


def evaluation_line(row: Row) -> str:
    """One plain line about an evaluation."""
    return (
        f"evaluation {row['label']}: accuracy {row['eval/accuracy']:.3f} +- "
        f"{row.get('eval/accuracy_se', 0.0):.3f} on {row.get('eval/n', 0)} held-out prompts, "
        f"format {_cell(row, 'eval/format', '.3f')}, "
        f"length {_cell(row, 'eval/length_tokens', '.1f')}"
    )


def restart_line(row: Row) -> str:
    """One plain line about a generator that was started again."""
    when = f"after step {row['step']}" if row["step"] >= 0 else "before the first step"
    return (
        f"warning: {row['role']} ended with {how_it_ended(row['exit_code'])} {when}; "
        f"restart {row['restart']} of {row['max_restarts']}"
    )


def _cell(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if name in row else "-"
