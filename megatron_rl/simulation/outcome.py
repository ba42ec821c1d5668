"""The figures of a simulated run: step time and waiting times. Pure."""

import dataclasses
import statistics
from collections.abc import Sequence

from megatron_rl.simulation.fleet import FleetTotals
from megatron_rl.simulation.queue import VirtualRun
from megatron_rl.simulation.trainer import StepRecord
from megatron_rl.simulation.verifiers import Verifiers


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Means over the measured steps. Times are seconds."""

    step_s: float
    trainer_idle: float
    """Share of time that the trainer waited for batches."""
    generator_idle: float
    """Share of time that engines had no completion or were dead."""
    slots_used: float
    """Running completions over max_running."""
    running_mean: float
    """Mean completions per iteration."""
    staleness_mean: float
    staleness_max: int
    sync_s: float
    stall_s: float
    """Time of a weight sync in which the trainer waited."""
    compute_s: float
    wait_s: float
    latency_s: float
    """Mean from a completion's lease to its end."""
    tokens_per_s: float
    """All generated completion tokens."""
    trained_tokens: float
    """Per step, including prompts."""
    zero_variance_share: float
    """Dropped groups over all closed groups."""
    retractions: float
    """Per step."""
    deaths: int
    timeouts: int
    verifier_busy: float
    """Share of the servers' time."""
    verifier_s: float
    """Mean grading time of a completion."""
    verifier_wait_s: float
    """Mean wait of a completion for a server."""
    steps: int
    """Measured steps."""
    events: int


def sum_up(
    run: VirtualRun,
    records: Sequence[StepRecord],
    began_at: float,
    totals: FleetTotals,
    verifiers: Verifiers,
) -> Outcome:
    """The figures of the measured steps; began_at: the end of the previous step."""

    def total(name: str) -> float:
        return sum(getattr(record, name) for record in records)

    def mean(name: str) -> float:
        return statistics.fmean(getattr(record, name) for record in records)

    length, count, graded = records[-1].ended_at - began_at, len(records), max(1, verifiers.graded)
    engines, dropped = run.config.generator.replicas, total("groups_dropped")
    return Outcome(
        step_s=length / count,
        trainer_idle=total("wait_s") / length,
        generator_idle=totals.idle_s / length / engines,
        slots_used=totals.running_s / length / engines / run.model.engine.max_running,
        running_mean=totals.tokens / max(1, totals.iterations),
        staleness_mean=total("staleness_sum") / max(1, total("rollouts")),
        staleness_max=int(max(record.staleness_max for record in records)),
        sync_s=mean("sync_s"),
        stall_s=mean("stall_s"),
        compute_s=mean("compute_s"),
        wait_s=mean("wait_s"),
        latency_s=totals.latency_s / max(1, totals.finished),
        tokens_per_s=totals.tokens / length,
        trained_tokens=total("tokens") / count,
        zero_variance_share=dropped / (dropped + total("groups")),
        retractions=totals.retractions / count,
        deaths=totals.deaths,
        timeouts=totals.timeouts,
        verifier_busy=verifiers.busy_s / length / run.model.verifier.servers,
        verifier_s=verifiers.busy_s / graded,
        verifier_wait_s=verifiers.waited_s / graded,
        steps=count,
        events=run.events,
    )
