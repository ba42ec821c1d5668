"""All ways in which a group leaves the rollout queue. Used by its coordinator.

| a group leaves                                | by                                     |
|-----------------------------------------------|----------------------------------------|
| into a batch                                  | `take_batch`                           |
| dropped: zero variance or a failure           | `close`, `drop_failed`, under a reason |
| not needed: training ended before its batch   | `abandon`                              |
| into the results of its evaluation            | `close`                                |
| lost to its evaluation: a failure or too late | `drop_failed`, `_give_up_evaluation`   |

`drop_reasons.py` has the table of reasons. A completion that cannot be graded is dropped alone. The
queue generates a replacement up to expert.queue.max_replacements times; then the group lacks it, if
enough members are left to compare. An evaluation replaces nothing, because gradable completions are
not a fair sample of all.
"""

import collections
import logging
import math
from typing import NamedTuple

from megatron_rl.config.tree import Config, QueueConfig
from megatron_rl.protocol.types import ScoredRollout
from megatron_rl.rollout_queue.activity import Activity
from megatron_rl.rollout_queue.answer_classes import find_without_asking
from megatron_rl.rollout_queue.circuit_breakers import CircuitBreaker, FailureCount
from megatron_rl.rollout_queue.drop_reasons import (
    CLASSES_NOT_GRADED,
    CLASSES_UNGRADABLE,
    EVALUATION_LATE,
    EVALUATOR_LOST,
    GROUP_REASONS,
    NOT_NEEDED,
    ZERO_VARIANCE,
    GroupFailure,
    ScoreFailure,
)
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.groups import DroppedGroups, Group, GroupBook, has_gold
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.scoring import Scoring
from megatron_rl.rollout_queue.training_groups import TrainingGroups

log = logging.getLogger(__name__)

_MIN_TO_COMPARE = 2
"""Advantages compare at least two rewards."""


class Collecting(NamedTuple):
    """The objects that have open groups and their completions."""

    leases: Leases
    scoring: Scoring
    book: GroupBook


class DropObservers(NamedTuple):
    """The objects that record each dropped group and completion."""

    recorder: Recorder
    activity: Activity
    breaker: CircuitBreaker


