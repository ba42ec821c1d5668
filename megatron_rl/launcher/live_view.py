"""Shows a run while it goes: a live table on a terminal, else plain lines.

The plain log has one line per step; where nothing else was said for PLAIN_S, a line tells what
rollouts come to, or what the run waits for. Used by `run.py`, in its one thread: nothing is
drawn but inside `refresh`. Reads the run's `metrics.jsonl` as it grows.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.tree import Config
from megatron_rl.launcher.disk import room_warning
from megatron_rl.launcher.roster import Roster, is_restart, restart_line
from megatron_rl.launcher.supervisor import Role
from megatron_rl.observe.activity_text import ActivityTotals, activity_line
from megatron_rl.observe.awaited import Awaited
from megatron_rl.observe.evaluation_progress import EvaluationProgress
from megatron_rl.observe.exporters.follow import Follower
from megatron_rl.observe.health import duration_text, step_seconds, warnings_of

Row = dict[str, Any]

REFRESH_S = 0.5
DISK_S = 60.0
"""So often the disk's free space is looked at."""
PLAIN_S = 10.0
"""So long the plain log may be silent."""
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
    ("trainer tok/s", "train/tokens_per_s", ".0f"),
    ("update s", "train/update_s", ".2f"),
    ("weight sync s", "weight_sync/s", ".2f"),
    ("waited s", "wait/batch_s", ".2f"),
)
GAP_NOTE = "gap -: no token of the step was sampled under the current policy version"


