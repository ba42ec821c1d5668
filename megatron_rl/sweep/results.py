"""Figures of a sweep by variant and metric, with errors over seeds, and its missing runs.

Used by `megatron-rl sweep`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.sweep.folders import State, failure_of, state_of
from megatron_rl.sweep.measures import mean_of, measure
from megatron_rl.sweep.plan import Plan, PlannedRun

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    standard_error: float | None
    """Sample standard deviation over sqrt(n); None for one seed."""
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a variant from the baseline, paired by seed."""

    difference: Estimate
    """Over the common seeds."""
    t: float | None
    """Mean over standard error, with n - 1 degrees of freedom; None without an error or at 0."""
    higher: int
    """Seeds with a difference above 0."""
    lower: int
    """Seeds with a difference below 0."""
    sign_p: float | None
    """Two-sided p of the sign test; None when all seeds tie."""


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and standard error, not finite when a value is not; None without values."""
    if not values:
        return None
    count = len(values)
    with np.errstate(invalid="ignore", over="ignore"):
        error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else None
    return Estimate(mean_of(values), error, count)


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> PairedDifference | None:
    """The difference by seed; None without common seeds. Ties count for neither sign."""
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    found = estimate(differences)
    if found is None:
        return None
    error = found.standard_error
    # Equal differences may differ in the last bit.
    has_spread = error is not None and error > _ROUNDING * abs(found.mean)
    higher = sum(difference > 0 for difference in differences)
    lower = sum(difference < 0 for difference in differences)
    return PairedDifference(
        found, found.mean / error if has_spread else None, higher, lower, sign_p(higher, lower)
    )


def sign_p(higher: int, lower: int) -> float | None:
    """Two-sided p of the exact sign test: binomial with probability 1/2; None without a sign."""
    count = higher + lower
    if not count:
        return None
    tail = sum(math.comb(count, k) for k in range(max(higher, lower), count + 1))
    return min(1.0, 2 * tail / 2**count)


@dataclass(frozen=True)
class RunResult:
    run: PlannedRun
    state: State
    reason: str
    """Error of a failed run, else empty."""
    values: dict[str, float | None]
    """By metric; {} unless complete."""


@dataclass(frozen=True)
class Figure:
    """One metric of a variant."""

    variant: str
    metric: str
    estimate: Estimate | None
    """None: no complete run measured it."""
    difference: PairedDifference | None
    """From the baseline; None for the baseline itself, and without common seeds."""


@dataclass(frozen=True)
class Results:
    plan: Plan
    runs: tuple[RunResult, ...]
    figures: tuple[Figure, ...]
    """Metric by metric, variants in the order of the plan."""

    @property
    def missing(self) -> list[RunResult]:
        """Runs that the figures exclude."""
        return [result for result in self.runs if result.state is not State.COMPLETE]


def collect(plan: Plan) -> Results:
    """Read the folders of all runs; figures are of the complete runs."""
    runs = tuple(_read(plan))
    figures = [
        _figure(runs, variant, metric, plan.baseline)
        for metric in plan.sweep.metrics
        for variant in plan.variants
    ]
    return Results(plan, runs, tuple(figures))


def _read(plan: Plan) -> Iterator[RunResult]:
    states = {run.run_dir: state_of(run) for run in plan.runs}
    complete = [run_dir for run_dir, state in states.items() if state is State.COMPLETE]
    values = dict(zip(complete, measure(complete, plan.sweep.metrics), strict=True))
    for run in plan.runs:
        state = states[run.run_dir]
        reason = failure_of(run) if state is State.FAILED else ""
        yield RunResult(run, state, reason, values.get(run.run_dir, {}))


def _figure(runs: tuple[RunResult, ...], variant: str, metric: str, baseline: str) -> Figure:
    values = _by_seed(runs, variant, metric)
    difference = None
    if variant != baseline:
        difference = paired_difference(values, _by_seed(runs, baseline, metric))
    return Figure(variant, metric, estimate(list(values.values())), difference)


def _by_seed(runs: tuple[RunResult, ...], variant: str, metric: str) -> Mapping[int, float]:
    found = {r.run.seed: r.values.get(metric) for r in runs if r.run.variant == variant}
    return {seed: value for seed, value in found.items() if value is not None}


def as_json(results: Results) -> dict[str, Any]:
    """The content of sweep.json."""
    plan = results.plan
    return {
        "name": plan.sweep.name,
        "base": str(plan.sweep.base),
        "baseline": plan.baseline,
        "seeds": plan.sweep.seeds,
        "variants": {name: list(overrides) for name, overrides in plan.variants.items()},
        "runs": [
            {
                "variant": result.run.variant,
                "seed": result.run.seed,
                "run_dir": str(result.run.run_dir),
                "state": result.state.value,
                "reason": result.reason,
                "metrics": result.values,
            }
            for result in results.runs
        ],
        "figures": [dataclasses.asdict(figure) for figure in results.figures],
    }
