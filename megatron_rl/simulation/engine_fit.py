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
from megatron_rl.simulation.decoding import decoding_of
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.hand_over_fit import ending_together, fit_hand_over
from megatron_rl.simulation.load_curve import fit_not_negative
from megatron_rl.simulation.pass_fit import (
    fit_decoding,
    fit_prefill,
    middle_of,
    prefilled_tokens,
    sizes_of,
)
from megatron_rl.simulation.records import RunRecords


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
    prefill_base, request, token, wake = fit_prefill(run.passes)
    # Where prompts begin alike, the engine knows a part of each: it prefills the rest.
    prompts = {record.group: record.prompt_tokens for record in run.within()}
    prefill_s_per_token = token * prefilled_tokens(run.passes) / sum(prompts.values())
    alone_s = prefill_base + request + wake
    alone_s += prefill_s_per_token * float(np.mean(list(prompts.values())))
    model = EngineModel(
        base_s=max(base, 1e-6),
        per_running_s=running,
        per_kv_token_s=kv,
        prefill_s_per_token=prefill_s_per_token,
        max_running=run.config.generator.max_running,
        kv_tokens=run.config.generator.bounded_kv_tokens,
        request_s=request,
        prefill_samples=True,
        prefill_base_s=prefill_base,
        wake_s=wake,
        end_s=ended,
        lease_s=fit_lease(run.rollouts, alone_s=alone_s),
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
    decoding = decoding_of(run, use, hand_over_s)
    weight = np.sqrt(decoding.own_steps)
    base, per_running, per_kv, request_s = fit_not_negative(
        decoding.columns * weight[:, None], decoding.work_s * weight
    )
    firsts = [r.times.first_token_s for r in run.rollouts if r.times.first_token_s >= 0]
    sizes = decoding.running
    # A completion waits for the prefills of those that come with it: half of them on average.
    alone_s = 2 * float(np.median(firsts)) / max(1.0, float(sizes.mean())) if firsts else 0.0
    base = max(float(base), 1e-6)
    model = EngineModel(
        base_s=base,
        per_running_s=float(per_running),
        per_kv_token_s=float(per_kv),
        prefill_s_per_token=0.0,
        max_running=run.config.generator.max_running,
        kv_tokens=run.config.generator.bounded_kv_tokens,
        request_s=max(float(request_s), alone_s),
        prefill_samples=bool(firsts),
        prefill_base_s=base if firsts else 0.0,
    )
    return FittedEngine(model, *middle_of(sizes, decoding.own_steps))
