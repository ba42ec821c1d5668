"""Shows a running run: a live table on a terminal, else plain lines.

The plain log has one line per step. After PLAIN_S without a line it tells the number of scored
rollouts, or what the run waits for. Used by `node.py`, in its one thread: only `refresh` draws.
Reads the run's `metrics.jsonl` as it grows.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_rl.cli.command_line.printing import open_console, say
from megatron_rl.config.tree import Config
from megatron_rl.launcher.disk import room_warning
from megatron_rl.launcher.role import Role
from megatron_rl.observe.activity_text import activity_line
from megatron_rl.observe.exporters.follow import Follower
from megatron_rl.observe.run_state import (
    COLUMNS,
    GAP_NOTE,
    RunState,
    cell,
    duration_text,
    evaluation_line,
    lacks_gap,
    restart_line,
    sft_line,
    step_line,
    step_seconds,
    waits_text,
    warnings_of,
)
from megatron_rl.protocol.metrics import Row

REFRESH_S = 0.5
DISK_S = 60.0
"""Seconds between two looks at the disk's free space."""
PLAIN_S = 10.0
"""Longest silence of the plain log, in seconds."""
_SHOWN_WARNINGS = 4
_SFT_LINE_EVERY = 10
_ENGINES = ("generator", "follower", "scorer")
"""Kinds of roles that start an engine."""


