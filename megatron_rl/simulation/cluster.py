"""A run of a whole cluster under virtual time.

Run by `megatron-rl simulate`. The queue is the product's own `Coordinator`, with the virtual time
as its clock; generators (`fleet.py`), verifiers (`verifiers.py`) and trainer (`trainer.py`) are
models that exchange its messages. One thread; everything follows from the configuration, the model
of the cluster and the seed.
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
from megatron_rl.simulation.events import EventClock
from megatron_rl.simulation.fleet import Fleet
from megatron_rl.simulation.machines import ClusterModel
from megatron_rl.simulation.outcome import Outcome, sum_up
from megatron_rl.simulation.queue import PlannedBatches, open_queue, simulated_config
from megatron_rl.simulation.trainer import StepRecord, Trainer
from megatron_rl.simulation.verifiers import Verifiers
from megatron_rl.simulation.workload import Workload

_AFTER_LAST = 2
"""Batches beyond the bound of staleness for which groups are still opened at the end."""
_TICKS_PER_TIMEOUT = 5


@dataclass(frozen=True)
class Span:
    """Which steps are simulated and measured."""

    steps: int = 12
    """That are measured."""
    warm_up: int = 5
    """Before them: the queue fills, the first completions are the short ones."""
    grain_s: float = 0.0
    """The queue answers messages that come within so many seconds at once. Above 0 for large
    clusters: its own time is most of a simulation's."""


class Cluster:
    """One simulated run."""

    def __init__(
        self,
        config: Config,
        model: ClusterModel,
        workload: Workload,
        span: Span | None = None,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: writes rollouts as a real run does; None: nothing is written."""
        self._model, self._span, self._clock = model, span or Span(), EventClock()
        margin = config.queue.max_staleness + _AFTER_LAST
        self._last = self._span.warm_up + self._span.steps
        self._config = simulated_config(config, self._last + margin)
        planned = PlannedBatches()
        self._queue = open_queue(self._config, planned, recorder)
        self._verifiers = Verifiers(
            self._clock,
            self._queue,
            model.verifier,
            workload,
            max_pending=config.verifier.answers.max_pending,
        )
        self._fleet = Fleet(
            self._clock,
            self._queue,
            model.engine,
            workload,
            replicas=config.generator.replicas,
            max_new_tokens=config.sampling.max_new_tokens,
            request_timeout_s=config.generator.request_timeout_s,
            faults=model.faults,
            on_restart=lambda generator: self._trainer.admit(generator),
        )
        self._trainer = Trainer(
            self._clock,
            self._queue,
            self._fleet,
            planned,
            model=model.trainer,
            sync=model.sync,
            turns=model.turns,
            dp_size=config.parallel.data,
            steps=self._config.train.steps,
        )

    @property
    def records(self) -> list[StepRecord]:
        """The steps so far, warm-up included."""
        return self._trainer.records

    def run(self) -> Outcome:
        """Simulate. Raises DeadlineExceeded and others, as the queue of a real run would."""
        # What the queue has to say of each lost lease is of no interest here.
        logger = logging.getLogger("megatron_rl.rollout_queue")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            return self._run()
        finally:
            logger.setLevel(level)

    def _run(self) -> Outcome:
        clock, records = self._clock, self._trainer.records
        self._verifiers.announce()
        self._trainer.start()
        self._tick()
        began_at = 0.0
        is_measured = False
        answer_at = 0.0
        grain_s = self._span.grain_s
        while len(records) < self._last:
            clock.step()
            if not is_measured and len(records) >= self._span.warm_up:
                is_measured, began_at = True, clock.now
                self._fleet.reset()
                self._verifiers.reset()
            next_at = clock.next_at
            if next_at is None or next_at > answer_at:
                self._answer()
                answer_at = clock.now + grain_s
        verifier = self._model.verifier
        return sum_up(
            records[self._span.warm_up : self._last],
            began_at,
            self._fleet.totals(),
            engines=self._config.generator.replicas,
            slots=self._model.engine.max_running,
            servers=verifier.servers,
            verifier_busy_s=self._verifiers.busy_s,
            verifier_waited_s=self._verifiers.waited_s,
            graded=self._verifiers.graded,
            events=clock.count,
        )

    def _answer(self) -> None:
        """All that the queue has to say now."""
        for outgoing in self._queue.outgoing(self._clock.now):
            self._deliver(outgoing)

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
                self._clock.at(self._clock.now, partial(self._trainer.take_batch, batch))

    def _tick(self) -> None:
        self._fleet.beat()
        self._verifiers.announce()
        self._queue.tick(self._clock.now)
        every_s = self._config.queue.heartbeat_timeout_s / _TICKS_PER_TIMEOUT
        self._clock.at(self._clock.now + every_s, self._tick)
