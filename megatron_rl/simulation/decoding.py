"""What recorded completions say of an engine's iterations. Pure.

Used by calibration. A completion of T tokens went through T - 1 iterations after its first token;
with how many others, and over how many tokens, follows from all completions of the engine. Passes
in which others got their first tokens stopped it meanwhile.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.simulation.core_use import CoreUse
from megatron_rl.simulation.hand_over_fit import ends_at_engine
from megatron_rl.simulation.load_curve import LoadCurve
from megatron_rl.simulation.records import RunRecords

_SAME_PASS_S = 0.002
"""First tokens this near to each other are of one pass: moments are recorded in milliseconds."""


@dataclass(frozen=True)
class Decoding:
    """Of completions that decoded within the steps that are looked at, in any order."""

    leased: np.ndarray  # [completions] unix seconds
    steps: np.ndarray  # [completions] iterations
    work_s: np.ndarray  # [completions] seconds of an iteration, at full speed, on average
    columns: np.ndarray
    """[completions, 4] of an iteration, on average: 1 and prefill passes, completions, tokens of
    the cache, others' first tokens."""

    @property
    def running(self) -> np.ndarray:
        """[completions] how many decoded with each, itself included."""
        return self.columns[:, 1]

    @property
    def own_steps(self) -> np.ndarray:
        """[completions] its share of its iterations: those that run together tell the same, and
        each iteration counts once."""
        return self.steps / np.maximum(self.running, 1.0)


def decoding_of(run: RunRecords, use: CoreUse, hand_over_s: float) -> Decoding:
    """Of all engines of a run. hand_over_s: of each completion."""
    by_engine: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in run.rollouts:
        by_engine[record.generator].append(record)
    parts = [_of_engine(run, records, use, hand_over_s) for records in by_engine.values()]
    return Decoding(
        np.concatenate([part.leased for part in parts]),
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.work_s for part in parts]),
        np.concatenate([part.columns for part in parts]),
    )


def _of_engine(
    run: RunRecords, records: list[RolloutRecord], use: CoreUse, hand_over_s: float
) -> Decoding:
    leased = np.array([r.times.leased for r in records])
    starts = leased + np.array([max(0.0, r.times.first_token_s) for r in records])
    ends = ends_at_engine(records, hand_over_s)
    tokens = np.array([r.tokens for r in records])
    curve = LoadCurve(leased, ends, [r.prompt_tokens for r in records], tokens)
    is_used = (ends > starts) & (tokens > 1) & (ends > run.began_at) & (ends < run.ended_at)
    leased, starts, ends, steps = (
        leased[is_used], starts[is_used], ends[is_used], tokens[is_used] - 1
    )  # fmt: skip
    joins, passes = _prefills_within(records, starts, ends)
    columns = [
        1 + passes / steps,
        curve.mean_running(starts, ends),
        curve.mean_kv(starts, ends),
        joins / steps,
    ]
    return Decoding(
        leased, steps, use.engines.work(starts, ends) / steps, np.stack(columns, axis=1)
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
