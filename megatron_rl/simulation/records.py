"""Steady-state figures of a finished run, to fit to or to compare with.

Used by `megatron-rl simulate --calibrate` and `tools.bench.simulate`. Reads metrics.jsonl and
rollouts/. Leaves out the first steps, in which the queue fills, the last steps, for which no
further group opens, and the time in which the run was stopped.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import RESUMED, Interval, find_stops, overlap_s, stream_rows
from megatron_rl.protocol.rollout_files import (
    RolloutRecord,
    read_records,
    rollout_files,
    without_texts,
)

WARM_UP = 5
"""Steps left out at the beginning, as in a simulation."""
LEAST_STEPS = 5
_OF_TRAINER = ("wait/batch_s", "weight_sync/s")
"""Metrics of steps, and of the first weight sync of a start."""


@dataclass(frozen=True)
class Measured:
    """Figures of the steady state, with the names of `Outcome`."""

    step_s: float
    trainer_idle: float
    generator_idle: float
    staleness_mean: float
    staleness_max: int
    sync_s: float
    compute_s: float
    latency_s: float
    """Mean from a completion's lease to its arrival."""
    rest_s: float
    """Time of a step in which the trainer neither waits, computes nor syncs."""
    steps: int


class Sampled(NamedTuple):
    """A completion, or a reply of a conversation, in its engine."""

    asked: float
    first_token: float
    """The same as `asked` if it is not known."""
    done: float
    """Unix seconds."""
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class RunRecords:
    """A run and its steady-state steps."""

    config: Config
    steps: list[dict[str, Any]]
    """Rows of the trainer, one per step."""
    rollouts: list[RolloutRecord]
    """All training rollouts, with times and without texts."""
    began_at: float
    ended_at: float
    """Unix seconds of the first and last of these steps."""
    stops: list[Interval]
    """Times in which the run was stopped."""

    @property
    def length_s(self) -> float:
        """Seconds of these steps."""
        return self.seconds(self.began_at, self.ended_at)

    def seconds(self, start: float, end: float) -> float:
        """Seconds of an interval in which the run was not stopped."""
        return end - start - overlap_s((start, end), self.stops)

    def within(self) -> list[RolloutRecord]:
        """Rollouts that arrived during these steps, and waited for no resume."""
        return [
            record
            for record in self.rollouts
            if record.times is not None
            and self.began_at <= record.times.done <= self.ended_at
            and not overlap_s(
                (record.times.leased, record.times.scored or record.times.done), self.stops
            )
        ]


def sampled(record: RolloutRecord) -> list[Sampled]:
    """What its engine sampled of a rollout with times."""
    times = record.times
    assert times is not None
    if not record.conversation:
        first = times.leased + max(0.0, times.first_token_s)
        return [Sampled(times.leased, first, times.done, record.prompt_tokens, record.tokens)]
    found = []
    for turn in record.conversation:
        asked, done = times.leased + turn.asked_s, times.leased + turn.replied_s
        found.append(Sampled(asked, asked, done, turn.before, turn.end - turn.start))
    return found


def read_run(run_dir: Path) -> RunRecords:
    """The records of a run. Raises InputError."""
    if not (run_dir / "config.toml").exists():
        raise InputError(f"--calibrate {run_dir} holds no run: it has no config.toml")
    config = load_config(run_dir / "config.toml")
    rows = [
        row
        for row in stream_rows(run_dir / "metrics.jsonl")
        if RESUMED in row
        or (row.get("source") == "trainer" and not row.keys().isdisjoint(_OF_TRAINER))
    ]
    steps = [row for row in rows if "wait/batch_s" in row]
    last = len(steps) - config.queue.max_staleness - 1
    if last - WARM_UP < LEAST_STEPS:
        raise InputError(
            f"{run_dir} has {len(steps)} steps: give a run with at least "
            f"{WARM_UP + LEAST_STEPS + config.queue.max_staleness + 1}"
        )
    looked_at = steps[WARM_UP:last]
    rollouts = [
        without_texts(record)
        for file in rollout_files(run_dir)
        if file.step is not None
        for record in read_records(file.path)
        if record.times is not None and record.tokens > 0
    ]
    if not rollouts:
        raise InputError(f"{run_dir}/rollouts holds no rollouts with times: give a newer run")
    began_at, ended_at = steps[WARM_UP - 1]["time"], looked_at[-1]["time"]
    return RunRecords(config, looked_at, rollouts, began_at, ended_at, find_stops(rows))


def measure(run: RunRecords) -> Measured:
    length = run.length_s
    steps = run.steps
    count = len(steps)

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in steps)

    accounted = sum(map(total, ("wait/batch_s", "train/update_s", "weight_sync/s")))
    rollouts = total("queue/rollouts_trained")
    stale = sum(
        row["queue/staleness_versions_mean"] * row["queue/rollouts_trained"] for row in steps
    )
    arrived = run.within()
    latencies = [record.times.done - record.times.leased for record in arrived]
    return Measured(
        step_s=length / count,
        trainer_idle=total("wait/batch_s") / length,
        generator_idle=_idle_share(run),
        staleness_mean=stale / rollouts,
        staleness_max=int(max(row["queue/staleness_versions_max"] for row in steps)),
        sync_s=total("weight_sync/s") / count,
        compute_s=total("train/update_s") / count,
        latency_s=float(np.mean(latencies)),
        rest_s=max(0.0, length - accounted - total("checkpoint/stall_s")) / count,
        steps=count,
    )


def _idle_share(run: RunRecords) -> float:
    """Share of time that an engine had nothing to sample, over all generators."""
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in run.rollouts:
        spans[record.generator] += [(one.asked, one.done) for one in sampled(record)]
    length = run.length_s
    idle = 0.0
    for intervals in spans.values():
        reached = run.began_at
        busy = 0.0
        for start, end in sorted(intervals):
            start, end = max(start, reached), min(end, run.ended_at)
            if end > start:
                busy += run.seconds(start, end)
                reached = end
        idle += length - busy
    return idle / length / run.config.generator.replicas
