"""`megatron-rl sweep FILE`: runs the open runs of a sweep, and prints its table."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Overrides
from megatron_rl.cli.command_line.printing import open_console, say
from megatron_rl.config.errors import InputError
from megatron_rl.launcher import model_checks, preflight
from megatron_rl.launcher.hub_models import pin_models
from megatron_rl.launcher.run_folder import locked
from megatron_rl.launcher.sft_checks import check_sft_dataset
from megatron_rl.protocol.process import Interrupted
from megatron_rl.sweep import slurm
from megatron_rl.sweep.folders import State, check_folders, state_of
from megatron_rl.sweep.plan import Plan, PlannedRun, make_plan
from megatron_rl.sweep.results import Results, collect
from megatron_rl.sweep.runner import CommandOf, run_all, run_command
from megatron_rl.sweep.sweep_file import load_sweep
from megatron_rl.sweep.table import print_table, write_files


@dataclass(frozen=True)
class SweepOptions:
    file: Annotated[Path, typer.Argument()]
    """TOML file of the sweep (docs/sweeps.md)."""
    overrides: Overrides = field(default_factory=list)
    sweep_dir: Path | None = None
    """Folder of the sweep; default: runs/sweep-NAME."""
    report: bool = False
    """Only print the table of the present runs."""
    dry_run: bool = False
    """Only print commands or scripts."""
    slurm: bool = False
    """Submit each run as a job."""


@command("sweep", "Run variants over seeds, and compare them.")
def sweep(options: SweepOptions, console: Console) -> int:
    """Exit code: 0, 1 (a run failed). Raises InputError before anything starts, Interrupted."""
    if options.report and options.dry_run:
        raise InputError("--report and --dry-run exclude each other: give one of them")
    file = load_sweep(options.file)
    folder = options.sweep_dir or Path("runs") / f"sweep-{file.name}"
    plan = make_plan(file, folder, options.overrides)
    check_folders(plan.runs)
    for first, second in plan.same_configurations:
        say(console, f"warning: {second} is the same configuration as {first}")
    if options.report:
        if not plan.sweep_dir.is_dir():
            raise InputError(f"{plan.sweep_dir} holds no sweep: name its folder with --sweep-dir")
        _report(plan, console)
        return 0
    if options.slurm:
        slurm.check_launch()
    if options.dry_run:
        _say_what_it_would_refuse(plan)
        _print_commands(plan, console, by_slurm=options.slurm)
        return 0
    if options.slurm:
        return _submit_all(plan, console)
    _check_runs(_left(plan))
    return run_here(plan, console)


def run_here(plan: Plan, console: Console, command_of: CommandOf = run_command) -> int:
    """Run the open runs on this node; exit code 0, or 1 if a run failed.

    command_of: makes a run's command. Raises InputError if another sweep has the folder, and
    Interrupted.
    """
    with _sweep_locked(plan.sweep_dir) as lock:
        try:
            failed = run_all(
                plan, console, lock=lock, command_of=command_of, after_each=lambda: _write(plan)
            )
        except Interrupted:
            say(console, "Interrupted. The same command resumes; complete runs are not repeated.")
            _write(plan)
            raise
        _report(plan, console)
    return 1 if failed else 0


def _check_runs(runs: list[PlannedRun]) -> None:
    """Raise InputError with all faults for which `megatron-rl run` would refuse to start.

    Prompts are not read.
    """
    checks: tuple[Callable[[PlannedRun], None], ...] = (
        lambda run: preflight.check_names(run.config),
        lambda run: model_checks.check_model_folder(run.config.model.path),
        lambda run: model_checks.check_model(run.config),
        lambda run: model_checks.check_megatron_path(run.config),
        lambda run: check_sft_dataset(run.config),
    )
    problems = []
    for variant, run in {run.variant: run for run in runs}.items():
        try:
            run = replace(run, config=pin_models(run.config, None))
            for check in checks:
                check(run)
        except InputError as error:
            problems.append(f"variant {variant}: {error}")
    if problems:
        raise InputError("the sweep cannot start:\n" + "\n".join(problems))


def _left(plan: Plan) -> list[PlannedRun]:
    return [run for run in plan.runs if state_of(run) is not State.COMPLETE]


def _say_what_it_would_refuse(plan: Plan) -> None:
    """Print faults on stderr, because stdout has commands, which another node may run."""
    try:
        _check_runs(_left(plan))
    except InputError as error:
        say(open_console(stderr=True), f"warning: on this host {error}")


@contextmanager
def _sweep_locked(folder: Path) -> Iterator[int]:
    """Lock the folder. Raises InputError if another sweep has it."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(folder))
        except InputError as error:
            raise InputError(
                f"a sweep is already running in {folder}: stop it first, or name another folder "
                "with --sweep-dir DIR"
            ) from error
        yield lock.descriptor


def _report(plan: Plan, console: Console) -> None:
    print_table(_write(plan), console)
    say(console, f"Written to {plan.sweep_dir}: sweep.json, sweep.md")


def _write(plan: Plan) -> Results:
    results = collect(plan)
    plan.sweep_dir.mkdir(parents=True, exist_ok=True)
    write_files(results, plan.sweep_dir)
    return results


def _print_commands(plan: Plan, console: Console, *, by_slurm: bool) -> None:
    for run in plan.runs:
        if state_of(run) is State.COMPLETE:
            say(console, f"# {run.label}: complete")
        elif by_slurm:
            say(console, slurm.script_of(plan, run))
        else:
            say(console, shlex.join(run_command(run)))


def _submit_all(plan: Plan, console: Console) -> int:
    """Submit runs that are open and unknown to Slurm; exit code 1 if Slurm refused one."""
    slurm.check_programs()
    known, refused = slurm.jobs_of_user(), 0
    for run in plan.runs:
        if state_of(run) is State.COMPLETE:
            text = "complete, not repeated"
        elif slurm.job_name(plan, run) in known:
            text = "waits or runs"
        else:
            try:
                text = slurm.submit(plan, run)
            except InputError as error:
                text, refused = str(error), refused + 1
        say(console, f"{run.label}: {text}")
    say(console, "When the jobs have ended, --report prints the table.")
    return 1 if refused else 0