class LiveView:
    """The view of one run; a context manager."""

    def __init__(
        self,
        config: Config,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._console = console or Console()
        self._tail = Follower(config.run.dir / "metrics.jsonl")
        self._steps: deque[Row] = deque(maxlen=_SHOWN_STEPS)
        self._evaluations: list[Row] = []
        self._warnings: deque[str] = deque(maxlen=_SHOWN_WARNINGS)
        self._sft: Row | None = None
        self._activity = ActivityTotals()
        """Since the last step or evaluation."""
        self._diagnosis = ""
        self._progress = EvaluationProgress()
        self._health: dict[str, str] = {}
        """Warnings about the latest steps, by metric."""
        self._disk = ""
        """Warning about the disk's free space."""
        self._next_disk_look = 0.0
        self._awaited = Awaited(config)
        self.roster = Roster()
        self._phase = "starting"
        self._started = self._said_at = clock()
        self._next_refresh = 0.0
        self._has_news = self._has_shown_rollouts = self._has_explained_gap = False
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
            # The table is gone now, and its warnings with it.
            self._say_warnings([*self._warnings, *([] if kind else [self._diagnosis_line()])])
        if kind is not None and self._has_shown_rollouts:
            self._say_activity()
            self._say_warnings([self._diagnosis_line()])
            self._say(f"The run so far: megatron-rl report {self._config.run.dir}")

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
        self._awaited.enter_phase(phase)
        self._say(f"{self._elapsed()} {phase}")

    def refresh(self, roles: dict[str, Role]) -> None:
        """Read new metrics and show them, at most every REFRESH_S."""
        now = self._clock()
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_S
        self._take_rows()
        if now >= self._next_disk_look:
            self._next_disk_look = now + DISK_S
            self._note_disk()
        awaited = self._awaited_text(roles, now)
        if self._live is not None:
            self._live.update(self._draw(roles, awaited), refresh=True)
        elif now - self._said_at >= PLAIN_S:
            if self._has_news:
                self._say_activity()
            else:
                self._say(f"{self._elapsed()} {awaited}")

    def _take_rows(self) -> None:
        for row in self._tail.read():
            self._awaited.note(row)
            self._progress.note(row)
            for name in self.roster.note(row):
                self._warn(self.roster.missing_line(name))
            if "eval/n" in row:
                self._evaluations.append(row)
                self._activity = self._activity.after_evaluation()
                self._has_news &= bool(self._activity.counts())
                self._say(evaluation_line(row))
            elif is_restart(row):
                self._warn(restart_line(row))
            elif self._activity.take(row):
                self._note_activity()
            elif row["source"] == "trainer" and "train/loss" in row:
                self._steps.append(row)
                self._activity, self._has_news = self._activity.next_part(), False
                if self._live is None:
                    self._say(step_line(row, self._config.train.steps))
                    self._explain_gap(row)
                self._note_health()
            elif "train/loss" in row:
                self._sft = row
                if self._live is None and row["step"] % _SFT_LINE_EVERY == 0:
                    self._say(sft_line(row))

    def _explain_gap(self, step: Row) -> None:
        """Say once what a gap of "-" means."""
        if lacks_gap(step) and not self._has_explained_gap:
            self._has_explained_gap = True
            self._say(GAP_NOTE)

    def _warn(self, line: str) -> None:
        self._warnings.append(line)
        if self._live is None:
            self._say(line)

    def _note_health(self) -> None:
        """Say what has come to be wrong; what stays so is not said again."""
        known, self._health = self._health, warnings_of(list(self._steps), self._config)
        if self._live is None:
            new = [text for name, text in self._health.items() if name not in known]
            self._say_warnings(f"warning: {text}" for text in new)

    def _note_disk(self) -> None:
        """Say once that the disk becomes full."""
        left = self._config.train.steps - max(0, self.last_step)
        known, run_dir = self._disk, self._config.run.dir
        self._disk = room_warning(run_dir, self._config, left_steps=left)
        if self._live is None and self._disk and not known:
            self._say(f"warning: {self._disk}")

    def _note_activity(self) -> None:
        self._has_news = True
        if not self._has_shown_rollouts and self._live is None:
            self._say_activity()
        self._has_shown_rollouts = True
        if self._activity.diagnosis != self._diagnosis:
            self._diagnosis = self._activity.diagnosis
            if self._live is None and self._diagnosis:
                self._say(self._diagnosis_line())

    def _diagnosis_line(self) -> str:
        return f"warning: {self._diagnosis}" if self._diagnosis else ""

    def _say_warnings(self, lines: Iterable[str]) -> None:
        for line in filter(None, lines):
            self._say(line)

    def _say_activity(self) -> None:
        self._has_news = False
        missing = f"; {self.roster.text()}" if self.roster.missing else ""
        self._say(f"{self._elapsed()} {self._activity_line()}{missing}")

    def _activity_line(self) -> str:
        since = f"after step {self.last_step}: " if self._steps else ""
        line = since + activity_line(self._activity)
        if self._live is None and self._progress.text():
            line += f"; {self._progress.text()}"
        return line

    def _elapsed(self) -> str:
        return f"[{self._clock() - self._started:6.1f} s]"

    def _awaited_text(self, roles: dict[str, Role], now: float) -> str:
        running = {name: role for name, role in roles.items() if role.ended is None}
        starting = [
            name
            for name, role in running.items()
            if role.restarts is not None and not role.restarts.ready_path.exists()
        ]
        return self._awaited.text(starting, list(running), now)

    def _say(self, line: str) -> None:
        self._said_at = self._clock()
        say(self._console, line)

    def _draw(self, roles: dict[str, Role], awaited: str) -> Group:
        elapsed = self._clock() - self._started
        head = f"{self._phase}   {elapsed:.0f} s{self._left_text()}   {self._config.run.dir}"
        parts: list[Any] = [Text(head), Text(self._draw_roles(roles))]
        if self.roster.text():
            parts.append(Text(self.roster.text()))
        health = [f"warning: {text}" for text in filter(None, [*self._health.values(), self._disk])]
        warnings = filter(None, [*self._warnings, *health, self._diagnosis_line()])
        parts += [Text(line, style="yellow") for line in warnings]
        parts.append(Text(self._activity_line() if self._has_shown_rollouts else awaited))
        if self._progress.text():
            parts.append(self._progress.bar())
        if self._sft is not None and not self._steps:
            parts.append(Text(sft_line(self._sft)))
        if self._steps:
            parts.append(self._draw_steps())
        return Group(*parts)

    def _left_text(self) -> str:
        """How long the steps that are left will take."""
        step_s = step_seconds(list(self._steps))
        left = self._config.train.steps - self.last_step
        return f", about {duration_text(step_s * left)} left" if step_s and left > 0 else ""

    def _draw_steps(self) -> Table:
        table = Table(title=f"last steps of {self._config.train.steps}", title_justify="left")
        if any(map(lacks_gap, self._steps)):
            table.caption, table.caption_justify = GAP_NOTE, "left"
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
                state += ", given up for now" if role.is_given_up else ", restarts"
            states.append(f"{role.name} {state}")
        return "   ".join(states)


def lacks_gap(step: Row) -> bool:
    """Whether a step could not measure the logprob gap."""
    return "train/logprob_gap" not in step


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
    lost = row.get("eval/not_graded", 0)
    ungraded = f", {lost} completions could not be graded" if lost else ""
    if "eval/accuracy" not in row:
        return f"evaluation {row['label']}: not measured{ungraded}"
    # An evaluation of a set has the set's name behind a full stop.
    what = "prompts" if "." in row["label"] else "held-out prompts"
    return (
        f"evaluation {row['label']}: accuracy {row['eval/accuracy']:.3f} +- "
        f"{row.get('eval/accuracy_se', 0.0):.3f} on {row.get('eval/n', 0)} {what}, "
        f"format {_cell(row, 'eval/format', '.3f')}, "
        f"length {_cell(row, 'eval/length_tokens', '.1f')}{ungraded}"
    )


def _cell(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if name in row else "-"
