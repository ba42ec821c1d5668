"""How completions that ended came from an engine to the queue: one after the other. Pure.

Used by calibration. Those of one length that were leased together end in one iteration; their
arrivals lie as far apart as a hand-over takes.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.simulation.core_use import CoreUse

_LEAST_TOGETHER = 16
"""Completions that end together, from which on their spread is looked at."""


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
            between *= use.engines.speed(float(begin), float(end))
        seconds += between
        completions += (len(group) - 1) / 2
    return seconds / completions if completions else 0.0


def ends_at_engine(records: list[RolloutRecord], hand_over_s: float) -> np.ndarray:
    """[completions] unix seconds of the last token: less its own hand-over and those before it."""
    ends = {
        id(record): record.times.done - (place + 1) * hand_over_s
        for group in ending_together(records)
        for place, record in enumerate(group)
    }
    return np.array([ends[id(record)] for record in records])
