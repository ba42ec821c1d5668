"""Compares predictions of `megatron-rl simulate` with runs: `python -m tools.bench.simulate`.

    python -m tools.bench.simulate FITTED OTHER [OTHER ...]

Fits the models to the first run, and predicts the configurations of all runs. Each role of a run
needs separate devices, because the simulator does not model roles that share cores. The last line
on stdout is one JSON object: for each run and figure the prediction, the measurement, their ratio,
and for shares their difference.
"""

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.simulation.calibration import calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.records import Measured, RunRecords, measure, read_run

SIMULATED_STEPS = 200
TIMES = ("step_s", "compute_s", "sync_s", "latency_s", "staleness_mean")
SHARES = ("trainer_idle", "generator_idle")
Figures = dict[str, dict[str, float]]
"""Figure -> predicted, measured, ratio, difference."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; the first one is fitted")
    folders = parser.parse_args(arguments).runs
    try:
        found = compare_runs([read_run(folder) for folder in folders])
    except InputError as error:
        print(f"tools.bench.simulate: {error}", file=sys.stderr)
        return 2
    names = [str(folder) for folder in folders]
    print(json.dumps({"runs": dict(zip(names, found, strict=True))}))
    return 0


def compare_runs(runs: list[RunRecords]) -> list[Figures]:
    """Figures of each run; the models are fitted to the first."""
    fitted = calibrate(runs[0])
    found = []
    for run in runs:
        model = fitted.model(run.config, Assumptions())
        cluster = Cluster(run.config, model, fitted.workload, Span(steps=SIMULATED_STEPS))
        outcome = cluster.run()
        found.append(compare(outcome, measure(run)))
        if doubt := fitted.doubt(outcome):
            print(f"warning: {run.config.run.dir}: {doubt}", file=sys.stderr)
    return found


def compare(predicted: Outcome, measured: Measured) -> Figures:
    found: Figures = {}
    for name in (*TIMES, *SHARES):
        said, was = getattr(predicted, name), getattr(measured, name)
        found[name] = {"predicted": said, "measured": was}
        if was:
            found[name]["ratio"] = said / was
        if name in SHARES:
            found[name]["difference"] = said - was
    return found


if __name__ == "__main__":
    sys.exit(main())
