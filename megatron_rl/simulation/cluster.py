"""A simulated run of a whole cluster.

Run by `megatron-rl simulate`, in one thread. The queue is the real `Coordinator` with virtual time.
Generators (`fleet.py`), verifiers (`verifiers.py`) and trainer (`trainer.py`) are models that
exchange its messages. Configuration, cluster model and seed determine everything.
"""

import logging
from dataclasses import dataclass
from functools import partial

from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import (
    Cancel,
    ClassRequest,
    Lease,
    RankBatch,
    ScoreRequest,
)  # fmt: skip
from megatron_rl.rollout_queue.coordinator import Outgoing
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.simulation.fleet import Fleet
from megatron_rl.simulation.machines import ClusterModel
from megatron_rl.simulation.outcome import Outcome, sum_up
from megatron_rl.simulation.queue import VirtualRun
from megatron_rl.simulation.trainer import StepRecord, Trainer
from megatron_rl.simulation.verifiers import Verifiers
from megatron_rl.simulation.workload import Workload

_AFTER_LAST = 2
"""Batches beyond max_staleness for which the queue still opens groups at the end."""
_TICKS_PER_TIMEOUT = 5


@dataclass(frozen=True)
class Span:
    """Simulated and measured steps."""

    steps: int = 12
    """Measured steps."""
    warm_up: int = 5
    """Earlier steps, in which the queue fills and short completions come first."""
    grain_s: float = 0.0
    """Seconds of messages that the queue answers together. Above 0 it speeds up large clusters,
    where the queue takes most of a simulation's time."""


class Cluster:
    def __init__(
        self,
        config: Config,
        model: ClusterModel,
        workload: Workload,
        span: Span | None = None,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: writes rollouts like a real run; None: no files."""
        self._span = span or Span()
        self._last = self._span.warm_up + self._span.steps
        steps = self._last + config.queue.max_staleness + _AFTER_LAST
        self._run = VirtualRun(config, model, workload, steps=steps, recorder=recorder)
        self._verifiers = Verifiers(self._run)
        self._fleet = Fleet(self._run, on_restart=lambda generator: self._trainer.admit(generator))
        self._trainer = Trainer(self._run, self._fleet)

    @property
    def records(self) -> list[StepRecord]:
        """The steps so far, including warm-up."""
        return self._trainer.records

    def run(self) -> Outcome:
        """Simulate. Raises the queue's exceptions, such as DeadlineExceeded."""
        # The queue's warnings about lost leases are expected here.
        logger = logging.getLogger("megatron_rl.rollout_queue")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            return self._simulate()
        finally:
            logger.setLevel(level)

    def _simulate(self) -> Outcome:
        run, span, records = self._run, self._span, self._trainer.records
        self._verifiers.announce()
        self._trainer.start()
        self._tick()
        began_at = answer_at = 0.0
        is_measured = False
        while len(records) < self._last:
            run.step()
            if not is_measured and len(records) >= span.warm_up:
                is_measured, began_at = True, run.now
                self._fleet.reset()
                self._verifiers.reset()
            if run.next_at is None or run.next_at > answer_at:
                for outgoing in run.queue.outgoing(run.now):
                    self._deliver(outgoing)
                answer_at = run.now + span.grain_s
        measured = records[span.warm_up : self._last]
        return sum_up(run, measured, began_at, self._fleet.totals(), self._verifiers)

    def _deliver(self, outgoing: Outgoing) -> None:
        match outgoing.message:
            case Lease() as lease:
                self._fleet.take_lease(outgoing.peer, lease)
            case Cancel() as cancel:
                self._fleet.take_cancel(outgoing.peer, cancel)
            case ScoreRequest() as request:
                self._verifiers.take(request)
            case ClassRequest() as request:
                self._verifiers.take_classes(request)
            case RankBatch() as batch:
                self._run.later(0.0, partial(self._trainer.take_batch, batch))

    def _tick(self) -> None:
        self._fleet.beat()
        self._verifiers.announce()
        self._run.queue.tick(self._run.now)
        every_s = self._run.config.queue.heartbeat_timeout_s / _TICKS_PER_TIMEOUT
        self._run.later(every_s, self._tick)
