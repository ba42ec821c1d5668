"""Decides what the rollout queue does with each message and what it sends. No sockets, no clock.

The rollout queue's server calls `handle` for every message, sends all messages from `outgoing`, and
calls `tick` about once a second. Times are monotonic seconds.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import (
    AnyMessage,
    ClassDone,
    GeneratorReady,
    NextBatch,
    Prompt,
    RolloutDone,
    RolloutFailed,
    SaveState,
    ScoreDone,
    ScoredRollout,
    ScoreFailed,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.activity import Activity
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.batches import BatchOrder
from megatron_rl.rollout_queue.circuit_breakers import CircuitBreaker
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.faults import limits_of
from megatron_rl.rollout_queue.group_end import DropObservers, GroupEnd
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.peer_rows import GeneratorRows
from megatron_rl.rollout_queue.presence import Presence
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.scoring import Scoring
from megatron_rl.rollout_queue.stall import StallDeadline
from megatron_rl.rollout_queue.trainer_requests import BatchBuilder, BatchRequests, StateRequests
from megatron_rl.rollout_queue.training_groups import GroupOpener, TrainingGroups
from megatron_rl.rollout_queue.waits import Waits

log = logging.getLogger(__name__)

PROMPTS, VERIFY, BATCHES = "prompts", "verify", "batches"
"""The queue's endpoints for generators, verifiers and trainer leaders."""


class Outgoing(NamedTuple):
    """A message for a peer of an endpoint."""

    endpoint: str
    peer: str
    message: AnyMessage


