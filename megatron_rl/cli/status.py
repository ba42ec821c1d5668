"""`megatron-rl status RUN`: the state of a run, from any shell or node that sees its folder.

Reads metrics.jsonl, the folder's lock and heartbeat, and notes of errors, without other processes.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, RunFolder
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import printable_lines
from megatron_rl.config.files import load_run
from megatron_rl.config.tree import Config
from megatron_rl.evaluation.runs.results import RESULTS
from megatron_rl.launcher.disk import room_warning
from megatron_rl.launcher.last_words import is_evaluation, last_words
from megatron_rl.launcher.run_folder import SIGNALLED, is_running
from megatron_rl.observe.activity_text import activity_line
from megatron_rl.observe.heartbeat import PREPARED, is_stopped, read_beat
from megatron_rl.observe.run_state import (
    GAP_NOTE,
    RunState,
    duration_text,
    evaluation_line,
    lacks_gap,
    step_line,
    step_seconds,
    waits_text,
    warnings_of,
)
from megatron_rl.protocol.failure import FAILURES, first_failure
from megatron_rl.protocol.metrics import GROUPS_DROPPED, RESUMED, Row, stream_rows


@dataclass
class Status:
    """The state of a run; `--json` prints it."""

    state: str
    """prepared, running, complete, or stopped."""
    step: int
    """Finished steps."""
    steps: int
    """Steps of the whole run."""
    step_s: float | None = None
    """Median seconds of the latest steps."""
    left_s: float | None = None
    """Estimated seconds until the last step; running runs only."""
    silent_s: dict[str, float] = field(default_factory=dict)
    """Role -> seconds since its last row; running runs only."""
    last_step: str = ""
    activity: str = ""
    """Since the last step or evaluation."""
    evaluation: str = ""
    """Progress of the current evaluation."""
    evaluations: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of dropped groups."""
    peers: str = ""
    """Numbers of live engines and verifiers, names of missing ones; running runs only."""
    nodes: str = ""
    """Number of nodes, and the latest that joined, left, came back or was refused; running only."""
    generators: str = ""
    """Load of the generators, name of the slowest; running runs only."""
    waits: str = ""
    """What each process does or waits for, and for how long; running runs only."""
    warnings: list[str] = field(default_factory=list)
    """Each with its fix."""
    phase: str = ""
    """Current phase of a running run."""
    error: str = ""
    """First error noted by a process of a stopped run."""
    rerun: str = ""
    """Command that resumes a stopped run, or the reason why it would start anew."""


@dataclass(frozen=True)
class StatusOptions:
    run_dir: RunFolder
    json: Json = False


@command("status", "Say how a run stands, from any shell or host that sees its folder.")
def status(options: StatusOptions, console: Console) -> int:
    """Exit code 1 for a run that stopped."""
    found = read_status(options.run_dir, time.time())
    if options.json:
        print(json.dumps(asdict(found)), file=console.file)
    else:
        for line in describe(found):
            say(console, line)
    return 1 if found.state == "stopped" else 0


def read_status(run_dir: Path, now: float) -> Status:
    """The status of a run folder. now: unix seconds. Raises InputError without a run."""
    config = load_run(run_dir)
    rows = stream_rows(run_dir / "metrics.jsonl")
    beat = read_beat(run_dir)
    is_complete = (run_dir / "summary.json").exists()
    if is_evaluation(config):
        is_complete = _has_results(run_dir, since=beat.started if beat else 0.0)
    state = "complete" if is_complete else "stopped"
    if is_running(run_dir):
        state = "running"
    phase = beat.phase if beat is not None else ""
    if phase == PREPARED and not is_complete:
        state = PREPARED
    started = beat.started if beat is not None else 0.0
    status = of_rows(rows, config, state=state, now=now, started=started)
    if state == "running" and beat is not None:
        status.phase, status.waits = phase, status.waits or beat.awaited
        if is_stopped(beat):
            status.warnings.append(
                f"the launcher (pid {beat.pid}) is stopped by SIGSTOP and watches no process: "
                f"kill -CONT {beat.pid}"
            )
    if state != "complete":
        left = config.train.steps - status.step
        status.warnings += filter(None, [room_warning(run_dir, config, left_steps=left)])
    if state == "stopped":
        failure = first_failure(run_dir / "logs" / FAILURES, 0.0)
        status.error = (
            "no process noted an error: it was interrupted, or killed from outside; see logs/"
        )
        if phase.startswith(SIGNALLED):
            is_interrupted = phase == f"{SIGNALLED} 2"
            status.error = "stopped by the user (Ctrl-C)" if is_interrupted else phase
        elif failure is not None:
            status.error = f"{failure.who}: {failure.text.strip()}"
        run = config.run.model_copy(update={"dir": run_dir})
        status.rerun = last_words(config.model_copy(update={"run": run}), beat.nodes if beat else 0)
    return status


