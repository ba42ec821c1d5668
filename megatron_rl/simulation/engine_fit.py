"""Fits an engine's costs to a run: to the passes that engines counted, or to completions. Pure.

Used by calibration. Passes say all of it but hand-over (`pass_fit.py`). Where engines do not tell,
a recorded completion goes through four times:

| time                  | what is fitted to it                                           |
|-----------------------|----------------------------------------------------------------|
| lease to first token  | nothing: waiting is in it; calibration changes request_s until  |
|                       | the whole is as long as it was (`calibration.py`)               |
| its T - 1 iterations  | base_s, per_running_s, per_kv_token_s, request_s: least squares |
| hand-over             | hand_over_s: completions of one length that were leased         |
|                       | together end in one iteration, and reach the queue one by one   |

Passes in which others got their first tokens stopped a completion's iterations: each counts
base_s, and request_s for each of those others.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.simulation.core_use import CoreUse
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.load_curve import LoadCurve, fit_not_negative
from megatron_rl.simulation.pass_fit import fit_decoding, fit_prefill, middle_of, sizes_of
from megatron_rl.simulation.records import RunRecords

_LEAST_TOGETHER = 16
"""Completions that end together, from which on their spread is looked at."""
_SAME_PASS_S = 0.002
"""First tokens this near to each other are of one pass: moments are recorded in milliseconds."""


@dataclass(frozen=True)
class FittedEngine:
    """The model of one of the run's engines, and what it was fitted to."""

    model: EngineModel
    least_running: float
    most_running: float
    """Completions of an iteration, in nine of ten of them: what is known of other sizes is a
    guess."""


def fit_engine(run: RunRecords, use: CoreUse, hand_over_s: float) -> FittedEngine:
    """The engine of a run. hand_over_s: of the run, in which others may have had the cores."""
    fitted = _from_passes(run) if run.passes else _from_completions(run, use, hand_over_s)
    work_s = fit_hand_over(ending_together(run.rollouts), use)
    return replace(fitted, model=replace(fitted.model, hand_over_s=work_s))


def _from_passes(run: RunRecords) -> FittedEngine:
    base, running, kv, ended = fit_decoding(run.passes)
    prefill_base, request, wake = fit_prefill(run.passes)
    model = EngineModel(
        base_s=max(base, 1e-6),
        per_running_s=running,
        per_kv_token_s=kv,
        prefill_s_per_token=0.0,
        max_running=run.config.generator.max_running,
        kv_tokens=run.config.generator.kv_tokens,
        request_s=request + ended,
        prefill_samples=True,
        prefill_base_s=prefill_base,
        wake_s=wake,
        lease_s=fit_lease(run.rollouts, alone_s=prefill_base + request + wake),
    )
    return FittedEngine(model, *sizes_of(run.passes))


def fit_lease(records: Sequence[RolloutRecord], *, alone_s: float) -> float:
    """Seconds of a lease until the engine has it: those until the first token, where it was idle.

    alone_s: of a prefill pass for one completion. Leases that come together come one by one.
    """
    by_engine: defaultdict[str, defaultdict[float, list[RolloutRecord]]]
    by_engine = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_engine[record.generator][record.times.leased].append(record)
    waited_s, leases = 0.0, 0
    for by_moment in by_engine.values():
        busy_until = 0.0
        for moment, found in sorted(by_moment.items()):
            first_s = min(record.times.first_token_s for record in found)
            if moment > busy_until and first_s >= 0:
                waited_s += max(0.0, first_s - alone_s)
                leases += len({record.group for record in found})
            busy_until = max(busy_until, *(record.times.done for record in found))
    return waited_s / leases if leases else 0.0


