"""Fits an engine's costs to the completions of a run. Pure.

Used by calibration. A recorded completion goes through four times:

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

import numpy as np

from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.simulation.core_use import CoreUse
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.load_curve import LoadCurve, fit_not_negative
from megatron_rl.simulation.records import RunRecords

_LEAST_TOGETHER = 16
"""Completions that end together, from which on their spread is looked at."""
_SAME_PASS_S = 0.002
"""First tokens this near to each other are of one pass: moments are recorded in milliseconds."""


def fit_engine(run: RunRecords, use: CoreUse, hand_over_s: float) -> EngineModel:
    """The model of one of the run's engines, with a hand-over that is known."""
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
        weights.append(np.sqrt((tokens - 1)[is_used]))
        running = curve.mean_running(starts[is_used], ends[is_used])
        kv = curve.mean_kv(starts[is_used], ends[is_used])
        joins, passes = _prefills_within(records, starts[is_used], ends[is_used])
        steps = (tokens - 1)[is_used]
        columns.append(np.stack([1 + passes / steps, running, kv, joins / steps], axis=1))
    weight = np.concatenate(weights)
    base, per_running, per_kv, request_s = fit_not_negative(
        np.concatenate(columns) * weight[:, None], np.concatenate(values) * weight
    )
    firsts = [r.times.first_token_s for r in run.rollouts if r.times.first_token_s >= 0]
    mean_running = float(np.mean(np.concatenate(columns)[:, 1]))
    # A completion waits for the prefills of those that come with it: half of them on average.
    alone_s = 2 * float(np.median(firsts)) / max(1.0, mean_running) if firsts else 0.0
    return EngineModel(
        base_s=max(float(base), 1e-6),
        per_running_s=float(per_running),
        per_kv_token_s=float(per_kv),
        prefill_s_per_token=0.0,
        max_running=run.config.generator.max_running,
        kv_tokens=run.config.generator.kv_tokens,
        request_s=max(float(request_s), alone_s),
        hand_over_s=hand_over_s,
        prefill_samples=bool(firsts),
    )


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


def fit_hand_over(together: Sequence[Sequence[RolloutRecord]]) -> float:
    """Seconds between two arrivals of completions that ended at once; 0 where none did.

    From the middle half: a few may have joined an iteration sooner. Counted from the first token,
    so that prefills in several passes are no part of it.
    """
    seconds = completions = 0.0
    for group in together:
        if len(group) < _LEAST_TOGETHER or group[0].times.first_token_s < 0:
            continue
        took = [r.times.done - r.times.leased - r.times.first_token_s for r in group]
        low, high = np.percentile(took, [25, 75])
        seconds += float(high - low)
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