def _has_results(run_dir: Path, *, since: float) -> bool:
    """Whether the start of an evaluation at `since` (unix seconds) has written its results."""
    path = run_dir / RESULTS
    return path.exists() and path.stat().st_mtime >= since


def of_rows(
    rows: Iterable[Row], config: Config, *, state: str, now: float, started: float = 0.0
) -> Status:
    """The status by rows of metrics. Pure.

    started: unix seconds of the present start. An evaluation that resumes writes no row about it.
    """
    status, run = Status(state, 0, config.train.steps), RunState()
    evaluations: dict[str, str] = {}
    is_of_start = is_underway = False
    for row in rows:
        if not is_of_start and row["time"] >= started:
            run.begin_again()
            is_of_start = True
        kind = run.take(row)
        if RESUMED in row:
            # Until its next step, a run that was resumed loads the model and starts its engines.
            is_underway = False
        elif kind == "step":
            is_underway = True
            _add_dropped(status.dropped, row)
        elif kind == "evaluation":
            # A resumed evaluation writes the row of a complete set again.
            evaluations[row["label"]] = evaluation_line(row)
    if not is_of_start:
        run.begin_again()
    status.evaluations = list(evaluations.values())
    if run.activity.counts():
        since = f"after step {run.steps[-1]['step']}" if run.steps else "before the first step"
        status.activity = f"{since}: {activity_line(run.activity)}"
    if run.steps:
        status.step = run.steps[-1]["step"]
        status.last_step = step_line(run.steps[-1], config.train.steps)
        if lacks_gap(run.steps[-1]):
            status.last_step += f" ({GAP_NOTE})"
        status.step_s = step_seconds(run.steps)
    if state == "running":
        if status.step_s is not None and is_underway:
            status.left_s = status.step_s * (status.steps - status.step)
        # Roles that ended write no more rows.
        status.silent_s = {
            role: now - at
            for role, at in run.heard.items()
            if role not in ("sft", "sft_baseline", "launch")
        }
        status.evaluation, status.peers = run.evaluation.text(), run.peers.text()
        status.nodes, status.generators = run.nodes, run.generators
        status.waits = waits_text(run.waits, now)
    diagnosis = [run.activity.diagnosis] if run.activity.diagnosis else []
    status.warnings = [*diagnosis, *warnings_of(run.steps, config).values()]
    return status


def _add_dropped(dropped: dict[str, int], step: Row) -> None:
    for name, count in step.items():
        if name.startswith(GROUPS_DROPPED):
            reason = name.removeprefix(GROUPS_DROPPED)
            dropped[reason] = dropped.get(reason, 0) + int(count)


def describe(status: Status) -> list[str]:
    lines = [status.state]
    if status.steps:
        lines[0] += f", step {status.step} of {status.steps}"
    if status.phase:
        lines[0] += f", {status.phase}"
    if status.step_s is not None:
        lines[0] += f", {status.step_s:.1f} s a step"
    if status.left_s is not None:
        lines[0] += f", about {duration_text(status.left_s)} left"
    lines += [f"warning: {text}" for text in status.warnings]
    lines += filter(None, [status.nodes, status.peers, status.generators, status.waits])
    if status.silent_s:
        ages = ", ".join(f"{role} {age:.0f} s" for role, age in sorted(status.silent_s.items()))
        lines.append(f"last news of: {ages}")
    lines += filter(None, [status.last_step, status.activity, status.evaluation])
    lines += status.evaluations
    if status.dropped:
        parts = ", ".join(f"{reason} {count}" for reason, count in sorted(status.dropped.items()))
        lines.append(f"groups dropped: {parts}")
    if status.error:
        lines.append(printable_lines(f"cause: {status.error}"))
    if status.rerun:
        lines.append(status.rerun)
    return lines
