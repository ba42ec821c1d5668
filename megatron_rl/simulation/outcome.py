"""What a simulated run came to, and who waited for whom. Pure.

Used by the simulation.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from megatron_rl.simulation.fleet import FleetTotals
from megatron_rl.simulation.trainer import StepRecord


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of the steady state: means over the measured steps. Times are seconds."""

    step_s: float
    trainer_idle: float
    """Share of the time that the trainer waited for batches."""
    generator_idle: float
    """Share of the time that engines had nothing in flight, or were dead."""
    slots_used: float
    """Completions that ran, over those that engines could run at once."""
    running_mean: float
    """Completions of a decoding iteration, on average."""
    staleness_mean: float
    staleness_max: int
    sync_s: float
    stall_s: float
    """Of a weight sync, in which the trainer could do nothing else."""
    compute_s: float
    wait_s: float
    latency_s: float
    """From a completion's lease to its end, on average."""
    tokens_per_s: float
    """Generated completion tokens, all of them."""
    trained_tokens: float
    """Of a step, prompts included."""
    zero_variance_share: float
    """Groups dropped, over all that were closed."""
    retractions: float
    """A step."""
    deaths: int
    timeouts: int
    verifier_busy: float
    """Share of the verifiers' servers' time."""
    verifier_s: float
    """That a server took for a completion, on average."""
    verifier_wait_s: float
    """That a completion waited for a server."""
    steps: int
    """Measured."""
    events: int


def sum_up(
    records: Sequence[StepRecord],
    began_at: float,
    totals: FleetTotals,
    *,
    engines: int,
    slots: int,
    servers: int,
    verifier_busy_s: float,
    verifier_waited_s: float,
    graded: int,
    events: int,
) -> Outcome:
    """The figures of the steps that are measured; `began_at` is the end of the step before."""
    length = records[-1].ended_at - began_at
    rollouts = sum(record.rollouts for record in records)
    dropped = sum(record.groups_dropped for record in records)
    groups = sum(record.groups for record in records)
    count = len(records)
    return Outcome(
        step_s=length / count,
        trainer_idle=sum(record.wait_s for record in records) / length,
        generator_idle=totals.idle_s / length / engines,
        slots_used=totals.running_s / length / engines / slots,
        running_mean=totals.tokens / max(1, totals.iterations),
        staleness_mean=sum(record.staleness_sum for record in records) / max(1, rollouts),
        staleness_max=int(max(record.staleness_max for record in records)),
        sync_s=statistics.fmean(record.sync_s for record in records),
        stall_s=statistics.fmean(record.stall_s for record in records),
        compute_s=statistics.fmean(record.compute_s for record in records),
        wait_s=statistics.fmean(record.wait_s for record in records),
        latency_s=totals.latency_s / max(1, totals.finished),
        tokens_per_s=totals.tokens / length,
        trained_tokens=sum(record.tokens for record in records) / count,
        zero_variance_share=dropped / (dropped + groups),
        retractions=totals.retractions / count,
        deaths=totals.deaths,
        timeouts=totals.timeouts,
        verifier_busy=verifier_busy_s / length / servers,
        verifier_s=verifier_busy_s / max(1, graded),
        verifier_wait_s=verifier_waited_s / max(1, graded),
        steps=count,
        events=events,
    )