class GroupEnd:
    """Ends groups and updates all objects that keep something of them."""

    def __init__(
        self,
        config: Config,
        collecting: Collecting,
        *,
        evaluations: EvaluationScheduler,
        training: TrainingGroups | None,
        observers: DropObservers,
    ) -> None:
        self._config = config
        self._leases, self._scoring, self._book = collecting
        self._evaluations = evaluations
        self._training = training
        self._recorder, self._activity, self._breaker = observers
        self._failed = FailureCount(config.queue.max_failed_groups)

    # --- complete groups ------------------------------------------------------------------------

    def close(self, group: Group) -> None:
        """End a group whose completions are all scored or dropped, or ask for its classes."""
        reason = "" if group.evaluation else self.find_reason_to_drop(group)
        if not reason and not find_without_asking(group):
            self._scoring.submit_classes(group)
            return
        self._failed.note_completed()
        if group.evaluation:
            # Record first, so that no counted result is missing from the file.
            self._recorder.write_evaluation(group.evaluation, [group])
            self._evaluations.running_of(group).close(group)
            return
        self._activity.add_complete(group)
        if reason:
            self.drop(group, reason)
        else:
            self._book.note_ready(group)

    def find_reason_to_drop(self, group: Group) -> str:
        """Why a scored group is not trained on; empty when it is. Sets `group.learns_gold`.

        A group that learns the reference answer loses its well-formed completions without a place
        for that answer. A second call for the same group returns the same reason.
        """
        algorithm = self._config.algorithm
        may_learn = algorithm.gold.groups == "all" or (
            algorithm.gold.groups == "unrewarded"
            and not any(scored.score.is_correct for scored in group.ordered)
        )
        if may_learn and any(map(has_gold, group.ordered)):
            group.learns_gold = True
            self._leave_out_without_gold(group)
            return ""
        drops_zero_variance = algorithm.zero_variance_groups == "drop"
        return ZERO_VARIANCE if drops_zero_variance and group.has_zero_variance else ""

    def _leave_out_without_gold(self, group: Group) -> None:
        for scored in group.ordered:
            gold = scored.rollout.gold
            if gold is not None and scored.score.is_well_formed and not has_gold(scored):
                self._leave_out(group, scored, gold.fault)

    def _leave_out(self, group: Group, scored: ScoredRollout, reason: str) -> None:
        self._recorder.write_left_out(group, scored, reason)
        self._activity.add_left_out(reason)
        self._book.count_left_out(reason)
        group.lost[scored.rollout.index] = reason
        del group.scored[scored.rollout.index]

    def take_batch(self, step: int) -> tuple[list[Group], DroppedGroups] | None:
        """Groups of the batch of a step, and what was dropped; None if groups are missing."""
        training = self._training
        assert training is not None
        # Called after every message, so the common case (groups are missing) is cheap.
        ready = self._book.ready_of(training.schedule.stage_at(step))
        if ready < training.schedule.at(step).sampled_groups:
            return None
        numbers = training.choose_batch(step)
        if numbers is None:
            return None
        groups, dropped = self._book.take(numbers, step)
        training.note_trained(groups)
        return groups, dropped

    # --- dropped groups -------------------------------------------------------------------------

    def drop(self, group: Group, reason: str) -> None:
        """Release a training group that is not trained on, and count the reason."""
        assert reason in GROUP_REASONS, reason
        self._book.drop(group, reason)
        if self._training is not None:
            self._training.note_dropped(group)
        self._recorder.write_dropped(group, reason)
        self._activity.add_dropped(reason)

    def drop_failed(self) -> None:
        """Drop failed groups and completions, each under its reason. Raises TooManyFailures."""
        for failure in self._leases.pop_failures() + self._scoring.pop_class_failures():
            if failure.group.is_abandoned:
                continue
            if failure.group.evaluation and _lacks_classes_alone(failure):
                self.close(failure.group)
                continue
            self._drop_group(failure)
            self._failed.note_failed(failure)
        for lost in self._scoring.pop_failures() + self._leases.pop_lost():
            if not lost.group.is_abandoned:
                self._drop_completion(lost)

    def _drop_group(self, failure: GroupFailure) -> None:
        group, reason = failure.group, failure.reason
        log.error("prompt %r dropped as %s: %r", group.prompt.id, reason, failure.detail)
        self._withdraw(group)
        if group.evaluation:
            self._lose(group, reason)
        else:
            self.drop(group, reason)

    def _drop_completion(self, failure: ScoreFailure) -> None:
        """Drop a completion that cannot be graded. Raises TooManyFailures."""
        group, index = failure.group, failure.rollout.index
        log.error(
            "completion %d of prompt %r dropped as %s: %r",
            index, group.prompt.id, failure.reason, failure.detail,
        )  # fmt: skip
        record = self._recorder.write_ungraded(failure)
        self._activity.add_ungraded(failure.reason)
        self._breaker.note_failed(failure, record)
        queue = self._config.queue
        if group.evaluation:
            self._evaluations.running_of(group).not_graded += 1
        else:
            self._book.count_left_out(failure.reason)
            if not failure.is_late and may_replace(group, index, queue):
                group.replacements[index] += 1
                self._leases.replace(group, index)
                return
        group.lost[index] = failure.reason
        if group.size - len(group.lost) < least_members(group, queue):
            self._drop_group(too_small(group, failure.detail))
        elif group.is_scored:
            self.close(group)

    def _withdraw(self, group: Group) -> None:
        group.is_abandoned = True
        self._leases.cancel(group)
        self._scoring.cancel(group)

    def abandon(self) -> int:
        """Training is over: withdraw the groups in no batch; returns their number."""
        groups = self._book.abandon()
        for group in groups:
            self._withdraw(group)
            self._recorder.write_dropped(group, NOT_NEEDED)
        if groups:
            completions = sum(group.size for group in groups)
            log.warning("%d groups (%d completions) were not needed", len(groups), completions)
        return len(groups)

    # --- evaluations ----------------------------------------------------------------------------

    def _lose(self, group: Group, reason: str) -> None:
        self._recorder.write_dropped(group, reason)
        self._evaluations.running_of(group).lose(group)

    def advance_evaluations(self, synced: int, now: float) -> None:
        """End an evaluation that is complete or lost its evaluators, and begin the next one."""
        self._evaluations.note_evaluators(self._leases)
        if self._evaluations.is_orphaned:
            self._give_up_evaluation(EVALUATOR_LOST)
        self._evaluations.advance(synced, now, leases=self._leases)

    def end_overdue_evaluation(self, now: float, state: str) -> None:
        """End an overdue evaluation without its missing groups.

        Raises DeadlineExceeded, with the state of the queue, in an evaluation-only run.
        """
        if self._evaluations.is_overdue(now):
            self._evaluations.note_late(state)
            self._give_up_evaluation(EVALUATION_LATE)

    def stop_grading_overdue(self, now: float) -> None:
        """Drop the completions of an overdue evaluation that lack only grades."""
        if self._evaluations.is_overdue(now):
            self._scoring.give_up_evaluation(self._evaluations.overdue_text)
            self.drop_failed()

    def _give_up_evaluation(self, reason: str) -> None:
        for group in self._leases.pop_evaluation():
            self._lose(group, reason)
        assert self._evaluations.running is not None
        self._evaluations.running.lose_unopened()


def may_replace(group: Group, index: int, config: QueueConfig) -> bool:
    """Whether to generate a replacement for a training completion that cannot be graded."""
    # A greedy completion would be the same again.
    is_drawn = group.sampling.temperature > 0
    return is_drawn and group.replacements[index] < config.max_replacements


def least_members(group: Group, config: QueueConfig) -> int:
    """Minimum scored completions of a group that is used."""
    if group.evaluation:
        return 1
    return max(_MIN_TO_COMPARE, math.ceil(config.min_group_share * group.size))


def too_small(group: Group, detail: str) -> GroupFailure:
    """The failure of a group with too few gradable completions."""
    reasons = collections.Counter(group.lost.values())
    text = f"{len(group.lost)} of {group.size} completions could not be graded; last: {detail}"
    return GroupFailure(group, reasons.most_common(1)[0][0], text)


def _lacks_classes_alone(failure: GroupFailure) -> bool:
    """Whether an evaluation group lacks only classes: it is used without a vote."""
    if failure.reason not in (CLASSES_UNGRADABLE, CLASSES_NOT_GRADED):
        return False
    group = failure.group
    log.warning("no vote on prompt %r, %s: %r", group.prompt.id, failure.reason, failure.detail)
    group.needs_classes = False
    return True
