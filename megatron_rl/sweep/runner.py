"""Runs the incomplete runs of a sweep, one after another, each in its own process.

One thread. The child leads its own process group; the group ends with the sweep, at Ctrl-C, SIGTERM
or the death of the sweep's process. The output of a child is appended to RUN/logs/run.out.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.printing import counted, progress, say
from megatron_rl.launcher.supervisor import POLL_S, Supervisor
from megatron_rl.observe.deaths import (
    CORRECTED_COMMAND,
    SAME_COMMAND,
    RoleDied,
    how_it_ended,
    last_output,
    tail,
)
from megatron_rl.protocol.whole_file import PRIVATE_FOLDER
from megatron_rl.sweep.folders import FAILURE, State, state_of
from megatron_rl.sweep.plan import Plan, PlannedRun

_ROLE = "run"
_PROGRAM = "megatron-rl: "
_END_S = 30.0
"""Time for the processes of a run to end, after expert.checkpoint.stop_timeout_s."""

CommandOf = Callable[[PlannedRun], list[str]]


def run_command(run: PlannedRun) -> list[str]:
    return [sys.executable, "-m", "megatron_rl.cli.main", *run.arguments]


def run_all(
    plan: Plan,
    console: Console,
    *,
    lock: int,
    command_of: CommandOf,
    after_each: Callable[[], None],
) -> int:
    """Run all incomplete runs; returns the number of failures.

    lock: descriptor that keeps other sweeps out of the folder. after_each is called after each run.
    """
    failed, count = 0, len(plan.runs)
    with progress(console, "runs") as report:
        for number, run in counted(enumerate(plan.runs, start=1), count, report):
            head = f"[{number} of {count}] {run.label}: "
            if state_of(run) is State.COMPLETE:
                say(console, head + "complete, not repeated")
                continue
            say(console, f"{head}running; output in {run.run_dir}/logs/{_ROLE}.out")
            started = time.monotonic()
            if reason := run_one(run, command_of(run), plan.sweep.timeout_s, lock):
                failed += 1
                (run.run_dir / FAILURE).write_text(reason + "\n")
                say(console, f"{head}failed: {reason}")
            else:
                say(console, f"{head}complete in {time.monotonic() - started:.0f} s")
            after_each()
    return failed


def run_one(run: PlannedRun, command: list[str], timeout_s: float, lock: int) -> str:
    """Run a child to its end; returns the error of the run, empty if it is complete.

    A signal during the wait ends the child orderly and propagates to the caller.
    """
    run.run_dir.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    (run.run_dir / FAILURE).unlink(missing_ok=True)
    stop_s = run.config.checkpoint.stop_timeout_s + _END_S
    with Supervisor(run.run_dir / "logs", inherited=(lock,), term_grace_s=stop_s) as supervisor:
        child = supervisor.start(_ROLE, command)
        deadline = time.monotonic() + timeout_s
        while supervisor.is_running(_ROLE):
            if time.monotonic() > deadline:
                return f"ended after timeout_s={timeout_s:g} s"
            time.sleep(POLL_S)
            try:
                supervisor.check()
            except RoleDied as death:
                how = how_it_ended(death.exit_code)
                return f"{how}: {last_line(child.log_path, child.log_start)}"
    if state_of(run) is not State.COMPLETE:
        return "exit code 0, but its summary.json does not say that it took all steps"
    return ""


def last_line(log_path: Path, start: int) -> str:
    """The last line of the error in a log, from byte `start` on."""
    lines = tail(last_output(log_path, start))
    # The hint how to resume follows the error.
    hints = SAME_COMMAND, CORRECTED_COMMAND
    lines = [line for line in lines if not any(hint in line for hint in hints)]
    return lines[-1].strip().removeprefix(_PROGRAM) if lines else "it printed nothing"
