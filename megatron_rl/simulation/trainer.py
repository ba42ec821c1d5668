"""The simulated trainer: asks for batches, computes, syncs weights, like `trainer/train.py`.

One step: wait for the batch, passes, optimizer, ask for the next batch, weight sync. With an
overlapped weight sync (`WeightSyncModel.is_overlapped`) the trainer takes the next batch at once
and waits for the sync before the next optimizer step. With `Turns` engines pause from the batch
until their weight sync.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_rl.protocol.types import NextBatch, RankBatch, WeightsSynced
from megatron_rl.rollout_queue.coordinator import BATCHES
from megatron_rl.simulation.fleet import Fleet, Generator
from megatron_rl.simulation.queue import VirtualRun


@dataclass
class StepRecord:
    """One step, in seconds and versions; future times are 0."""

    began_at: float
    wait_s: float
    tokens: int
    """Prompts and completions."""
    staleness_sum: float
    rollouts: int
    staleness_max: float
    groups: int
    groups_dropped: int
    """For any reason since the previous batch; nearly all have zero variance."""
    compute_s: float = 0.0
    ended_at: float = 0.0
    sync_s: float = 0.0
    """Duration of the weight sync, overlapped or not."""
    stall_s: float = 0.0
    """Time of the weight sync in which the trainer waited."""


class Trainer:
    """All ranks of the trainer as one."""

    def __init__(self, run: VirtualRun, fleet: Fleet) -> None:
        self._run, self._fleet = run, fleet
        self._sync_model, self._turns = run.model.sync, run.model.turns
        self._dp_size, self._steps = run.config.parallel.data, run.config.train.steps
        self.records: list[StepRecord] = []
        self._step = 0
        self._is_waiting = self._asked = False
        self._free_at = 0.0
        self._batch: RankBatch | None = None
        self._is_syncing = False
        self._after_sync: Callable[[], None] | None = None
        """Waits for the end of an overlapped weight sync."""
        self._synced = -1
        self._sync_s = 0.0
        self._admits_until = 0.0

    def start(self) -> None:
        """Sync version 0 and ask for the first batch."""
        self._begin_sync(0, then=self._wait)

    # --- batches ----------------------------------------------------------------------------------

    def take_batch(self, batch: RankBatch) -> None:
        """Take a rank's share of the next batch; rank 0 stands for all."""
        if batch.dp_rank == 0:
            self._batch = batch
            self._begin_if_ready()

    def _wait(self) -> None:
        if self._step >= self._steps:
            return
        self._free_at, self._is_waiting = self._run.now, True
        if self._batch is not None:
            self._run.later(0.0, self._begin_if_ready)
        elif not self._asked:
            self._ask()

    def _ask(self) -> None:
        self._asked = True
        for rank in range(self._dp_size):
            message = NextBatch(self._step, rank, self._dp_size)
            self._run.say(BATCHES, f"trainer-{rank}", message)

    def _begin_if_ready(self) -> None:
        if not self._is_waiting or self._batch is None:
            return
        now = self._run.now
        if now < self._admits_until:
            # The trainer sends weights to a generator that restarted.
            self._run.at(self._admits_until, self._begin_if_ready)
            return
        batch, self._batch = self._batch, None
        plans, self._run.planned = self._run.planned, []
        self._is_waiting, self._asked = False, False
        tokens = sum(sum(plan.lengths) for plan in plans)
        step = _begin_record(batch, now, wait_s=now - self._free_at, tokens=tokens)
        compute_s = self._run.model.trainer.compute_s(plans)
        if self._turns is not None:
            for member in self._fleet.live:
                self._fleet.pause(member, member.session)
            compute = partial(self._run.later, compute_s, partial(self._end_passes, step))
            self._run.later(self._turns.release_s, compute)
        else:
            self._run.later(compute_s, partial(self._end_passes, step))

    def _end_passes(self, step: StepRecord) -> None:
        optimizer_s = self._run.model.trainer.optimizer_s
        update = partial(self._run.later, optimizer_s, partial(self._end_step, step))
        if self._is_syncing:
            self._after_sync = update
        else:
            update()

    def _end_step(self, step: StepRecord) -> None:
        step.compute_s = self._run.now - step.began_at
        self._step += 1
        if self._step < self._steps:
            self._ask()
        is_overlapped = self._sync_model.is_overlapped
        end = self._end_overlapped_sync if is_overlapped else self._end_sync
        self._begin_sync(self._step, then=partial(end, step))
        if is_overlapped:
            self._end_record(step)
            self._wait()

    def _end_sync(self, step: StepRecord) -> None:
        self._end_record(step)
        step.stall_s = step.sync_s
        self._wait()

    def _end_overlapped_sync(self, step: StepRecord) -> None:
        step.sync_s = self._sync_s
        if self._after_sync is not None:
            update, self._after_sync = self._after_sync, None
            update()

    def _end_record(self, step: StepRecord) -> None:
        step.ended_at, step.sync_s = self._run.now, self._sync_s
        self.records.append(step)

    # --- weights ----------------------------------------------------------------------------------

    def _begin_sync(self, version: int, then: Callable[[], None]) -> None:
        members = self._fleet.live
        if not members:
            # Like the syncer, wait for a generator.
            self._run.later(1.0, partial(self._begin_sync, version, then))
            return
        sync = self._sync_model
        # Before version 0 the engines have released no memory.
        reclaim_s = self._turns.reclaim_s if self._turns is not None and version else 0.0
        self._is_syncing, self._sync_s = True, reclaim_s + sync.total_s
        begins = self._run.now + reclaim_s
        ends = begins + sync.total_s
        for member in members:
            session = member.session
            self._run.at(begins + sync.fixed_s, partial(self._fleet.pause, member, session))
            self._run.at(ends, partial(self._fleet.resume, member, session, version))
        self._run.at(ends, partial(self._synced_to_all, version, then))

    def _synced_to_all(self, version: int, then: Callable[[], None]) -> None:
        self._synced, self._is_syncing = version, False
        self._run.say(BATCHES, "trainer-0", WeightsSynced(version, version == self._steps))
        then()

    def admit(self, generator: Generator) -> None:
        """Sync weights to a restarted generator while the trainer waits for a batch."""
        if not self._is_waiting or self._synced < 0 or self._is_syncing:
            return
        begins = max(self._run.now, self._admits_until)
        self._admits_until = begins + (self._sync_model.late_s or self._sync_model.pause_s)
        resume = partial(self._fleet.resume, generator, generator.session, self._synced)
        self._run.at(self._admits_until, resume)


def _begin_record(batch: RankBatch, now: float, *, wait_s: float, tokens: int) -> StepRecord:
    metrics = batch.metrics
    staleness_sum, count, _ = metrics["queue/staleness_versions_mean"]
    return StepRecord(
        began_at=now,
        wait_s=wait_s,
        tokens=tokens,
        staleness_sum=staleness_sum,
        rollouts=int(count),
        staleness_max=metrics["queue/staleness_versions_max"][0],
        groups=int(metrics["queue/groups_trained"][0]),
        groups_dropped=int(sum(v for n, (v, _, _) in metrics.items() if "groups_dropped" in n)),
    )
