"""Which evaluations are due, which one runs, and what it found.

Used by the rollout queue. One evaluation runs at a time and measures exactly one policy version: no
later version comes out while it runs, because `allows_batch` holds back the batch that would make
it. Training groups are leased meanwhile, to slots that the evaluation does not need.
"""

import collections
import logging

from megatron_rl.config.errors import InputError
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.types import Prompt
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.evaluation import Evaluation, label_at, select_held_out, summarize
from megatron_rl.rollout_queue.failures import TooManyFailures
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.record import Recorder

log = logging.getLogger(__name__)


class EvaluationDesk:
    """The evaluations of a run: due, running, done."""

    def __init__(
        self,
        config: Config,
        held_out: list[Prompt],
        *,
        recorder: Recorder,
        metrics: JsonlWriter,
        only: str,
    ) -> None:
        """only: label of the one evaluation to run; empty for training. Raises InputError."""
        if only and not config.eval.prompts:
            raise InputError("an evaluation is asked for, but eval.prompts = 0: raise it")
        self._config = config.eval
        # One limit for all evaluations, so that they can be compared.
        self._sampling = longest_stage(config).sampling
        self._held_out = select_held_out(held_out, config.eval)
        self._recorder = recorder
        self._metrics = metrics
        self._only = only
        self._due = collections.deque([only] if only else [])
        self._running: Evaluation | None = None
        self.done: list[str] = []
        """Labels of the evaluations that have ended."""

    @property
    def is_running(self) -> bool:
        """Whether an evaluation has begun and not ended."""
        return self._running is not None

    @property
    def is_idle(self) -> bool:
        """Whether none runs and none is due."""
        return self._running is None and not self._due

    def ask(self, version: int, *, is_final: bool) -> None:
        """Note the evaluations that a published version asks for."""
        self._due.extend(self._labels_at(version, is_final=is_final))

    def _labels_at(self, version: int, *, is_final: bool) -> list[str]:
        if not self._config.prompts or self._only:
            return []
        labels = label_at(version, is_final=is_final, every_steps=self._config.every_steps)
        return [label for label in labels if label not in self.done]

    def allows_batch(self, step: int, published: int) -> bool:
        """Whether the batch of a step may be formed: also while version `step` is being published.

        Not while an evaluation runs, or before one: an update would change what it measures.
        """
        if self._running is not None or step > published + 1:
            return False
        return step <= published or not self._labels_at(step, is_final=False)

    def advance(self, published: int, now: float, *, has_generator: bool) -> None:
        """End an evaluation that is complete, and begin the next one that is due."""
        if self._running is not None and self._running.is_complete:
            self._finish(self._running, now)
            self._running = None
        # Where evaluating is all there is to do, its clock starts with the first generator.
        if self._running is None and self._due and (has_generator or not self._only):
            label = self._due.popleft()
            log.info("evaluation %r of version %d starts", label, published)
            self._running = Evaluation(
                label,
                self._held_out,
                config=self._config,
                sampling=self._sampling,
                version=max(published, 0),
                now=now,
            )

    def _finish(self, evaluation: Evaluation, now: float) -> None:
        seconds = now - evaluation.started_at
        results = {"eval/n": 0, "eval/seconds": seconds}
        if evaluation.complete:
            results = summarize(evaluation.complete, seconds)
        elif self._only or not evaluation.lost_ungraded:
            # Where evaluating is all there is to do, no result is a failure.
            raise TooManyFailures(
                f"evaluation {evaluation.label!r} lost all its {evaluation.lost} prompts, "
                f"{evaluation.lost_ungraded} because nothing of them could be graded: look into "
                "the logs of generators and verifiers"
            )
        results |= {"eval/lost": evaluation.lost, "eval/not_graded": evaluation.not_graded}
        self._recorder.write_evaluation(evaluation.label, evaluation.complete)
        self._metrics.write(evaluation.version, {"label": evaluation.label, **results})
        self.done.append(evaluation.label)
        self._log_results(evaluation, results)

    def _log_results(self, evaluation: Evaluation, results: dict[str, float]) -> None:
        if not evaluation.complete:
            log.error(
                "evaluation %r: nothing could be graded of its %d prompts",
                evaluation.label,
                evaluation.lost,
            )
            return
        log.info(
            "evaluation %r: accuracy %.3f, standard error %.3f, %d prompts (%d lost; %d "
            "completions could not be graded), %.1f s",
            evaluation.label,
            results["eval/accuracy"],
            results["eval/accuracy_se"],
            results["eval/n"],
            evaluation.lost,
            evaluation.not_graded,
            results["eval/seconds"],
        )

    @property
    def has_unopened(self) -> bool:
        """Whether prompts of the running evaluation wait for their group to be opened."""
        return self._running is not None and self._running.has_unopened

    def open_group(self, number: int) -> Group:
        """The group of the running evaluation's next prompt."""
        assert self._running is not None
        return self._running.open_group(number)

    def close(self, group: Group) -> None:
        """Note that a group is complete."""
        assert self._running is not None and self._running.label == group.evaluation
        self._running.close(group)

    def lose(self, group: Group, reason: str) -> None:
        """Note that a group failed: the results are over the others, and say how many are lost."""
        assert self._running is not None and self._running.label == group.evaluation
        self._recorder.write_dropped(group, reason)
        self._running.lose(group)

    def count_ungraded(self, group: Group) -> None:
        """Note that a completion could not be graded."""
        assert self._running is not None and self._running.label == group.evaluation
        self._running.not_graded += 1

    def is_overdue(self, now: float) -> bool:
        """Whether one has run for too long and is not complete."""
        running = self._running
        if running is None or running.is_complete:
            return False
        return now - running.started_at > self._config.timeout_s

    @property
    def overdue_text(self) -> str:
        """What is said of one that is overdue."""
        return f"eval.timeout_s = {self._config.timeout_s:.0f} is over"

    def check_deadline(self, now: float, state: str) -> None:
        """Raise DeadlineExceeded, with the state of the queue, when one is overdue."""
        if self.is_overdue(now):
            raise DeadlineExceeded(f"{self.overdue_text}: {state}")

    def describe(self, now: float) -> str:
        """One line on what is missing; empty when none runs."""
        return self._running.describe(now) if self._running is not None else ""
