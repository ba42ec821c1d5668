"""The simulated trainer: asks for batches, computes, syncs weights. As
`megatron_rl/trainer/train.py`.

Used by the simulation. A step: wait for the batch, passes, optimizer, ask for the next batch,
weight sync, say so. With an overlapped weight sync (`WeightSyncModel.is_overlapped`) the next batch
is taken at once, and the weight sync is waited for before the next optimizer step. With `Turns`
engines rest from the batch until the weight sync has reached them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megatron_rl.protocol.metrics import Reduce
from megatron_rl.protocol.types import NextBatch, RankBatch, WeightsSynced
from megatron_rl.rollout_queue.coordinator import BATCHES, Coordinator
from megatron_rl.simulation.events import EventClock
from megatron_rl.simulation.fleet import Fleet, Generator
from megatron_rl.simulation.machines import TrainerModel, Turns, WeightSyncModel
from megatron_rl.simulation.queue import PlannedBatches


@dataclass
class StepRecord:
    """One step, in seconds and versions."""

    ended_at: float
    wait_s: float
    compute_s: float
    sync_s: float
    """From its beginning to its end, overlapped or not."""
    stall_s: float
    """Of the weight sync, in which the trainer could do nothing else."""
    tokens: int
    staleness_sum: float
    rollouts: int
    staleness_max: float
    groups: int
    groups_dropped: int
    """For any reason, since the batch before; in a simulation nearly all have zero variance."""


@dataclass
class _Step:
    """The step under way."""

    wait_s: float = 0.0
    began_at: float = 0.0
    compute_s: float = 0.0
    optimizer_at: float = 0.0
    metrics: dict[str, tuple[float, float, Reduce]] = field(default_factory=dict)
    tokens: int = 0


class Trainer:
    """All ranks of the trainer as one."""

    def __init__(
        self,
        clock: EventClock,
        queue: Coordinator,
        fleet: Fleet,
        planned: PlannedBatches,
        *,
        model: TrainerModel,
        sync: WeightSyncModel,
        turns: Turns | None,
        dp_size: int,
        steps: int,
    ) -> None:
        self._clock, self._queue, self._fleet, self._planned = clock, queue, fleet, planned
        self._model, self._sync_model, self._turns = model, sync, turns
        self._dp_size, self._steps = dp_size, steps
        self.records: list[StepRecord] = []
        self._step = 0
        self._now: _Step = _Step()
        self._is_waiting = self._asked = False
        self._free_at = 0.0
        self._batch: RankBatch | None = None
        self._sync_ends: float | None = 0.0
        """Of the last weight sync; None: not yet."""
        self._joins: Callable[[], None] | None = None
        self._synced = -1
        self._sync_s = 0.0
        self._admits_until = 0.0

    def start(self) -> None:
        """Sync version 0 and ask for the first batch."""
        self._begin_sync(0, then=self._wait)

    # --- batches ----------------------------------------------------------------------------------

    def take_batch(self, batch: RankBatch) -> None:
        """A share of the next batch arrived; that of rank 0 speaks for all."""
        if batch.dp_rank == 0:
            self._batch = batch
            if self._is_waiting:
                self._begin_passes()

    def _wait(self) -> None:
        if self._step >= self._steps:
            return
        self._free_at, self._is_waiting = self._clock.now, True
        if self._batch is not None:
            self._clock.at(self._clock.now, self._begin_if_waiting)
        elif not self._asked:
            self._ask()

    def _ask(self) -> None:
        self._asked = True
        for rank in range(self._dp_size):
            message = NextBatch(self._step, rank, self._dp_size)
            self._queue.handle(BATCHES, f"trainer-{rank}", message, self._clock.now)

    def _begin_passes(self) -> None:
        if self._clock.now < self._admits_until:
            # It sends weights to a generator that came back.
            self._clock.at(self._admits_until, self._begin_if_waiting)
            return
        assert self._batch is not None
        batch, self._batch = self._batch, None
        plans = self._planned.take()
        now = self._clock.now
        self._is_waiting, self._asked = False, False
        self._now = _Step(
            wait_s=now - self._free_at,
            began_at=now,
            metrics=batch.metrics,
            tokens=sum(sum(plan.lengths) for plan in plans),
        )
        compute_s = self._model.compute_s(plans)
        if self._turns is None:
            self._compute(compute_s, self._end_passes)
            return
        for member in self._fleet.live:
            self._fleet.pause(member, member.session)
        self._clock.at(
            now + self._turns.release_s, partial(self._compute, compute_s, self._end_passes)
        )

    def _begin_if_waiting(self) -> None:
        if self._is_waiting and self._batch is not None:
            self._begin_passes()

    def _end_passes(self) -> None:
        if self._sync_ends is None:
            self._joins = self._begin_optimizer
            return
        self._begin_optimizer()

    def _begin_optimizer(self) -> None:
        self._compute(self._model.optimizer_s, self._end_step)

    def _end_step(self) -> None:
        self._now.compute_s = self._clock.now - self._now.began_at
        self._step += 1
        if self._step < self._steps:
            self._ask()
        if self._sync_model.is_overlapped:
            self._begin_sync(self._step, then=self._join)
            self._record(stall_s=0.0)
            self._wait()
        else:
            self._begin_sync(self._step, then=self._end_sync)

    def _end_sync(self) -> None:
        self._record(stall_s=self._sync_s)
        self._wait()

    def _join(self) -> None:
        if self.records:
            self.records[-1].sync_s = self._sync_s
        if self._joins is not None:
            joins, self._joins = self._joins, None
            joins()

    def _record(self, *, stall_s: float) -> None:
        step = self._now
        total, count, _ = step.metrics["queue/staleness_versions_mean"]
        dropped = sum(v for name, (v, _, _) in step.metrics.items() if "groups_dropped" in name)
        self.records.append(
            StepRecord(
                ended_at=self._clock.now,
                wait_s=step.wait_s,
                compute_s=step.compute_s,
                sync_s=self._sync_s,
                stall_s=stall_s,
                tokens=step.tokens,
                staleness_sum=total,
                rollouts=int(count),
                staleness_max=step.metrics["queue/staleness_versions_max"][0],
                groups=int(step.metrics["queue/groups_trained"][0]),
                groups_dropped=int(dropped),
            )
        )

    # --- weights ----------------------------------------------------------------------------------

    def _begin_sync(self, version: int, then: Callable[[], None]) -> None:
        members = self._fleet.live
        if not members:
            # As the syncer: with no generator left it waits for one.
            self._clock.at(self._clock.now + 1.0, partial(self._begin_sync, version, then))
            return
        now = self._clock.now
        times, total = self._sync_model.times(len(members))
        # Before version 0 they have given nothing back.
        reclaim_s = self._turns.reclaim_s if self._turns is not None and version else 0.0
        now += reclaim_s
        self._sync_ends, self._sync_s = None, reclaim_s + total
        for member, (pause, resume) in zip(members, times, strict=True):
            session = member.session
            self._clock.at(now + pause, partial(self._fleet.pause, member, session))
            self._clock.at(now + resume, partial(self._fleet.resume, member, session, version))
        self._clock.at(now + total, partial(self._synced_to_all, version, then))

    def _synced_to_all(self, version: int, then: Callable[[], None]) -> None:
        self._synced, self._sync_ends = version, self._clock.now
        is_final = version == self._steps
        self._queue.handle(BATCHES, "trainer-0", WeightsSynced(version, is_final), self._clock.now)
        then()

    def admit(self, generator: Generator) -> None:
        """A generator came back: it gets weights while the trainer waits for a batch."""
        if not self._is_waiting or self._synced < 0 or self._sync_ends is None:
            return
        begins = max(self._clock.now, self._admits_until)
        self._admits_until = begins + self._sync_model.replica_s
        resume = partial(self._fleet.resume, generator, generator.session, self._synced)
        self._clock.at(self._admits_until, resume)

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + seconds, then)
