"""What the rollout queue does with each message, and what it sends when. No sockets, no clock.

Used by the rollout queue's server, which calls `handle` for every message, then sends all that
`outgoing` yields, and `tick` about once a second. Times are monotonic seconds.
"""

import collections
import logging
from collections.abc import Iterator
from typing import NamedTuple

from megatron_rl.protocol.config import Config
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.process import InputError
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import (
    AnyMessage,
    GeneratorReady,
    NextBatch,
    Published,
    RolloutDone,
    RolloutFailed,
    SaveState,
    ScoreDone,
    ScoreFailed,
    Stop,
    VerifierReady,
)  # fmt: skip
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from megatron_rl.rollout_queue import admission
from megatron_rl.rollout_queue.activity import ActivityLog
from megatron_rl.rollout_queue.batch_desk import BatchDesk
from megatron_rl.rollout_queue.batches import find_advantage, form_batch
from megatron_rl.rollout_queue.evaluation import Evaluation, label_at, select_held_out, summarize
from megatron_rl.rollout_queue.groups import FLAT, Group, GroupBook
from megatron_rl.rollout_queue.leases import Leases, Work
from megatron_rl.rollout_queue.prompts import PromptSets
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.scoring import Scoring
from megatron_rl.rollout_queue.training_groups import TrainingGroups

log = logging.getLogger(__name__)

PROMPTS, VERIFY, BATCHES = "prompts", "verify", "batches"
_DISMISS_S = 5.0
"""After the last publish trainer ranks have this long to ask once more and be told to stop."""