class Awaited:
    """Names what the run waits for, from its phases and metric rows. Pure."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._phase = ""
        self._is_tuned = self._has_started = self._has_synced = self._has_rollouts = False
        self._since: dict[str, float] = {}
        """Start of each current wait."""

    def enter_phase(self, phase: str) -> None:
        self._phase = phase
        self._is_tuned = False

    def note(self, row: Row) -> None:
        self._is_tuned |= row["source"] in ("sft", "sft_baseline")
        self._has_started |= "model/parameters" in row
        self._has_synced |= row["source"] == "trainer" and "weight_sync/s" in row
        self._has_rollouts |= "activity/rollouts_scored" in row

    def text(self, starting: Sequence[str], running: Sequence[str], now: float) -> str:
        """What the run waits for, and for how long.

        starting: generators whose engine is not ready. running: all roles.
        """
        awaited = self._what(starting, running)
        self._since = {what: self._since.get(what, now) for what in awaited}
        return "; ".join(f"{what}: {now - self._since[what]:.0f} s so far" for what in awaited)

    def _what(self, starting: Sequence[str], running: Sequence[str]) -> list[str]:
        engines = []
        if starting:
            limit_s = self._config.generator.start_timeout_s
            verb = "starts its engine" if len(starting) == 1 else "start their engines"
            engines = [f"{', '.join(starting)} {verb} (at most {limit_s:.0f} s)"]
        if any(name.startswith("sft") for name in running):
            tuned = "supervised training runs" if self._is_tuned else "trainer ranks load the model"
            return [tuned, *engines]
        if engines:
            return engines
        if "trainer" in running and not self._has_started:
            return ["trainer ranks load the model and meet the generators"]
        if "trainer" in running and not self._has_synced:
            return ["the first weights travel to the generators"]
        if not self._has_rollouts:
            return ["the first completions are generated"]
        return [f"no news, {self._phase} continues"]


class LiveView:
    """The view of a run; a context manager."""

    def __init__(
        self,
        config: Config,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._console = console or open_console()
        self._tail = Follower(config.run.dir / "metrics.jsonl")
        self.state = RunState()
        self._warnings: deque[str] = deque(maxlen=_SHOWN_WARNINGS)
        self._sft: Row | None = None
        self._diagnosis = ""
        self._health: dict[str, str] = {}
        """Warning about the latest steps, by metric."""
        self._disk = ""
        """Warning about the disk's free space."""
        self._next_disk_look = 0.0
        self._awaited = Awaited(config)
        self.awaited = ""
        """What the run waits for, and for how long."""
        self._phase = "starting"
        self._started = self._said_at = clock()
        self._next_refresh = 0.0
        self._has_news = self._has_shown_rollouts = self._has_explained_gap = False
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Without a refresh thread: only the main thread may start children, because Linux ties
            # their parent-death signal to the thread.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._take_rows()
        if self._live is not None:
            self._live.stop()
            self._live = None
            # The table disappears with its warnings, so they are printed.
            self._say_warnings([*self._warnings, *([] if kind else [self._diagnosis_line()])])
        if kind is not None and self._has_shown_rollouts:
            self._say_activity()
            self._say_warnings([self._diagnosis_line()])
            self._say(f"The run so far: megatron-rl report {self._config.run.dir}")

    def skip_rows(self) -> None:
        """Skip the present rows, which an earlier launcher of the run has shown."""
        self._tail.skip()

    @property
    def last_step(self) -> int:
        """Latest training step shown; -1 before the first."""
        return self.state.steps[-1]["step"] if self.state.steps else -1

    def enter_phase(self, phase: str) -> None:
        self._phase = phase
        self._awaited.enter_phase(phase)
        self._say(f"{self._elapsed()} {phase}")

    def refresh(self, roles: dict[str, Role]) -> None:
        """Read and show new metrics, at most every REFRESH_S."""
        now = self._clock()
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_S
        self._take_rows()
        if now >= self._next_disk_look:
            self._next_disk_look = now + DISK_S
            self._note_disk()
        awaited = self.awaited = self._awaited_text(roles, now)
        if self._live is not None:
            self._live.update(self._draw(roles, awaited), refresh=True)
        elif now - self._said_at >= PLAIN_S:
            if self._has_news:
                self._say_activity()
            else:
                self._say(f"{self._elapsed()} {awaited}{self._conversations()}")

    def _take_rows(self) -> None:
        for row in self._tail.read():
            self._awaited.note(row)
            kind, peers = self.state.take(row), self.state.peers
            for name in peers.newly_missing:
                self._warn(peers.missing_line(name))
            match kind:
                case "evaluation":
                    self._has_news &= bool(self.state.activity.counts())
                    self._say(evaluation_line(row))
                case "restart":
                    self._warn(restart_line(row))
                case "node":
                    self._warn(row["node_event"])
                case "activity":
                    self._note_activity()
                case "step":
                    self._note_step(row)
                case "sft step":
                    self._sft = row
                    if self._live is None and row["step"] % _SFT_LINE_EVERY == 0:
                        self._say(sft_line(row))

    def _note_step(self, row: Row) -> None:
        self._has_news = False
        known, self._health = self._health, warnings_of(self.state.steps, self._config)
        if self._live is not None:
            return
        self._say(step_line(row, self._config.train.steps))
        if lacks_gap(row) and not self._has_explained_gap:
            self._has_explained_gap = True
            self._say(GAP_NOTE)
        self._say_warnings(f"warning: {text}" for n, text in self._health.items() if n not in known)

    def _warn(self, line: str) -> None:
        self._warnings.append(line)
        if self._live is None:
            self._say(line)

    def _note_disk(self) -> None:
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
        if self.state.activity.diagnosis != self._diagnosis:
            self._diagnosis = self.state.activity.diagnosis
            if self._live is None and self._diagnosis:
                self._say(self._diagnosis_line())

    def _diagnosis_line(self) -> str:
        return f"warning: {self._diagnosis}" if self._diagnosis else ""

    def _say_warnings(self, lines: Iterable[str]) -> None:
        for line in filter(None, lines):
            self._say(line)

    def _say_activity(self) -> None:
        self._has_news = False
        missing = f"; {self.state.peers.text()}" if self.state.peers.missing else ""
        self._say(f"{self._elapsed()} {self._activity_line()}{self._conversations()}{missing}")

    def _conversations(self) -> str:
        return f"; {self.state.conversations}" if self.state.conversations else ""

    def _activity_line(self) -> str:
        since = f"after step {self.last_step}: " if self.state.steps else ""
        line = since + activity_line(self.state.activity)
        if self._live is None and self.state.evaluation.text():
            line += f"; {self.state.evaluation.text()}"
        return line

    def _elapsed(self) -> str:
        return f"[{self._clock() - self._started:6.1f} s]"

    def _awaited_text(self, roles: dict[str, Role], now: float) -> str:
        running = {name: role for name, role in roles.items() if role.ended is None}
        starting = [n for n, role in running.items() if role.kind in _ENGINES and not role.is_ready]
        waits = waits_text(self.state.waits, time.time()) if self._has_shown_rollouts else ""
        if not waits:
            return self._awaited.text(starting, list(running), now)
        return "; ".join([*_scorers_text(roles.values()), waits])

    def _say(self, line: str) -> None:
        self._said_at = self._clock()
        say(self._console, line)

    def _draw(self, roles: dict[str, Role], awaited: str) -> Group:
        elapsed = self._clock() - self._started
        head = f"{self._phase}   {elapsed:.0f} s{self._left_text()}   {self._config.run.dir}"
        parts: list[Any] = [Text(head), Text(self._draw_roles(roles))]
        if self.state.peers.text():
            parts.append(Text(self.state.peers.text()))
        health = [f"warning: {text}" for text in filter(None, [*self._health.values(), self._disk])]
        warnings = filter(None, [*self._warnings, *health, self._diagnosis_line()])
        parts += [Text(line, style="yellow") for line in warnings]
        if self._has_shown_rollouts:
            parts.append(Text(self._activity_line()))
        if self.state.conversations:
            parts.append(Text(self.state.conversations))
        parts.append(Text(awaited))
        if self.state.evaluation.text():
            parts.append(self.state.evaluation.bar())
        if self._sft is not None and not self.state.steps:
            parts.append(Text(sft_line(self._sft)))
        if self.state.steps:
            parts.append(self._draw_steps())
        return Group(*parts)

    def _left_text(self) -> str:
        step_s = step_seconds(self.state.steps)
        left = self._config.train.steps - self.last_step
        return f", about {duration_text(step_s * left)} left" if step_s and left > 0 else ""

    def _draw_steps(self) -> Table:
        table = Table(title=f"last steps of {self._config.train.steps}", title_justify="left")
        if any(map(lacks_gap, self.state.steps)):
            table.caption, table.caption_justify = GAP_NOTE, "left"
        for heading in ("step", *(column[0] for column in COLUMNS)):
            table.add_column(heading, justify="right")
        for row in self.state.steps:
            table.add_row(str(row["step"]), *(cell(row, name, form) for _, name, form in COLUMNS))
        return table

    def _draw_roles(self, roles: dict[str, Role]) -> str:
        states = []
        for role in roles.values():
            state = "running" if role.ended is None else f"ended {role.exit_code}"
            if role.restart_at is not None:
                state += ", given up for now" if role.is_given_up else ", restarts"
            states.append(f"{role.name} {state}")
        return "   ".join(states)


def _scorers_text(roles: Iterable[Role]) -> list[str]:
    """Texts about scorers that answer nothing now: environments wait for a judge without a sign."""
    return [
        f"{role.name} {'starts its engine' if role.ended is None else 'is down, and restarts'}"
        for role in roles
        if role.kind == "scorer"
        and (role.restart_at is not None if role.ended is not None else not role.is_ready)
    ]
