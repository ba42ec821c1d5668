"""How unequal the steps of a run were: hosts and devices are not equally fast always. Pure.

Used by calibration. A pace is how many times as long a role took in one step as what is fitted to
the whole run says; over a run it is 1 on average. Those of trainer and engines belong together:
what slows a host down slows both.
"""

from collections.abc import Sequence

import numpy as np

from megatron_rl.simulation.core_use import CoreUse, update_span
from megatron_rl.simulation.decoding import decoding_of
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.records import RunRecords

_LEAST_COMPLETIONS = 16
"""Leased in a step, from which on they tell how fast engines were in it."""


def trainer_paces(run: RunRecords, use: CoreUse) -> tuple[float, ...]:
    """Of each step, by the work that a token took."""
    tokens = [row.get("train/tokens_per_s", 0.0) * row["train/update_s"] for row in run.steps]
    return _paces([use.update_work(row) for row in run.steps], tokens)


def engine_paces(
    run: RunRecords, use: CoreUse, model: EngineModel, hand_over_s: float
) -> tuple[float, ...]:
    """Of each step, by the iterations of the completions that were leased in it, if there are some.

    Where completions outlast steps, paces of neighbours mix. hand_over_s: of the run, in which
    others may have had the cores.
    """
    decoding = decoding_of(run, use, hand_over_s)
    costs = (model.base_s, model.per_running_s, model.per_kv_token_s, model.request_s)
    # From update to update: engines go on, and lease again, before the weight sync is over.
    ends = [update_span(row)[1] for row in run.steps]
    step = np.searchsorted(ends, decoding.leased)
    # A step of a few completions tells how punctual these were.
    tells = np.bincount(step, minlength=len(ends) + 1) >= _LEAST_COMPLETIONS
    took, expected = (
        (np.bincount(step, decoding.own_steps * seconds, len(ends) + 1) * tells)[
            : len(ends)
        ].tolist()
        for seconds in (decoding.work_s, decoding.columns @ np.array(costs))
    )
    return _paces(took, expected)


def _paces(took: Sequence[float], expected: Sequence[float]) -> tuple[float, ...]:
    """1 where nothing tells."""
    if not sum(took) or not sum(expected):
        return (1.0,)
    whole = sum(took) / sum(expected)
    return tuple(t / (e * whole) if e else 1.0 for t, e in zip(took, expected, strict=True))