class Outgoing(NamedTuple):
    """A message for a peer of one of the three endpoints."""

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
        now: float,
    ) -> None:
        """evaluate_only: label of the one evaluation to run; empty for training."""
        self._config = config
        self._recorder = recorder
        self._metrics = metrics
        self._evaluate_only = evaluate_only
        if evaluate_only and not config.eval.prompts:
            raise InputError("an evaluation is asked for, but eval.prompts = 0: raise it")
        self._held_out = select_held_out(prompts.held_out, config.eval)
        self._training = None
        if config.train.steps and not evaluate_only:
            self._training = TrainingGroups(prompts, config)
        self._advantage = find_advantage(config.train)
        self._groups = GroupBook()
        self._activity = ActivityLog(config, prompts, metrics, recorder)
        self._leases = Leases(config.queue)
        self._scoring = Scoring(config.queue, config.reward)
        self._desk = BatchDesk(config.train.steps)
        self._evaluation: Evaluation | None = None
        self._labels = collections.deque([evaluate_only] if evaluate_only else [])
        self._evaluated: list[str] = []
        self._states: list[tuple[str, QueueState]] = []
        self._first_version = 0
        self._published = -1
        self._finished_at = now if evaluate_only else None
        self._progress_at = now
        self._group_count = 0
        self.is_over = False
        """Training and all evaluations are done."""

    def resume(self, state: QueueState) -> None:
        """Go on after a saved step; call before any message. Raises InputError."""
        assert self._training is not None
        self._training.restore(state)
        self._desk.resume_at(state.step)
        self._recorder.resume_at(state.step)
        self._group_count = state.groups_opened
        self._evaluated = list(state.evaluated)
        self._first_version = state.step

    # --- incoming -------------------------------------------------------------------------------

    def handle(self, endpoint: str, peer: str, message: AnyMessage, now: float) -> None:
        """Take in one message. Raises WireError for a message that has no place here."""
        match endpoint, message:
            case "prompts", RolloutDone():
                self._on_rollout(peer, message, now)
            case "verify", ScoreDone():
                self._on_score(peer, message, now)
            case "prompts", GeneratorReady():
                self._leases.announce(peer, message, now)
            case "verify", VerifierReady():
                self._scoring.announce(peer, message, now)
            case "prompts", RolloutFailed():
                self._leases.take_failure(peer, message, now)
            case "verify", ScoreFailed():
                self._scoring.take_failure(peer, message, now)
            case "batches", NextBatch():
                self._desk.ask(peer, message)
            case "batches", Published():
                self._on_published(message, now)
            case "batches", SaveState():
                self._on_save(peer, message, now)
            case _:
                raise WireError(f"{peer} sent {type(message).__name__} to the {endpoint} endpoint")

    def _on_rollout(self, peer: str, done: RolloutDone, now: float) -> None:
        group = self._leases.take_rollout(peer, done.rollout, now)
        if group is None:
            return
        self._progress_at = now
        self._activity.add_rollout(done.rollout)
        if not group.is_abandoned:
            self._scoring.submit(group, done.rollout)

    def _on_score(self, peer: str, done: ScoreDone, now: float) -> None:
        found = self._scoring.take_score(peer, done, now)
        if found is None:
            return
        self._progress_at = now
        group, scored = found
        group.add(scored)
        self._activity.add_score(group, scored)
        if group.is_complete and not group.is_abandoned:
            if group.evaluation:
                assert self._evaluation is not None
                self._evaluation.close(group)
            elif group.is_flat:
                self._drop(group, FLAT)

    def _drop(self, group: Group, reason: str) -> None:
        """Release a training group that is not trained on; the reason appears in all metrics."""
        self._groups.drop(group, reason)
        self._recorder.write_dropped(group, reason)
        self._activity.add_dropped(reason)

    def _on_published(self, published: Published, now: float) -> None:
        self._progress_at = now
        if self._published < 0 and published.version != self._first_version:
            raise WireError(
                f"the trainer begins with version {published.version}, the queue with "
                f"{self._first_version}: start both with the same checkpoint.resume"
            )
        self._published = published.version
        self._groups.finish_training(published.version)
        if published.is_final:
            self._finished_at = now
            self._abandon_groups()
        self._labels.extend(self._labels_at(published.version, is_final=published.is_final))

    def _labels_at(self, version: int, *, is_final: bool) -> list[str]:
        evaluation = self._config.eval
        if not evaluation.prompts or self._evaluate_only:
            return []
        labels = label_at(version, is_final=is_final, every_steps=evaluation.every_steps)
        return [label for label in labels if label not in self._evaluated]

    def _on_save(self, peer: str, asked: SaveState, now: float) -> None:
        self._progress_at = now
        if self._training is None or self._desk.formed_steps != asked.step:
            raise WireError(
                f"{peer} saves step {asked.step}, but {self._desk.formed_steps} batches are formed"
            )
        counts = {"groups_opened": self._group_count, "evaluated": list(self._evaluated)}
        self._states.append((peer, self._training.state(asked.step, self._groups, **counts)))

    def _abandon_groups(self) -> None:
        groups = self._groups.abandon()
        if groups:
            completions = sum(group.size for group in groups)
            log.warning("%d groups (%d completions) were not needed", len(groups), completions)
            self._metrics.write(self._published, {"queue/groups_abandoned": len(groups)})

    # --- outgoing -------------------------------------------------------------------------------

    def outgoing(self, now: float) -> Iterator[Outgoing]:
        """Everything that can be sent now; the caller reports peers that are gone by `lose`."""
        while (request := self._scoring.next_request(now)) is not None:
            yield Outgoing(VERIFY, *request)
        self._advance_evaluation(now)
        yield from self._batch_answers(now)
        while self._states:
            yield Outgoing(BATCHES, *self._states.pop())
        while (lease := self._next_lease(now)) is not None:
            yield lease
        self._check_over(now)

    def lose(self, endpoint: str, peer: str) -> None:
        """A peer cannot be reached: give its work to others."""
        log.warning("%s cannot be reached", peer)
        if endpoint == PROMPTS:
            self._leases.drop_generator(peer)
        elif endpoint == VERIFY:
            self._scoring.drop_verifier(peer)

    def farewell(self, now: float) -> Iterator[Outgoing]:
        """Stop for every generator and verifier; call once, at the end."""
        self._activity.write_rest(self._published, now)
        for generator in self._leases.generators:
            yield Outgoing(PROMPTS, generator, Stop("the run is over"))
        for verifier in self._scoring.verifiers:
            yield Outgoing(VERIFY, verifier, Stop("the run is over"))

    def _advance_evaluation(self, now: float) -> None:
        evaluation = self._evaluation
        if evaluation is not None and evaluation.is_complete:
            self._finish_evaluation(evaluation, now)
            self._evaluation = None
        if self._evaluation is None and self._labels:
            if self._evaluate_only and not self._leases.has_room(self._config.eval.samples, 0):
                return
            label = self._labels.popleft()
            log.info("evaluation %r of version %d starts", label, self._published)
            self._evaluation = Evaluation(
                label,
                self._held_out,
                config=self._config.eval,
                sampling=self._config.sampling,
                version=max(self._published, 0),
                now=now,
            )

    def _finish_evaluation(self, evaluation: Evaluation, now: float) -> None:
        results = summarize(evaluation.complete, now - evaluation.started_at)
        self._recorder.write_evaluation(evaluation.label, evaluation.complete)
        self._metrics.write(evaluation.version, {"label": evaluation.label, **results})
        self._evaluated.append(evaluation.label)
        log.info(
            "evaluation %r: accuracy %.3f, standard error %.3f, %d prompts, %.1f s",
            evaluation.label,
            results["eval/accuracy"],
            results["eval/accuracy_se"],
            results["eval/n"],
            results["eval/seconds"],
        )

    def _batch_answers(self, now: float) -> Iterator[Outgoing]:
        formed = self._form_batch(now)
        for peer, answer in self._desk.answers():
            self._progress_at = now
            yield Outgoing(BATCHES, peer, answer)
        if formed is not None:
            self._recorder.write_step(*formed)

    def _form_batch(self, now: float) -> tuple[int, list[Group]] | None:
        """Form the batch that is asked for, if it is due: (step, groups)."""
        asked = self._desk.next_to_form()
        if asked is None or not self._may_train_on(asked[0]):
            return None
        step, dp_size = asked
        train, queue = self._config.train, self._config.queue
        numbers = admission.choose_batch(
            self._groups.candidates(),
            step=step,
            groups_per_batch=train.groups_per_batch,
            max_staleness=queue.max_staleness,
            is_strict=queue.strict_staleness,
        )
        if numbers is None:
            return None
        groups, dropped = self._groups.take(numbers, step)
        batch = form_batch(
            step, groups, dropped=dropped, config=train, advantage=self._advantage, dp_size=dp_size
        )
        self._desk.put(batch)
        late, untaken = self._leases.late_rollouts, self._groups.untaken
        text = "batch of step %d: %d groups, dropped before it %s, %d open, %d late rollouts so far"
        log.info(text, step, len(groups), dict(dropped.reasons), untaken, late)
        return step, groups

    def _may_train_on(self, version: int) -> bool:
        """Whether its batch may be formed: also while the version is being published.

        Not while an evaluation runs, or before one: an update would change what it measures.
        """
        if self._evaluation is not None or version > self._published + 1:
            return False
        return version <= self._published or not self._labels_at(version, is_final=False)

    def _next_lease(self, now: float) -> Outgoing | None:
        min_version = self._min_version()
        if self._leases.has_repeats:
            issued = self._leases.issue(None, min_version, now)
        else:
            work = self._open_work(min_version)
            issued = self._leases.issue(work, min_version, now) if work else None
        return Outgoing(PROMPTS, *issued) if issued else None

    def _min_version(self) -> int:
        queue = self._config.queue
        return admission.oldest_leasable_version(
            self._published,
            max_staleness=queue.max_staleness,
            # An evaluation measures the published version and no older one.
            is_strict=queue.strict_staleness or self._evaluation is not None,
        )

    def _open_work(self, min_version: int) -> Work | None:
        """A newly opened group with all its indices, if one is wanted and a generator has room."""
        if self._evaluation is not None:
            if not self._evaluation.has_unopened:
                return None
            if not self._leases.has_room(self._evaluation.group_size, min_version):
                return None
            group = self._evaluation.open_group(self._group_count)
        else:
            if not self._is_training_group_due():
                return None
            if not self._leases.has_room(self._config.train.group_size, min_version):
                return None
            group = self._training.open(self._group_count, self._published)
            self._groups.open(group)
        # A group that is generated again keeps its number, which is below the count.
        self._group_count = max(self._group_count, group.number + 1)
        return group, list(range(group.size))

    def _is_training_group_due(self) -> bool:
        if self._training is None or self._published < 0 or self._finished_at is not None:
            return False
        next_step = max(self._desk.formed_steps, self._published)
        return self._training.is_due(self._groups, next_step)

    # --- deadlines and end ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Re-issue what is overdue; DeadlineExceeded when nothing moves any more."""
        self._leases.expire(now)
        self._scoring.expire(now)
        self._activity.write(self._published, now, in_flight=self._leases.outstanding)
        evaluation, limit_s = self._evaluation, self._config.eval.timeout_s
        if evaluation is not None and now - evaluation.started_at > limit_s:
            raise DeadlineExceeded(f"eval.timeout_s = {limit_s:.0f} is over: {self.describe(now)}")
        silent_s, patience_s = now - self._progress_at, self._patience_s()
        if silent_s > patience_s:
            raise DeadlineExceeded(f"nothing moved for {silent_s:.0f} s: {self.describe(now)}")

    def _patience_s(self) -> float:
        """How long nothing may move: above train.batch_timeout_s while others start or train."""
        config = self._config
        is_asked = self._leases.outstanding or self._scoring.outstanding or self._evaluation
        if is_asked or self._desk.waiting_ranks:
            return config.train.batch_timeout_s
        return (
            config.train.batch_timeout_s
            + config.generator.start_timeout_s
            + config.weights.join_timeout_s
        )

    def _check_over(self, now: float) -> None:
        if self._finished_at is None or self._labels or self._evaluation is not None:
            return
        # A last checkpoint is copied between the last publish and the last request.
        patience_s = _DISMISS_S
        if self._config.checkpoint.every_steps:
            patience_s += self._config.checkpoint.write_timeout_s
        is_dismissed = self._desk.is_dismissed or now - self._finished_at > patience_s
        self.is_over = is_dismissed or bool(self._evaluate_only)

    def describe(self, now: float) -> str:
        """One line on what is open where."""
        parts = [
            f"version {self._published} published",
            f"{self._groups.untaken - self._groups.complete} groups open, {self._groups.complete} "
            f"complete of {self._config.train.groups_per_batch} for a batch",
            self._leases.describe(now),
            self._scoring.describe(now),
            f"batch asked for by data-parallel ranks {self._desk.waiting_ranks}",
        ]
        if self._evaluation is not None:
            parts.append(self._evaluation.describe(now))
        return "; ".join(parts)
