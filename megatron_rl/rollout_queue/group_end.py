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

from megatron_rl.config.tree import QueueConfig
from megatron_rl.rollout_queue.activity import Activity
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
from megatron_rl.rollout_queue.groups import DroppedGroups, Group, has_gold
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.scoring import Scoring, find_without_asking
from megatron_rl.rollout_queue.training_groups import TrainingGroups

log = logging.getLogger(__name__)

_MIN_TO_COMPARE = 2
"""Advantages compare at least two rewards."""
_NO_CLASSES = (CLASSES_UNGRADABLE, CLASSES_NOT_GRADED)


class DropObservers(NamedTuple):
    """The objects that record each dropped group and completion."""

    recorder: Recorder
    activity: Activity
    breaker: CircuitBreaker


class GroupEnd:
    """Ends groups and updates all objects that keep something of them."""

    def __init__(
        self,
        training: TrainingGroups,
        leases: Leases,
        scoring: Scoring,
        *,
        evaluations: EvaluationScheduler,
        observers: DropObservers,
    ) -> None:
        self._config = training.config
        self._leases, self._scoring = leases, scoring
        self._evaluations = evaluations
        self._training, self._book = training, training.book
        self._recorder, self._activity, self._breaker = observers
        self._failed = FailureCount(self._config.queue.max_failed_groups)

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
            index, gold = scored.rollout.index, scored.rollout.gold
            if gold is None or not scored.score.is_well_formed or has_gold(scored):
                continue
            self._recorder.write_left_out(group, scored, gold.fault)
            self._activity.add_left_out(gold.fault)
            self._book.count_left_out(gold.fault)
            group.lost[index] = gold.fault
            del group.scored[index]

    def take_batch(self, step: int) -> tuple[list[Group], DroppedGroups] | None:
        """Groups of the batch of a step, and what was dropped; None if groups are missing."""
        training = self._training
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
        self._training.note_dropped(group)
        self._recorder.write_dropped(group, reason)
        self._activity.add_dropped(reason)

    def drop_failed(self) -> None:
        """Drop failed groups and completions, each under its reason. Raises TooManyFailures."""
        failures = self._leases.pop_failures() + self._scoring.pop_failures()
        # Groups first: a completion of a dropped group is not replaced.
        for failure in sorted(failures, key=lambda one: isinstance(one, ScoreFailure)):
            if failure.group.is_abandoned:
                continue
            if isinstance(failure, ScoreFailure):
                self._drop_completion(failure)
            elif failure.group.evaluation and failure.reason in _NO_CLASSES:
                self._close_without_vote(failure)
            else:
                self._drop_group(failure)
                self._failed.note_failed(failure)

    def _close_without_vote(self, failure: GroupFailure) -> None:
        """End an evaluation group that lacks only classes."""
        group, reason = failure.group, failure.reason
        log.warning("no vote on prompt %r, %s: %r", group.prompt.id, reason, failure.detail)
        group.needs_classes = False
        self.close(group)

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
            if not failure.is_late and group.replacements[index] < queue.max_replacements:
                group.replacements[index] += 1
                self._leases.replace(group, index)
                return
        group.lost[index] = failure.reason
        if group.size - len(group.lost) < least_members(group, queue):
            lost = collections.Counter(group.lost.values())
            why = f"{len(group.lost)} of {group.size} completions could not be graded"
            worst = lost.most_common(1)[0][0]
            self._drop_group(GroupFailure(group, worst, f"{why}; last: {failure.detail}"))
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
        """End an overdue evaluation without its missing grades, then without its missing groups.

        Raises DeadlineExceeded, with the state of the queue, in an evaluation-only run.
        """
        if not self._evaluations.is_overdue(now):
            return
        self._scoring.give_up_evaluation(self._evaluations.overdue_text)
        self.drop_failed()
        if self._evaluations.is_overdue(now):
            self._evaluations.note_late(state)
            self._give_up_evaluation(EVALUATION_LATE)

    def _give_up_evaluation(self, reason: str) -> None:
        for group in self._leases.pop_evaluation():
            self._lose(group, reason)
        assert self._evaluations.running is not None
        self._evaluations.running.lose_unopened()


def least_members(group: Group, config: QueueConfig) -> int:
    """Minimum scored completions of a group that is used."""
    if group.evaluation:
        return 1
    return max(_MIN_TO_COMPARE, math.ceil(config.min_group_share * group.size))
