"""Predictions of `megatron-rl simulate`, compared with real runs: `python -m tools.bench.simulate`.

    python -m tools.bench.simulate --start QUICKSTART --work DIR [--rounds 3] [--quick]
    python -m tools.bench.simulate --round FITTED OTHER [OTHER ...] [--round ...]

The first form makes the runs below with the tiny model of a finished `examples/quickstart.sh
--tiny` run (its hf/cold_start and tasks/prompts.jsonl), --rounds times; a run takes about 50 s on
two idle cores. The second form takes existing runs. In each round the models are fitted to the
first run only and predict the other runs' configurations, in long simulations.

| run | differs from the first in |
|---|---|
| base | (the fitted run) |
| small | generator.max_running=64 |
| sync | queue.max_staleness=0 |
| wide | twice the prompts of a batch |

The learning rate is so small that the policy and its share of zero-variance groups stay the same:
the comparison is of time, not learning. --quick makes two rounds of base and sync.

The last line on stdout is one JSON object. `runs` holds for each run and figure the medians over
the rounds of the predicted and measured value, their ratio and (of shares) their difference, and
the ratio or difference of each round. `noise` is the machine's: each figure of the first run,
measured in all rounds, largest over smallest (of shares largest less smallest). `busy_share` is
what other processes took of the cores before each run: it must be near 0. `autogroup`: whether
Linux divides the cores among sessions first. The simulation divides them among roles, so set
kernel.sched_autogroup_enabled to 0 (docs/troubleshooting.md says what it costs a run).
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median

from megatron_rl.config.errors import InputError
from megatron_rl.simulation.calibration import calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.records import Measured, RunRecords, measure, read_run
from tools.bench.children import ROOT, ChildFailed, run_child
from tools.bench.measuring import busy_share, parser, report, say, shares_by_session

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
TIMES = ("step_s", "compute_s", "publish_s", "latency_s", "staleness_mean")
SHARES = ("trainer_idle", "generator_idle")

Figures = dict[str, dict[str, float]]
"""By name of a figure: predicted, measured, ratio, difference."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, 2 for bad input, 1 when a run fails."""
    options = _parse(arguments)
    busy: dict[str, float] = {}
    try:
        rounds = options.round or _make_rounds(options, busy)
        found = [
            compare_runs([read_run(folder) for folder in runs], options.cores or None)
            for runs in rounds
        ]
    except (InputError, ChildFailed) as error:
        print(f"tools.bench.simulate: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    report(
        {
            "cores": options.cores,
            "rounds": len(rounds),
            "busy_share": busy,
            "autogroup": shares_by_session(),
            "noise": noise_of([figures[0] for figures in found]),
            "runs": {
                folder.name: medians_of([figures[place] for figures in found])
                for place, folder in enumerate(rounds[0])
            },
        }
    )
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, quick="two rounds of two runs")
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--start", type=Path, help="run folder of quickstart.sh --tiny")
    which.add_argument(
        "--round", type=Path, nargs="+", action="append",
        help="existing runs: the one to fit, then others; again for each further round",
    )  # fmt: skip
    made.add_argument("--work", type=Path, help="new folder for the runs; with --start")
    made.add_argument("--rounds", type=int, default=3, help="with --start")
    made.add_argument("--cores", type=float, default=2.0, help="that all roles share; 0: none")
    options = made.parse_args(arguments)
    if options.start is not None and options.work is None:
        made.error("--start needs --work")
    if options.rounds < 1:
        made.error(f"--rounds is {options.rounds}: give at least 1")
    if options.round and len({len(runs) for runs in options.round}) > 1:
        made.error("each --round needs as many runs, in one order")
    return options


def _make_rounds(options: argparse.Namespace, busy: dict[str, float]) -> list[list[Path]]:
    names = QUICK if options.quick else tuple(RUNS)
    count = QUICK_ROUNDS if options.quick else options.rounds
    rounds = [[options.work / f"round-{n + 1}" / name for name in names] for n in range(count)]
    folders = [folder for runs in rounds for folder in runs]
    for folder in folders:
        if folder.exists():
            raise InputError(f"{folder} is there already: give another folder with --work")
    for folder in folders:
        share = busy_share(range(os.cpu_count() or 1))
        busy[f"{folder.parent.name}/{folder.name}"] = share
        say(f"{folder}: other processes take {share:.0%}")
        _make_run(options.start, folder)
    return rounds


def _make_run(start: Path, folder: Path) -> None:
    command: list[str | Path] = [
        sys.executable, "-m", "megatron_rl.cli.main", "run",
        "--config", ROOT / "examples" / "tiny.toml", "--run-dir", folder.resolve(),
        f"model.path={start.resolve() / 'hf' / 'cold_start'}",
        f"prompts.0.path={start.resolve() / 'tasks' / 'prompts.jsonl'}",
        f"train.steps={STEPS}", *COMMON, *RUNS[folder.name],
    ]  # fmt: skip
    run_child(command, log=folder.with_suffix(".log"), timeout_s=RUN_TIMEOUT_S)


def compare_runs(runs: list[RunRecords], cores: float | None) -> list[Figures]:
    """The figures of each run of a round; the first run is fitted."""
    fitted = calibrate(runs[0], cores)
    found = []
    for run in runs:
        model = fitted.model(run.config, Assumptions())
        span = Span(steps=SIMULATED_STEPS)
        outcome = Cluster(run.config, model, fitted.workload, span).run()
        found.append(compare(outcome, measure(run)))
        if doubt := fitted.doubt(outcome):
            say(f"warning: {run.config.run.dir}: {doubt}")
    return found


def compare(predicted: Outcome, measured: Measured) -> Figures:
    """Each figure, predicted and measured."""
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
    """One run's figures: the median over all rounds, and the comparison of each round."""
    found: dict[str, dict[str, float | list[float]]] = {}
    for name in rounds[0]:
        # A measured share of 0 has no ratio.
        kinds = [kind for kind in rounds[0][name] if all(kind in f[name] for f in rounds)]
        found[name] = {kind: median(f[name][kind] for f in rounds) for kind in kinds}
        kind = "difference" if name in SHARES else "ratio"
        if kind in kinds:
            found[name]["by_round"] = [f[name][kind] for f in rounds]
    return found


def noise_of(rounds: list[Figures]) -> dict[str, float]:
    """Spread of each measured figure of one run: largest over smallest; of shares, less it."""
    found = {}
    for name in (*TIMES, *SHARES):
        measured = [figures[name]["measured"] for figures in rounds]
        low, high = min(measured), max(measured)
        if name in SHARES:
            found[name] = high - low
        elif low:
            found[name] = high / low
    return found


if __name__ == "__main__":
    sys.exit(main())