def _from_completions(run: RunRecords, use: CoreUse, hand_over_s: float) -> FittedEngine:
    by_engine: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in run.rollouts:
        by_engine[record.generator].append(record)
    columns, values, weights = [], [], []
    for records in by_engine.values():
        starts = np.array([r.times.leased + max(0.0, r.times.first_token_s) for r in records])
        ends = _ends_at_engine(records, hand_over_s)
        tokens = np.array([r.tokens for r in records])
        curve = LoadCurve(
            [r.times.leased for r in records], ends, [r.prompt_tokens for r in records], tokens
        )
        is_used = (ends > starts) & (tokens > 1) & (ends > run.began_at) & (ends < run.ended_at)
        values.append(use.work(starts, ends)[is_used] / (tokens - 1)[is_used])
        running = curve.mean_running(starts[is_used], ends[is_used])
        # Completions that run together tell the same: each iteration counts once.
        weights.append(np.sqrt((tokens - 1)[is_used] / np.maximum(running, 1.0)))
        kv = curve.mean_kv(starts[is_used], ends[is_used])
        joins, passes = _prefills_within(records, starts[is_used], ends[is_used])
        steps = (tokens - 1)[is_used]
        columns.append(np.stack([1 + passes / steps, running, kv, joins / steps], axis=1))
    weight = np.concatenate(weights)
    base, per_running, per_kv, request_s = fit_not_negative(
        np.concatenate(columns) * weight[:, None], np.concatenate(values) * weight
    )
    firsts = [r.times.first_token_s for r in run.rollouts if r.times.first_token_s >= 0]
    sizes = np.concatenate(columns)[:, 1]
    # A completion waits for the prefills of those that come with it: half of them on average.
    alone_s = 2 * float(np.median(firsts)) / max(1.0, float(sizes.mean())) if firsts else 0.0
    base = max(float(base), 1e-6)
    model = EngineModel(
        base_s=base,
        per_running_s=float(per_running),
        per_kv_token_s=float(per_kv),
        prefill_s_per_token=0.0,
        max_running=run.config.generator.max_running,
        kv_tokens=run.config.generator.kv_tokens,
        request_s=max(float(request_s), alone_s),
        prefill_samples=bool(firsts),
        prefill_base_s=base if firsts else 0.0,
    )
    return FittedEngine(model, *middle_of(sizes, weight**2))


def _prefills_within(
    records: list[RolloutRecord], starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[intervals] completions that got their first tokens in them, and the passes that these took.

    Both 0 where the engine does not say when.
    """
    first = np.sort(
        [r.times.leased + r.times.first_token_s for r in records if r.times.first_token_s >= 0]
    )
    if not len(first):
        return np.zeros_like(starts), np.zeros_like(starts)
    begins_pass = np.concatenate([[True], np.diff(first) > _SAME_PASS_S])
    # After the pass that a completion was in itself.
    low = np.searchsorted(first, starts + _SAME_PASS_S, side="right")
    high = np.maximum(low, np.searchsorted(first, ends, side="left"))
    passes = np.concatenate([[0], np.cumsum(begins_pass)])
    return (high - low) * 1.0, (passes[high] - passes[low]) * 1.0


def ending_together(records: Sequence[RolloutRecord]) -> list[list[RolloutRecord]]:
    """Completions by engine, moment of lease and length, each in the order of arrival."""
    found: defaultdict[tuple[str, float, int], list[RolloutRecord]] = defaultdict(list)
    for record in records:
        found[record.generator, record.times.leased, record.tokens].append(record)
    return [sorted(group, key=lambda record: record.times.done) for group in found.values()]


def fit_hand_over(together: Sequence[Sequence[RolloutRecord]], use: CoreUse | None = None) -> float:
    """Seconds between two arrivals of completions that ended at once; 0 where none did.

    From the middle half: a few may have joined an iteration sooner. Counted from the first token,
    so that prefills in several passes are no part of it. use: seconds of work instead.
    """
    seconds = completions = 0.0
    for group in together:
        if len(group) < _LEAST_TOGETHER or group[0].times.first_token_s < 0:
            continue
        took = [r.times.done - r.times.leased - r.times.first_token_s for r in group]
        low, high = np.percentile(took, [25, 75])
        between = float(high - low)
        if use is not None:
            arrivals = np.array([record.times.done for record in group])
            begin, end = np.percentile(arrivals, [25, 75])
            between *= use.speed(float(begin), float(end))
        seconds += between
        completions += (len(group) - 1) / 2
    return seconds / completions if completions else 0.0


def _ends_at_engine(records: list[RolloutRecord], hand_over_s: float) -> np.ndarray:
    """[completions] unix seconds of the last token: less its own hand-over and those before it."""
    ends = {
        id(record): record.times.done - (place + 1) * hand_over_s
        for group in ending_together(records)
        for place, record in enumerate(group)
    }
    return np.array([ends[id(record)] for record in records])