class Coordinator:
    """The state of the run as the queue sees it."""

    def __init__(
        self,
        config: Config,
        prompts: PromptSets,
        *,
        recorder: Recorder,
        metrics: JsonlWriter,
        evaluate_only: str = "",
        maker: BatchMaker | None = None,
        now: float,
    ) -> None:
        """evaluate_only: label of the only evaluation to run, or empty.

        maker: deals batches; by default in the caller's thread.
        """
        self._config = config
        self._recorder = recorder
        self._metrics = metrics
        self._evaluate_only = evaluate_only
        self._evaluations = EvaluationScheduler(
            config, prompts, recorder=recorder, metrics=metrics, only=evaluate_only
        )
        self._training = TrainingGroups(prompts, config)
        self._groups = self._training.book
        steps = 0 if evaluate_only else config.train.steps
        self._collect_groups(prompts, prompts.train if steps else prompts.evaluated)
        self._builder = None
        if steps:
            self._builder = BatchBuilder(config, self._training, self._ends, prompts.held_out)
        self.requests = BatchRequests(steps)
        self._maker = maker or BatchMaker()
        self._states = StateRequests(recorder)
        self.deadline = StallDeadline(config, now)
        self._judged_at = now
        self._presence = Presence(self._leases, self._scoring, config, now)
        self._generator_rows = GeneratorRows()
        self._waits = Waits(self._leases, self._scoring, self.requests)
        self._first_version = 0
        self._synced = -1
        self._finished_at = now if evaluate_only else None
        self.is_over = False
        """Training and all evaluations are done."""

    def _collect_groups(self, prompts: PromptSets, opened: Sequence[Sequence[Prompt]]) -> None:
        """Create the objects that open groups, lease and grade completions, and end groups.

        opened: the prompts whose groups the run opens.
        """
        config = self._config
        self._activity = Activity(config, prompts)
        self._leases = Leases(config.queue, limits_of(config), config.reward.environments)
        self._opener = GroupOpener(
            config.queue, self._leases, evaluations=self._evaluations, training=self._training
        )
        self._scoring = Scoring(config.queue, config.reward)
        self._breaker = CircuitBreaker(config.queue, config.reward, prompts=sum(map(len, opened)))
        self._ends = GroupEnd(
            self._training,
            self._leases,
            self._scoring,
            evaluations=self._evaluations,
            observers=DropObservers(self._recorder, self._activity, self._breaker),
        )

    def resume(self, state: QueueState) -> None:
        """Resume after a saved step; call before the first message. Raises InputError."""
        assert self._builder is not None
        self._training.restore(state)
        self.requests.resume_at(state.step)
        self._recorder.resume_at(state.step)
        self._builder.resume_at(state.step)
        self._opener.count = state.groups_opened
        self._evaluations.resume(state)
        self._first_version = state.step
        self._leases.limits.note_version(state.step)

    def handle(self, endpoint: str, peer: str, message: AnyMessage, now: float) -> None:
        """Handle one message. Raises WireError if it contradicts the state."""
        # A trainer rank that sends anything has ended the cold start.
        if endpoint == BATCHES:
            self.deadline.expect_trainer(now)
        match message:
            case GeneratorReady(is_leaving=True) | VerifierReady(is_leaving=True):
                self._presence.let_leave(peer, message, now)
            case GeneratorReady():
                self._leases.announce(peer, message, now)
                self._evaluations.evaluators.correct(peer, is_held=message.is_held)
                if message.activity is not None:
                    self._generator_rows.note(peer, message.session, message.activity, now)
            case RolloutDone():
                self._on_rollout(peer, message, now)
            case RolloutFailed():
                if self._leases.take_failure(peer, message, now):
                    self._activity.add_failed_attempt(message.fault)
            case VerifierReady():
                self._scoring.announce(peer, message, now)
            case ScoreDone():
                if (found := self._scoring.take_score(peer, message, now)) is not None:
                    self.deadline.note_progress(now)
                    self._add_scored(*found, now)
            case ClassDone():
                if (group := self._scoring.take_classes(peer, message, now)) is not None:
                    self.deadline.note_progress(now)
                    self._ends.close(group)
            case ScoreFailed():
                # The number of attempts is bounded, so a failure is progress.
                if self._scoring.take_failure(peer, message, now):
                    self.deadline.note_progress(now)
            case NextBatch():
                self._on_synced(WeightsSynced(message.held_version, message.is_final), now)
                self.requests.ask(peer, message)
            case WeightsSynced():
                self._on_synced(message, now)
            case SaveState():
                self._on_save(peer, message, now)
            case _:
                raise AssertionError(f"no endpoint of the queue receives {type(message).__name__}")

    def _on_rollout(self, peer: str, done: RolloutDone, now: float) -> None:
        if (group := self._leases.take_rollout(peer, done.rollout, now)) is None:
            return
        self.deadline.note_progress(now)
        self._activity.add_rollout(done.rollout)
        if (score := done.rollout.score) is None:
            self._scoring.submit(group, done.rollout)
        else:
            self._add_scored(group, ScoredRollout(done.rollout, score), now)

    def _add_scored(self, group: Group, scored: ScoredRollout, now: float) -> None:
        self._breaker.note_scored(group)
        # The group may have been dropped after this score was asked for.
        if group.is_abandoned:
            return
        group.add(scored, now)
        self._activity.add_score(group, scored)
        if group.is_scored:
            self._ends.close(group)

    def _on_synced(self, synced: WeightsSynced, now: float) -> None:
        self.deadline.note_version(synced.version, now)
        # Each request repeats the version, and messages of two sockets may overtake each other.
        if synced.version <= self._synced:
            return
        if self._synced < 0 and synced.version != self._first_version:
            raise WireError(
                f"the trainer begins with version {synced.version}, the queue with "
                f"{self._first_version}: start both with the same checkpoint.resume"
            )
        self._leases.limits.check_version(synced.version)
        self._presence.note_sync(now)
        self._synced = synced.version
        # Not when the batch was built: until the sync its groups count against admission, because
        # groups opened meanwhile will be one version older.
        self._groups.finish_training(synced.version)
        if synced.is_final:
            self._finished_at = now
            if left := self._ends.abandon():
                self._metrics.write(self._synced, {"queue/groups_abandoned": left})
        self._evaluations.ask(synced.version, is_final=synced.is_final)

    def _on_save(self, peer: str, asked: SaveState, now: float) -> None:
        built = self.requests.built_steps
        if self._states.is_repeated(peer, asked.step, built_steps=built):
            return
        self.deadline.note_progress(now)
        # A run that resumes from this state would lose the groups of a later batch.
        if self._builder is None or built != asked.step:
            raise WireError(f"{peer} saves step {asked.step}, but {built} batches are built")
        state = self._training.state(asked.step, groups_opened=self._opener.count)
        self._states.put(peer, self._evaluations.add_to(state))

    def outgoing(self, now: float) -> Iterator[Outgoing]:
        """All messages that can be sent now; the caller reports unreachable peers by `lose`."""
        # First actions that free room, then actions that take room.
        self._ends.drop_failed()
        while (request := self._scoring.next_request(now)) is not None:
            yield Outgoing(VERIFY, *request)
        # Before batches: an evaluation that ends here no longer delays the next batch.
        self._ends.advance_evaluations(self._synced, now)
        yield from self._batch_answers(now)
        for answer in self._states.answers():
            yield Outgoing(BATCHES, *answer)
        yield from map(Outgoing._make, self._presence.pop_stops())
        # Before leases: new leases take the slots of cancelled ones.
        for order in self._leases.pop_cancels() + self._evaluations.evaluators.pop_orders():
            yield Outgoing(PROMPTS, *order)
        while (lease := self._next_lease(now)) is not None:
            yield lease
        self._check_over(now)

    def lose(self, endpoint: str, peer: str) -> None:
        """A peer cannot be reached, or sends nonsense: give its work to others."""
        if (endpoint, peer) in self.peers:
            log.warning("%s is lost", peer)
        if endpoint == PROMPTS:
            self._leases.drop_generator(peer)
        elif endpoint == VERIFY:
            self._scoring.drop_verifier(peer)

    def farewell(self, now: float) -> Iterator[Outgoing]:
        """A Stop for every generator and verifier; call once, at the end."""
        self._write_rows(now, in_flight=0, is_last=True)
        yield from map(Outgoing._make, self._presence.dismiss_all())

    def _batch_answers(self, now: float) -> Iterator[Outgoing]:
        if (order := self._build_batch()) is not None:
            self._evaluations.note_batch()
            self.requests.begin(order.step)
            self._leases.limits.note_version(order.step + 1)
            self._maker.put(order)
        self._maker.look()
        for peer, answer in self.requests.answers(self._maker.batch):
            self.deadline.note_progress(now)
            yield Outgoing(BATCHES, peer, answer)
        if order is not None:
            self._recorder.write_step(order.step, order.groups, now)

    def _build_batch(self) -> BatchOrder | None:
        """The batch that a rank waits for, if it can be built."""
        asked = self.requests.next_to_build()
        if (
            asked is None
            or self.is_dealing
            or self._recorder.writer.is_full
            or not self._evaluations.allows_batch(asked[0], self._synced)
        ):
            return None
        assert self._builder is not None
        order = self._builder.build(*asked)
        if order is not None:
            log.info(
                "batch of step %d: %d groups, dropped before it %s, %d open, %d late rollouts",
                order.step, len(order.groups), dict(order.dropped.reasons),
                self._groups.untaken, self._leases.late_rollouts,
            )  # fmt: skip
        return order

    @property
    def peers(self) -> set[tuple[str, str]]:
        """(endpoint, name) of all live generators and verifiers."""
        generators, verifiers = self._leases.generators, self._scoring.verifiers
        return {(PROMPTS, name) for name in generators} | {(VERIFY, name) for name in verifiers}

    @property
    def is_dealing(self) -> bool:
        return self._maker.is_busy

    def stop_training(self) -> None:
        """Build no further batch and lease no further completion; nothing after the last batch."""
        if self._builder is not None and self._finished_at is None:
            self.requests.stop()

    def _next_lease(self, now: float) -> Outgoing | None:
        if self.requests.is_stopped or self._recorder.writer.is_full:
            return None
        is_training = self._synced >= 0 and self._finished_at is None
        next_step = max(self.requests.built_steps, self._synced) if is_training else None
        rules = self._opener.rules(self._synced, next_step)
        issued = self._leases.issue(rules, lambda: self._opener.open(rules, next_step), now)
        return Outgoing(PROMPTS, *issued) if issued else None

    def write_counts(self, values: dict[str, float]) -> None:
        self._metrics.write(0, values)

    def relaunch(self, now: float) -> None:
        """Another launcher started all processes; what has arrived stays, the rest is repeated."""
        self._presence.forget_all()
        self.requests.forget_ranks()
        # The request to stop was for the launcher before, which may have been killed while it did.
        self.requests.forget_stop()
        self._evaluations.pause(now)
        self.deadline.await_trainer()

    def expect_trainer(self, now: float) -> None:
        self.deadline.expect_trainer(now)

    # --- deadlines and end ----------------------------------------------------------------------

    def tick(self, now: float, *, has_heard_all: bool = True) -> None:
        """Repeat overdue leases and requests. Raises DeadlineExceeded when the run stalls.

        has_heard_all: no message waits unread; else peers may be silent for the heartbeat timeout.
        """
        self._recorder.writer.check()
        if self._recorder.writer.is_full:
            self.deadline.note_progress(now)  # a slow disk has its own limit
        if has_heard_all or now - self._judged_at > self._config.queue.heartbeat_timeout_s:
            self._judged_at = now
            self._leases.expire(now)
            self._scoring.expire(now)
        trouble = self._leases.environments.find_trouble() or self._breaker.find_trouble()
        self._activity.trouble = trouble
        self._write_rows(now, in_flight=self._leases.outstanding)
        if row := self._presence.take_row():
            self._metrics.write(self._synced, row)
        state = self.describe(now)
        self._ends.end_overdue_evaluation(now, state)
        is_work_out = bool(
            self._leases.leased
            or self._scoring.outstanding
            or self._evaluations.running
            or self.requests.waiting_ranks
        )
        self.deadline.check(now, is_work_out=is_work_out, state=state)

    def _write_rows(self, now: float, *, in_flight: int, is_last: bool = False) -> None:
        records = self._recorder.dropped_file
        if row := self._activity.take_row(now, in_flight, records=records, is_last=is_last):
            self._metrics.write(self._synced, row | self._evaluations.progress())
        self._waits.look(now)
        if row := self._generator_rows.take_row(self._leases.generators, now, is_last=is_last):
            self._metrics.write(self._synced, row | self._waits.row(now))

    def _check_over(self, now: float) -> None:
        if self._finished_at is None or not self._evaluations.is_idle:
            return
        is_late = now - self._finished_at > self.deadline.dismissal_s
        self.is_over = self.requests.is_dismissed or is_late or bool(self._evaluate_only)

    def describe(self, now: float) -> str:
        wanted = self._training.schedule.at(self.requests.built_steps).sampled_groups
        parts = [
            f"version {self._synced} synced",
            f"{self._groups.untaken - self._groups.complete} groups open, {self._groups.complete} "
            f"complete of {wanted} for a batch",
            self._waits.describe(now),
            "a batch is being dealt to ranks" if self.is_dealing else "",
            evaluation.describe(now) if (evaluation := self._evaluations.running) else "",
        ]
        return "; ".join(part for part in parts if part)
