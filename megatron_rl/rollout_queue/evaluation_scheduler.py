"""Which evaluations are due, which one runs, and its results.

Used by the rollout queue. One evaluation runs at a time and measures exactly one policy version.
Evaluators (`running_evaluation.py`), if there are any, hold that version, and the other generators
train. Without evaluators `allows_batch` delays the batch that would make a later version; training
groups are leased meanwhile, to slots that the evaluation does not need.
"""

import collections
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DONE,
    COMPLETIONS_WANTED,
    EVALUATION_RUNNING,
    JsonlWriter,
)
from megatron_rl.protocol.queue_state import QueueState, UnfinishedEvaluation
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.drop_reasons import (
    TooManyFailures,
)
from megatron_rl.rollout_queue.evaluation import (
    EvaluationSet,
    evaluation_sets,
    first_free_number,
    keep_evaluated,
    label_at,
    read_ended,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.peers import Peer
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.running_evaluation import Evaluation, Evaluators, summarize

log = logging.getLogger(__name__)


class _Due(NamedTuple):
    """An evaluation to come."""

    label: str
    """Its whole name."""
    what: EvaluationSet
    version: int
    is_final: bool


class EvaluationScheduler:
    """The evaluations of a run: due, running, done."""

    def __init__(
        self,
        config: Config,
        prompts: PromptSets,
        *,
        recorder: Recorder,
        metrics: JsonlWriter,
        only: str,
    ) -> None:
        """only: label of the one evaluation to run; empty for training. Raises InputError."""
        if only and not config.eval.is_wanted:
            raise InputError(
                "there is nothing to evaluate on: eval.prompts = 0 and eval.sets is empty; raise "
                "eval.prompts or add an [[eval.sets]] table"
            )
        self._config = config.eval
        self._sets = evaluation_sets(config, prompts)
        self._recorder = recorder
        self._metrics = metrics
        self._only = only
        self.first_number = first_free_number(recorder.run_dir) if recorder.keeps_evaluated else 0
        """Number of the first group that an evaluation opens."""
        self._due: collections.deque[_Due] = collections.deque()
        if only:
            self._due.extend(_Due(one.label(only), one, 0, False) for one in self._sets)
        self.running: Evaluation | None = None
        """Has begun and not ended."""
        self.evaluators = Evaluators(0 if only else config.evaluators)
        self._completions_before = 0
        """Completions of the sets of the same version that have ended."""
        self._has_later_version = False
        """A later version than the measured one is synced, or will be."""
        self.done: list[str] = []
        """Names of the evaluations that have ended."""
        self._ended_earlier: set[tuple[str, int]] = set()
        """(label, version) of those that ended before the run was resumed."""

    def add_to(self, state: QueueState) -> QueueState:
        """The state of the queue with the evaluations that are done, run or are due."""
        left = [UnfinishedEvaluation(due.label, due.version, has_begun=False) for due in self._due]
        if self.running is not None:
            label, version = self.running.label, self.running.version
            left = [UnfinishedEvaluation(label, version, has_begun=True), *left]
        return msgspec.structs.replace(
            state, evaluated=list(self.done), unfinished_evaluations=left
        )

    def resume(self, state: QueueState) -> None:
        """Resume after a saved step; call before any message. Raises InputError.

        The trainer syncs the version of the state once more, which asks for its evaluations. An
        evaluation that ended after the state was saved is not repeated. No generator will hold an
        earlier version: its evaluation ends with the problems in its file.
        """
        self.done = list(state.evaluated)
        self._ended_earlier = read_ended(self._recorder.run_dir, state.step)
        for one in state.unfinished_evaluations:
            if one.version == state.step:
                continue
            if (one.label, one.version) in self._ended_earlier:
                self.done.append(one.label)
            else:
                self._end_with_file(one)

    def _end_with_file(self, left: UnfinishedEvaluation) -> None:
        what = next((one for one in self._sets if one.name == left.label.partition(".")[2]), None)
        if what is None:
            log.warning("evaluation %r is given up: its set is configured no more", left.label)
            return
        done = {}
        if left.has_begun:
            # File and results must agree on the problems.
            done = keep_evaluated(self._recorder.run_dir, left.label, what)
        evaluation = Evaluation(left.label, what, version=left.version, now=0.0, done=done)
        evaluation.lose_unopened()
        evaluation.is_late = True
        self._finish(evaluation, 0.0)

    @property
    def is_idle(self) -> bool:
        """Whether none runs and none is due."""
        return self.running is None and not self._due

    def progress(self) -> dict[str, float | str]:
        """Metrics about how far the evaluation is, its further sets included; {} when none runs."""
        running = self.running
        if running is None:
            return {}
        further = [due for due in self._due if due.version == running.version]
        wanted = running.completions + sum(due.what.completions for due in further)
        return {
            EVALUATION_RUNNING: running.label,
            COMPLETIONS_DONE: self._completions_before + running.completions_done,
            COMPLETIONS_WANTED: self._completions_before + wanted,
        }

    def ask(self, version: int, *, is_final: bool) -> None:
        """Note the evaluations that a synced version asks for."""
        self._due.extend(self._due_at(version, is_final=is_final))

    def _due_at(self, version: int, *, is_final: bool) -> list[_Due]:
        if self._only:
            return []
        labels = label_at(version, is_final=is_final, every_steps=self._config.every_steps)
        due = [
            _Due(one.label(label), one, version, is_final) for label in labels for one in self._sets
        ]
        return [
            one
            for one in due
            if one.label not in self.done and (one.label, version) not in self._ended_earlier
        ]

    def allows_batch(self, step: int, synced: int) -> bool:
        """Whether the batch of a step may be built: also while version `step` is being synced.

        No batch is built before an evaluation, or while an evaluation runs without evaluators: the
        next update would change what it measures.
        """
        if step > synced + 1:
            return False
        held = self.evaluators.version if self.evaluators.hold_all else None
        if any(due.version != held for due in self._due):
            return False
        if self.running is not None and self.running.version != held:
            return False
        return step <= synced or not self._due_at(step, is_final=False)

    def note_batch(self) -> None:
        """A batch is built: a later version than the measured one will come."""
        self._has_later_version = not self.is_idle

    def note_evaluators(self, leases: Leases) -> None:
        """Take in the state of the generators that evaluate, if not all do."""
        # Called for every message: thousands of generators are looked at only where it matters.
        if self.evaluators.names:
            self.evaluators.note(leases.peers)

    def advance(self, synced: int, now: float, *, leases: Leases) -> None:
        """End an evaluation that is complete, and begin the next one that is due."""
        if self.running is not None and self.running.is_complete:
            self._finish(self.running, now)
            ended, self.running = self.running, None
            before = self._completions_before + ended.completions
            has_further = any(due.version == ended.version for due in self._due)
            self._completions_before = before if has_further else 0
            if not any(due.version == self.evaluators.version for due in self._due):
                self.evaluators.release()
        # Where evaluating is all there is to do, its clock starts with the first generator.
        if self.running is None and self._due and (not self._only or leases.has_room):
            self._begin(self._due.popleft(), leases.peers, now)

    def _begin(self, due: _Due, generators: Sequence[Peer], now: float) -> None:
        label, what = due.label, due.what
        log.info("evaluation %r of version %d starts", label, due.version)
        done = {}
        if self._recorder.keeps_evaluated:
            done = keep_evaluated(self._recorder.run_dir, label, what)
            log.info("%d of its %d prompts were evaluated earlier", len(done), len(what.prompts))
        self._recorder.begin_evaluation(label, keeps_lines=bool(done))
        self.running = Evaluation(label, what, version=due.version, now=now, done=done)
        # The sets of a version share its evaluators. After the last step nobody else has work.
        if due.version != self.evaluators.version and not due.is_final:
            self._has_later_version = False
            self.evaluators.choose(generators, due.version)

    @property
    def is_orphaned(self) -> bool:
        """Whether the running evaluation measures a version that nobody holds any more."""
        return self.running is not None and self._has_later_version and self.evaluators.are_lost

    def _finish(self, evaluation: Evaluation, now: float) -> None:
        seconds = now - evaluation.started_at
        results = {"eval/n": 0, "eval/seconds": seconds}
        if evaluation.complete:
            results = summarize(evaluation.complete, seconds)
        elif self._only or not (evaluation.lost_ungraded or evaluation.is_late or self.is_orphaned):
            # Where evaluating is all there is to do, no result is a failure.
            raise TooManyFailures(
                f"evaluation {evaluation.label!r} lost all its {evaluation.lost} prompts, "
                f"{evaluation.lost_ungraded} because nothing of them could be graded: look into "
                "the logs of generators and verifiers"
            )
        results |= {"eval/lost": evaluation.lost, "eval/not_graded": evaluation.not_graded}
        self._metrics.write(evaluation.version, {"label": evaluation.label, **results})
        self.done.append(evaluation.label)
        self._log_results(evaluation, results)

    def _log_results(self, evaluation: Evaluation, results: dict[str, float]) -> None:
        if not evaluation.complete:
            log.error(
                "evaluation %r has no result: all %d prompts are lost",
                evaluation.label, evaluation.lost,
            )  # fmt: skip
            return
        log.info(
            "evaluation %r: accuracy %.3f, standard error %.3f, %d prompts (%d lost; %d "
            "completions could not be graded), %.1f s",
            evaluation.label, results["eval/accuracy"], results["eval/accuracy_se"],
            results["eval/n"], evaluation.lost, evaluation.not_graded, results["eval/seconds"],
        )  # fmt: skip

    def running_of(self, group: Group) -> Evaluation:
        """The running evaluation, to which the group belongs."""
        assert self.running is not None and self.running.label == group.evaluation
        return self.running

    def is_overdue(self, now: float) -> bool:
        """Whether the running evaluation took too long and is not complete."""
        running = self.running
        if running is None or running.is_complete:
            return False
        return now - running.started_at > self._config.timeout_s

    @property
    def overdue_text(self) -> str:
        """The reason why an overdue evaluation ends."""
        return f"expert.eval.timeout_s = {self._config.timeout_s:.0f} is over"

    def note_late(self, state: str) -> None:
        """The running evaluation is overdue, and ends without what is missing.

        Raises DeadlineExceeded, with the state of the queue, where evaluating is all there is.
        """
        if self._only:
            raise DeadlineExceeded(f"{self.overdue_text}: {state}")
        assert self.running is not None
        if not self.running.is_late:
            log.error("evaluation %r ends without what is missing: %s", self.running.label, state)
        self.running.is_late = True
