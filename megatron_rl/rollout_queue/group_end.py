"""How the collecting of a group ends: it is kept for a batch, measured, dropped, or not needed.

Used by the rollout queue's coordinator.
"""

import logging
from typing import NamedTuple

from megatron_rl.config.tree import Config
from megatron_rl.rollout_queue.classes import find_without_asking
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.failures import FailureCount, GroupFailure
from megatron_rl.rollout_queue.groups import NOT_NEEDED, Group, GroupBook
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.scoring import Scoring
from megatron_rl.rollout_queue.selection import Selection
from megatron_rl.rollout_queue.training_groups import TrainingGroups
from megatron_rl.rollout_queue.ungraded import DropObservers, Fate, Ungraded, too_small

log = logging.getLogger(__name__)


class Collecting(NamedTuple):
    """Where open groups and their completions are."""

    leases: Leases
    scoring: Scoring
    book: GroupBook


class GroupCloser:
    """Ends groups, and tells everybody who keeps something of them."""

    def __init__(
        self,
        config: Config,
        collecting: Collecting,
        *,
        evaluations: EvaluationScheduler,
        training: TrainingGroups | None,
        tellers: DropObservers,
    ) -> None:
        self._leases, self._scoring, self._groups = collecting
        self._evaluations = evaluations
        self._training = training
        self._tellers = tellers
        self._selection = Selection(config.algorithm, self._groups, tellers)
        self._failed = FailureCount(config.queue.max_failed_groups)
        self._ungraded = Ungraded(
            config.queue,
            self._leases,
            book=self._groups,
            evaluations=evaluations,
            tellers=tellers,
        )

    def close(self, group: Group) -> None:
        """Every completion of a group is scored, or cannot be; it may lack its classes."""
        reason = "" if group.evaluation else self._selection.reason_to_drop(group)
        if not reason and not find_without_asking(group):
            self._scoring.submit_classes(group)
            return
        self._failed.note_completed()
        if group.evaluation:
            self._evaluations.close(group)
            return
        self._tellers.activity.add_complete(group)
        if reason:
            self.drop(group, reason)
        else:
            self._groups.note_ready(group)

    def drop(self, group: Group, reason: str) -> None:
        """Release a training group that is not trained on; the reason appears in all metrics."""
        self._groups.drop(group, reason)
        if self._training is not None:
            self._training.note_dropped(group)
        self._tellers.recorder.write_dropped(group, reason)
        self._tellers.activity.add_dropped(reason)

    def drop_failed(self) -> None:
        """Drop what failed, each under its reason. Raises TooManyFailures."""
        for failure in self._leases.pop_failures() + self._scoring.pop_class_failures():
            if self._evaluations.goes_on_without(failure):
                self.close(failure.group)
            elif not failure.group.is_abandoned:
                self._drop_group(failure)
                self._failed.note_failed(failure)
        for lost in self._scoring.pop_failures():
            if lost.group.is_abandoned:
                continue
            fate = self._ungraded.drop(lost)
            if fate is Fate.TOO_SMALL:
                self._drop_group(too_small(lost.group, lost.detail))
            elif fate is Fate.SCORED:
                self.close(lost.group)

    def _drop_group(self, failure: GroupFailure) -> None:
        group = failure.group
        log.error("prompt %r dropped as %s: %r", group.prompt.id, failure.reason, failure.detail)
        self._withdraw(group)
        if group.evaluation:
            self._evaluations.lose(group, failure.reason)
        else:
            self.drop(group, failure.reason)

    def _withdraw(self, group: Group) -> None:
        group.is_abandoned = True
        self._leases.cancel(group)
        self._scoring.cancel(group)

    def abandon(self) -> int:
        """Training is over: give up the groups that are in no batch; how many there were."""
        groups = self._groups.abandon()
        for group in groups:
            self._withdraw(group)
            self._tellers.recorder.write_dropped(group, NOT_NEEDED)
        if groups:
            completions = sum(group.size for group in groups)
            log.warning("%d groups (%d completions) were not needed", len(groups), completions)
        return len(groups)
