"""Decides which evaluation runs when, and writes its results.

Used by the rollout queue. One evaluation runs at a time and measures exactly one policy version.
Evaluators (`running_evaluation.py`), if any, hold that version while the other generators train.
Without evaluators `allows_batch` delays the batch that would make a later version. Training groups
still get the slots that the evaluation does not need.
"""

import collections
import logging
from collections.abc import Sequence
from pathlib import Path
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
from megatron_rl.rollout_queue.drop_reasons import TooManyFailures
from megatron_rl.rollout_queue.evaluation import (
    FINAL_LABEL,
    EvaluationSet,
    evaluation_sets,
    first_free_number,
    keep_evaluated,
    label_at,
    read_ended,
    read_evaluated,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.peers import Peer
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.running_evaluation import Evaluation, Evaluators, summarize

log = logging.getLogger(__name__)


class _Due(NamedTuple):
    """An evaluation that has not begun."""

    label: str
    """With the name of the set."""
    what: EvaluationSet
    version: int
    is_final: bool


def check_unfinished(run_dir: Path, state: QueueState, sets: Sequence[EvaluationSet]) -> None:
    """Read the files from which `EvaluationScheduler.resume` ends evaluations of earlier versions.

    Raises InputError for a damaged file.
    """
    ended = read_ended(run_dir, state.step) if (run_dir / "metrics.jsonl").exists() else set()
    by_name = {one.name: one for one in sets}
    for one in state.unfinished_evaluations:
        what = by_name.get(one.label.partition(".")[2])
        is_over = one.version == state.step or (one.label, one.version) in ended
        if one.has_begun and not is_over and what is not None:
            read_evaluated(run_dir, one.label, what)


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
        """only: label of the only evaluation to run; empty for training. Raises InputError."""
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
        """Number of the first group to open."""
        self._due: collections.deque[_Due] = collections.deque()
        if only:
            self._due.extend(_Due(one.label(only), one, 0, False) for one in self._sets)
        self.running: Evaluation | None = None
        self.evaluators = Evaluators(0 if only else config.evaluators)
        self._completions_before = 0
        """Completions of the ended sets of the same version."""
        self._has_later_version = False
        """A version after the measured one is synced, or will be."""
        self.done: list[str] = []
        """Labels of the evaluations that have ended."""
        self._paused_at: float | None = None
        """Time since when no engine has weights, because another launcher starts all again."""
        self._ended_earlier: set[tuple[str, int]] = set()
        """(label, version) of the evaluations that ended before the run was resumed."""

    def add_to(self, state: QueueState) -> QueueState:
        """The state of the queue with its evaluations: done, running, due."""
        left = [UnfinishedEvaluation(due.label, due.version, has_begun=False) for due in self._due]
        if self.running is not None:
            label, version = self.running.label, self.running.version
            left = [UnfinishedEvaluation(label, version, has_begun=True), *left]
        return msgspec.structs.replace(
            state, evaluated=list(self.done), unfinished_evaluations=left
        )

    def resume(self, state: QueueState) -> None:
        """Resume after a saved step; call before the first message. Raises InputError.

        The trainer syncs the version of the state again, which makes its evaluations due. An
        evaluation that ended after the state was saved is not repeated. An evaluation of an earlier
        version ends with the problems in its file, since no generator will hold that version.
        """
        # A run that resumes with more steps has another end, whose evaluation is still due.
        self.done = [one for one in state.evaluated if one.partition(".")[0] != FINAL_LABEL]
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
            # The file and the results must have the same problems.
            done = keep_evaluated(self._recorder.run_dir, left.label, what)
        evaluation = Evaluation(left.label, what, version=left.version, now=0.0, done=done)
        evaluation.lose_unopened()
        evaluation.is_late = True
        self._finish(evaluation, 0.0)

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self._due

    @property
    def excludes_training(self) -> bool:
        """Whether no training group may be opened before the evaluations end.

        With expert.generator.deterministic all completions of an engine have the same sampling:
        SGLang draws by other operations when greedy completions run at the same time.
        """
        has_seeds = any(one.draws_by for one in self._sets)
        return has_seeds and not self.is_idle and not self.evaluators.names

    def progress(self) -> dict[str, float | str]:
        """Progress of the running evaluation, all its sets included; {} when none runs."""
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
        """Note the evaluations that are due at a synced version."""
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
        """Whether the batch of a step may be built, perhaps while version `step` is being synced.

        Without evaluators no batch is built while an evaluation is due or runs: the next update
        would change the measured version.
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
        """A batch is built: a version after the measured one will follow."""
        self._has_later_version = not self.is_idle

    def note_evaluators(self, leases: Leases) -> None:
        # Called for every message, so it skips the list of thousands of generators when it can.
        if self.evaluators.names:
            self.evaluators.note(leases.peers)

    def advance(self, synced: int, now: float, *, leases: Leases) -> None:
        """End an evaluation that is complete, and begin the next one that is due."""
        self._resume_clock(now, leases)
        if self.running is not None and self.running.is_complete:
            self._finish(self.running, now)
            ended, self.running = self.running, None
            before = self._completions_before + ended.completions
            has_further = any(due.version == ended.version for due in self._due)
            self._completions_before = before if has_further else 0
            if not any(due.version == self.evaluators.version for due in self._due):
                self.evaluators.release()
        # In an evaluation-only run the clock starts with the first generator.
        if self.running is None and self._due and (not self._only or leases.has_room):
            self._begin(self._due.popleft(), leases.peers, now)

    def pause(self, now: float) -> None:
        """Stop the clock of the running evaluation until a generator with weights has room."""
        self._paused_at = now

    def _resume_clock(self, now: float, leases: Leases) -> None:
        if self._paused_at is None or not leases.has_room:
            return
        if self.running is not None:
            # It may have begun since: the last verdicts of the one before it came meanwhile.
            self.running.started_at += now - max(self._paused_at, self.running.started_at)
        self._paused_at = None

    def _begin(self, due: _Due, generators: Sequence[Peer], now: float) -> None:
        label, what = due.label, due.what
        log.info("evaluation %r of version %d starts", label, due.version)
        done = {}
        if self._recorder.keeps_evaluated:
            done = keep_evaluated(self._recorder.run_dir, label, what)
            log.info("%d of its %d prompts were evaluated earlier", len(done), len(what.prompts))
        self._recorder.begin_evaluation(label, keeps_lines=bool(done))
        self.running = Evaluation(label, what, version=due.version, now=now, done=done)
        # All sets of a version share its evaluators. After the last step all generators that have
        # the version evaluate: the evaluators of an earlier one get no weights any more.
        if due.version != self.evaluators.version and not due.is_final:
            self._has_later_version = False
            self.evaluators.choose(generators, due.version)

    @property
    def is_orphaned(self) -> bool:
        """Whether no generator holds the version of the running evaluation any more."""
        return self.running is not None and self._has_later_version and self.evaluators.are_lost

    def _finish(self, evaluation: Evaluation, now: float) -> None:
        seconds = now - evaluation.started_at
        results = {"eval/n": 0, "eval/seconds": seconds}
        if evaluation.complete:
            results = summarize(evaluation.complete, seconds)
        elif self._only or not (evaluation.lost_ungraded or evaluation.is_late or self.is_orphaned):
            # In an evaluation-only run a missing result is a failure.
            raise TooManyFailures(
                f"evaluation {evaluation.label!r} lost all its {evaluation.lost} prompts, "
                f"{evaluation.lost_ungraded} because nothing of them could be graded: look into "
                "the logs of generators and verifiers"
            )
        results |= {"eval/lost": evaluation.lost, "eval/not_graded": evaluation.not_graded}
        if evaluation.versions:
            results["eval/oldest_version"] = min(evaluation.versions)
            results["eval/newest_version"] = max(evaluation.versions)
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
        has_error = "eval/accuracy_se" in results
        error = f"{results['eval/accuracy_se']:.3f}" if has_error else "unknown"
        log.info(
            "evaluation %r: accuracy %.3f, standard error %s, prompts: %d (%d lost; %d "
            "completions could not be graded), %.1f s",
            evaluation.label, results["eval/accuracy"], error, results["eval/n"],
            evaluation.lost, evaluation.not_graded, results["eval/seconds"],
        )  # fmt: skip

    def running_of(self, group: Group) -> Evaluation:
        """The running evaluation, which has the group."""
        assert self.running is not None and self.running.label == group.evaluation
        return self.running

    def is_overdue(self, now: float) -> bool:
        running = self.running
        if running is None or running.is_complete or self._paused_at is not None:
            return False
        return now - running.started_at > self._config.timeout_s

    @property
    def overdue_text(self) -> str:
        return f"expert.eval.timeout_s = {self._config.timeout_s:.0f} is over"

    def note_late(self, state: str) -> None:
        """Mark the overdue evaluation, which ends without its missing completions.

        Raises DeadlineExceeded, with the state of the queue, in an evaluation-only run.
        """
        if self._only:
            raise DeadlineExceeded(f"{self.overdue_text}: {state}")
        assert self.running is not None
        if not self.running.is_late:
            log.error("evaluation %r ends without what is missing: %s", self.running.label, state)
        self.running.is_late = True
