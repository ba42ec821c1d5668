"""`megatron-rl status RUN`: how a run stands, from any shell or host that sees its folder.

Reads metrics.jsonl, the lock and the notes of errors; asks no process.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.activity_text import ActivityTotals, activity_line
from megatron_rl.launcher.command_line.command import command
from megatron_rl.launcher.command_line.groups import plain_app
from megatron_rl.launcher.command_line.parameters import Json, RunFolder
from megatron_rl.launcher.evaluation_progress import EvaluationProgress
from megatron_rl.launcher.health import duration_text, step_seconds, warnings_of
from megatron_rl.launcher.live_view import evaluation_line, step_line
from megatron_rl.launcher.run_folder import is_locked
from megatron_rl.protocol.failure import first_failure
from megatron_rl.protocol.metrics import GROUPS_DROPPED, read_jsonl, without_superseded

app = plain_app()
Row = dict[str, Any]


@dataclass
class Status:
    """How a run stands; also what `--json` prints."""

    state: str
    """running, complete, or stopped."""
    step: int
    """Steps that were taken."""
    steps: int
    """Those that are wanted."""
    step_s: float | None = None
    """Median seconds of the latest steps."""
    left_s: float | None = None
    """Until the last step, at that speed; of a run that goes on."""
    silent_s: dict[str, float] = field(default_factory=dict)
    """Seconds since each role wrote its last row; of a run that goes on."""
    last_step: str = ""
    activity: str = ""
    """Since the last step."""
    evaluation: str = ""
    """How far the one is that goes on."""
    evaluations: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups that were not trained on, by reason."""
    warnings: list[str] = field(default_factory=list)
    """Each with what to do."""
    error: str = ""
    """Of a run that stopped: what was noted first."""


@dataclass(frozen=True)
class StatusOptions:
    """What the command is given."""

    run_dir: RunFolder
    json: Json = False


@command(app, "status", "Say how a run stands, from any shell or host that sees its folder.")
def status(options: StatusOptions, console: Console) -> int:
    """Exit code 1 for a run that stopped."""
    found = read_status(options.run_dir, time.time())
    if options.json:
        print(json.dumps(asdict(found)), file=console.file)
    else:
        for line in describe(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if found.state == "stopped" else 0


def read_status(run_dir: Path, now: float) -> Status:
    """Of a run folder; now: unix seconds. Raises InputError where there is no run."""
    saved = run_dir / "config.toml"
    if not saved.is_file():
        raise InputError(f"{run_dir} holds no run: it has no config.toml")
    config = load_config(saved)
    rows = without_superseded(read_jsonl(run_dir / "metrics.jsonl"))
    is_complete = (run_dir / "summary.json").exists()
    state = "running" if is_locked(run_dir) else "complete" if is_complete else "stopped"
    status = of_rows(rows, config, state=state, now=now)
    if state == "stopped":
        failure = first_failure(run_dir / "logs" / "failures", 0.0)
        status.error = (
            "no process noted an error: it was interrupted, or killed from outside; see logs/"
        )
        if failure is not None:
            status.error = f"{failure.who}: {failure.text.strip()}"
    return status


def of_rows(rows: list[Row], config: Config, *, state: str, now: float) -> Status:
    """What the metrics tell. Pure."""
    steps = [row for row in rows if row["source"] == "trainer" and "train/loss" in row]
    status = Status(state, steps[-1]["step"] if steps else 0, config.train.steps)
    since = steps[-1]["time"] if steps else 0.0
    activity = ActivityTotals(row for row in rows if row["time"] > since)
    status.activity = activity_line(activity) if activity.counts() else ""
    status.last_step = step_line(steps[-1], config.train.steps) if steps else ""
    status.evaluations = [evaluation_line(row) for row in rows if "eval/n" in row]
    for row in steps:
        for name, count in row.items():
            if name.startswith(GROUPS_DROPPED):
                reason = name.removeprefix(GROUPS_DROPPED)
                status.dropped[reason] = status.dropped.get(reason, 0) + int(count)
    status.step_s = step_seconds(steps)
    if state == "running":
        if status.step_s is not None:
            status.left_s = status.step_s * (status.steps - status.step)
        progress = EvaluationProgress()
        for row in rows:
            status.silent_s[row["source"]] = now - row["time"]
            progress.note(row)
        status.evaluation = progress.text()
        # What ended in good order is silent for good.
        for over in ("sft", "control", "launch"):
            status.silent_s.pop(over, None)
    diagnosis = [activity.diagnosis] if activity.diagnosis else []
    status.warnings = [*diagnosis, *warnings_of(steps, config).values()]
    return status


def describe(status: Status) -> list[str]:
    """Lines for people."""
    lines = [f"{status.state}, step {status.step} of {status.steps}"]
    if status.step_s is not None:
        lines[0] += f", {status.step_s:.1f} s a step"
    if status.left_s is not None:
        lines[0] += f", about {duration_text(status.left_s)} left"
    lines += [f"warning: {text}" for text in status.warnings]
    if status.silent_s:
        ages = ", ".join(f"{role} {age:.0f} s" for role, age in sorted(status.silent_s.items()))
        lines.append(f"last news of: {ages}")
    lines += filter(None, [status.last_step, status.activity, status.evaluation])
    lines += status.evaluations
    if status.dropped:
        parts = ", ".join(f"{reason} {count}" for reason, count in sorted(status.dropped.items()))
        lines.append(f"groups dropped: {parts}")
    if status.error:
        lines.append(f"cause: {status.error}")
    return lines
