"""Prediction of `megatron-rl simulate` beside real runs: `python -m tools.bench.simulate`.

    python -m tools.bench.simulate --start QUICKSTART --work DIR [--quick]
    python -m tools.bench.simulate --runs FITTED OTHER [OTHER ...] [--again RUN]

The first makes the runs below with the tiny model of a finished `examples/quickstart.sh --tiny` run
(its hf/cold_start and tasks/prompts.jsonl), each some 50 s on an otherwise idle machine of two
cores; the second takes runs that are there. The models are fitted to the first run alone, and
predict the others' configurations, in simulations that are long enough for chance to count little.

| run   | differs from the first in     |
|-------|-------------------------------|
| base  | (the one that is fitted)      |
| small | generator.max_running=64      |
| sync  | queue.max_staleness=0         |
| wide  | twice the groups of a batch   |
| again | nothing: the machine's noise  |

The learning rate is so small that the policy, and with it the share of flat groups, stays what it
is: what is compared is time, not learning. --quick makes base, again and sync alone.

Progress goes to stderr; the last line on stdout is one JSON object: for each run and figure what
was predicted, what was measured, and their ratio (of shares also the difference, since a ratio of
small shares says nothing), and beside each the noise of the machine: the same figure measured in a
second run like the first, over the first's (of shares the difference). A prediction cannot be
nearer than that. `busy_share` is what other processes took of the cores before each run: where it
is not near 0, the figures say little. `autogroup`: whether Linux divided the cores among sessions
first; the simulation divides them among roles, so set kernel.sched_autogroup_enabled to 0 before
(docs/troubleshooting.md says what it costs a run).
"""

import argparse
import json
import os
import sys
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.simulation.calibration import Calibration, calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.records import Measured, measure, read_run
from tools.bench.children import ChildFailed, run_child
from tools.bench.contention import busy_share, shares_by_session

ROOT = Path(__file__).resolve().parent.parent.parent
COMMON = (
    "sft.steps=0",
    "optimizer.lr=1e-9",
    "eval.prompts=0",
    "checkpoint.every_steps=0",
    "parallel.tensor=1",
)
AGAIN = "again"
RUNS: dict[str, tuple[str, ...]] = {
    "base": (),
    "small": ("generator.max_running=64",),
    "sync": ("queue.max_staleness=0",),
    "wide": ("train.groups_per_batch=32",),
    AGAIN: (),
}
QUICK = ("base", "sync", AGAIN)
STEPS = 90
SIMULATED_STEPS = 200
RUN_TIMEOUT_S = 600.0
TIMES = ("step_s", "compute_s", "publish_s", "latency_s", "staleness_mean")
SHARES = ("trainer_idle", "generator_idle")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 for bad input, or 1 when a run fails."""
    options = _parse(arguments)
    busy: dict[str, float] = {}
    try:
        runs, again = options.runs, options.again
        if runs is None:
            made = _make_runs(options, busy)
            again = made.pop(AGAIN)
            runs = list(made.values())
        found = compare_runs(runs, options.cores, again)
    except (InputError, ChildFailed) as error:
        print(f"tools.bench.simulate: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    shares = {"busy_share": busy, "autogroup": shares_by_session()}
    print(json.dumps({"cores": options.cores, **shares, "runs": found}))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--start", type=Path, help="run folder of quickstart.sh --tiny")
    which.add_argument("--runs", type=Path, nargs="+", help="runs that are there")
    parser.add_argument("--again", type=Path, help="a run like the first of --runs")
    parser.add_argument("--work", type=Path, help="folder for the runs; with --start")
    parser.add_argument("--quick", action="store_true", help="three runs alone")
    parser.add_argument("--cores", type=float, default=2.0, help="that all share; 0: none")
    options = parser.parse_args(arguments)
    if options.start is not None and options.work is None:
        parser.error("--start needs --work")
    return options


def _make_runs(options: argparse.Namespace, busy: dict[str, float]) -> dict[str, Path]:
    names = QUICK if options.quick else tuple(RUNS)
    options.work.mkdir(parents=True, exist_ok=True)
    made = {}
    for name in names:
        folder = options.work / name
        if folder.exists():
            raise InputError(f"--work {options.work} holds a run {name}: give another folder")
        busy[name] = round(busy_share(range(os.cpu_count() or 1), 2.0), 3)
        print(f"run {name}, other processes take {busy[name]:.0%}", file=sys.stderr)
        command = [
            sys.executable, "-m", "megatron_rl.launcher.cli", "run",
            "--config", ROOT / "examples" / "tiny.toml", "--run-dir", folder,
            f"model.path={options.start / 'hf' / 'cold_start'}",
            f"prompts.0.path={options.start / 'tasks' / 'prompts.jsonl'}",
            f"train.steps={STEPS}", *COMMON, *RUNS[name],
        ]  # fmt: skip
        log = options.work / f"{name}.log"
        run_child(command, log=log, timeout_s=RUN_TIMEOUT_S, cwd=ROOT)
        made[name] = folder
    return made


def compare_runs(
    runs: list[Path], cores: float, again: Path | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """By run and figure: predicted, measured, ratio or difference, noise. The first run is fitted.

    again: a run of the same configuration as the first; None: the noise is not known.
    """
    first, *others = runs
    print(f"fitting to {first}", file=sys.stderr)
    fitted = calibrate(read_run(first), cores or None)
    found = {}
    for folder in (first, *others):
        run = read_run(folder)
        outcome = _predict(fitted, run.config)
        found[folder.name] = compare(outcome, measure(run))
        if doubt := fitted.doubt(outcome):
            print(f"warning: {folder.name}: {doubt}", file=sys.stderr)
    if again is not None:
        noise = noise_of(fitted.measured, measure(read_run(again)))
        for figures in found.values():
            for name, figure in figures.items():
                figure |= noise[name]
    return found


def _predict(fitted: Calibration, config: Config) -> Outcome:
    model = fitted.model(config, Assumptions())
    return Cluster(config, model, fitted.workload, Span(steps=SIMULATED_STEPS)).run()


def compare(predicted: Outcome, measured: Measured) -> dict[str, dict[str, float]]:
    """Each figure of both."""
    found: dict[str, dict[str, float]] = {}
    for name in (*TIMES, *SHARES):
        said, was = getattr(predicted, name), getattr(measured, name)
        found[name] = {"predicted": round(said, 4), "measured": round(was, 4)}
        if was:
            found[name]["ratio"] = round(said / was, 3)
        if name in SHARES:
            found[name]["difference"] = round(said - was, 4)
    return found


def noise_of(measured: Measured, again: Measured) -> dict[str, dict[str, float]]:
    """Each figure of a second run of the same configuration beside the first's."""
    found: dict[str, dict[str, float]] = {}
    for name in (*TIMES, *SHARES):
        first, second = getattr(measured, name), getattr(again, name)
        found[name] = {"noise": round(second / first, 3)} if first else {}
        if name in SHARES:
            found[name]["noise_difference"] = round(second - first, 4)
    return found


if __name__ == "__main__":
    sys.exit(main())
