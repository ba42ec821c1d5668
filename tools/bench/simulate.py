"""Prediction of `megatron-rl simulate` beside real runs: `python -m tools.bench.simulate`.

    python -m tools.bench.simulate --start QUICKSTART --work DIR [--rounds 3] [--quick]
    python -m tools.bench.simulate --round FITTED OTHER [OTHER ...] [--round ...]

The first makes the runs below with the tiny model of a finished `examples/quickstart.sh --tiny` run
(its hf/cold_start and tasks/prompts.jsonl), each some 50 s on an otherwise idle machine of two
cores, --rounds times one after the other; the second takes runs that are there. In each round the
models are fitted to the first run alone, and predict the others' configurations, in simulations
that are long enough for chance to count little.

| run   | differs from the first in     |
|-------|-------------------------------|
| base  | (the one that is fitted)      |
| small | generator.max_running=64      |
| sync  | queue.max_staleness=0         |
| wide  | twice the groups of a batch   |

The learning rate is so small that the policy, and with it the share of zero-variance groups, stays
what it is: what is compared is time, not learning. --quick makes two rounds of base and sync alone.

Progress goes to stderr; the last line on stdout is one JSON object: for each run and figure the
medians over the rounds of what was predicted, what was measured, their ratio and (of shares, since
a ratio of small ones says nothing) their difference, with the ratios or differences of each round.
`noise` is that of the machine: each figure of the first run, measured in all rounds, the largest
over the smallest (of shares the largest less the smallest). A prediction of one round cannot be
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
from statistics import median

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.simulation.calibration import Calibration, calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.records import Measured, RunRecords, measure, read_run
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
RUNS: dict[str, tuple[str, ...]] = {
    "base": (),
    "small": ("generator.max_running=64",),
    "sync": ("queue.max_staleness=0",),
    "wide": ("train.prompts_per_batch=32",),
}
QUICK = ("base", "sync")
QUICK_ROUNDS = 2
STEPS = 90
SIMULATED_STEPS = 200
RUN_TIMEOUT_S = 600.0
TIMES = ("step_s", "compute_s", "sync_s", "latency_s", "staleness_mean")
SHARES = ("trainer_idle", "generator_idle")


Figures = dict[str, dict[str, float]]
"""By name of a figure: predicted, measured, ratio, difference."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 for bad input, or 1 when a run fails."""
    options = _parse(arguments)
    busy: dict[str, float] = {}
    try:
        rounds = options.round or _make_rounds(options, busy)
        cores = options.cores or None
        found = [compare_runs([read_run(folder) for folder in runs], cores) for runs in rounds]
    except (InputError, ChildFailed) as error:
        print(f"tools.bench.simulate: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    names = [folder.name for folder in rounds[0]]
    print(
        json.dumps(
            {
                "cores": options.cores,
                "rounds": len(rounds),
                "busy_share": busy,
                "autogroup": shares_by_session(),
                "noise": noise_of([figures[0] for figures in found]),
                "runs": {
                    name: medians_of([figures[place] for figures in found])
                    for place, name in enumerate(names)
                },
            }
        )
    )
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--start", type=Path, help="run folder of quickstart.sh --tiny")
    which.add_argument(
        "--round",
        type=Path,
        nargs="+",
        action="append",
        help="runs that are there: the one to fit, and others; again for each further round",
    )
    parser.add_argument("--work", type=Path, help="folder for the runs; with --start")
    parser.add_argument("--rounds", type=int, default=3, help="with --start")
    parser.add_argument("--quick", action="store_true", help="two rounds of two runs")
    parser.add_argument("--cores", type=float, default=2.0, help="that all share; 0: none")
    options = parser.parse_args(arguments)
    if options.start is not None and options.work is None:
        parser.error("--start needs --work")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: give at least 1")
    if options.round and len({len(runs) for runs in options.round}) > 1:
        parser.error("each --round needs as many runs, in one order")
    return options


def _make_rounds(options: argparse.Namespace, busy: dict[str, float]) -> list[list[Path]]:
    names = QUICK if options.quick else tuple(RUNS)
    count = QUICK_ROUNDS if options.quick else options.rounds
    rounds = [
        [options.work / f"round-{number}" / name for name in names]
        for number in range(1, count + 1)
    ]
    folders = [folder for runs in rounds for folder in runs]
    for folder in folders:
        if folder.exists():
            raise InputError(f"{folder} is there already: give another folder with --work")
    for folder in folders:
        folder.parent.mkdir(parents=True, exist_ok=True)
        share = round(busy_share(range(os.cpu_count() or 1), 2.0), 3)
        busy[f"{folder.parent.name}/{folder.name}"] = share
        print(f"{folder}: other processes take {share:.0%}", file=sys.stderr)
        _make_run(options.start, folder)
    return rounds


def _make_run(start: Path, folder: Path) -> None:
    command: list[str | Path] = [
        sys.executable, "-m", "megatron_rl.cli.main", "run",
        "--config", ROOT / "examples" / "tiny.toml", "--run-dir", folder,
        f"model.path={start / 'hf' / 'cold_start'}",
        f"prompts.0.path={start / 'tasks' / 'prompts.jsonl'}",
        f"train.steps={STEPS}", *COMMON, *RUNS[folder.name],
    ]  # fmt: skip
    log = folder.with_suffix(".log")
    run_child(command, log=log, timeout_s=RUN_TIMEOUT_S, cwd=ROOT)


def compare_runs(runs: list[RunRecords], cores: float | None) -> list[Figures]:
    """The figures of each run of a round. The first is fitted."""
    fitted = calibrate(runs[0], cores)
    found = []
    for run in runs:
        outcome = _predict(fitted, run.config)
        found.append(compare(outcome, measure(run)))
        if doubt := fitted.doubt(outcome):
            print(f"warning: {run.config.run.dir}: {doubt}", file=sys.stderr)
    return found


def _predict(fitted: Calibration, config: Config) -> Outcome:
    model = fitted.model(config, Assumptions())
    return Cluster(config, model, fitted.workload, Span(steps=SIMULATED_STEPS)).run()


def compare(predicted: Outcome, measured: Measured) -> Figures:
    """Each figure of both."""
    found: Figures = {}
    for name in (*TIMES, *SHARES):
        said, was = getattr(predicted, name), getattr(measured, name)
        found[name] = {"predicted": said, "measured": was}
        if was:
            found[name]["ratio"] = said / was
        if name in SHARES:
            found[name]["difference"] = said - was
    return found


def medians_of(rounds: list[Figures]) -> dict[str, dict[str, float | list[float]]]:
    """One run's figures over all rounds: the median of each, and what each round says."""
    found: dict[str, dict[str, float | list[float]]] = {}
    for name in rounds[0]:
        # A share of nothing has no ratio.
        kinds = [kind for kind in rounds[0][name] if all(kind in f[name] for f in rounds)]
        found[name] = {kind: round(median(f[name][kind] for f in rounds), 4) for kind in kinds}
        kind = "difference" if name in SHARES else "ratio"
        if kind in kinds:
            found[name]["by_round"] = [round(f[name][kind], 4) for f in rounds]
    return found


def noise_of(rounds: list[Figures]) -> dict[str, float]:
    """Of each measured figure of one run in all rounds: largest over smallest, or less it."""
    found = {}
    for name in (*TIMES, *SHARES):
        measured = [figures[name]["measured"] for figures in rounds]
        low, high = min(measured), max(measured)
        if name in SHARES:
            found[name] = round(high - low, 4)
        elif low:
            found[name] = round(high / low, 4)
    return found


if __name__ == "__main__":
    sys.exit(main())
