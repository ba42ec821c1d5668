"""Which group is opened next: one that an evaluation needs, or one to train on.

Used by the rollout queue.
"""

from megatron_rl.config.tree import QueueConfig
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.groups import Group, GroupBook
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.training_groups import TrainingGroups


class GroupOpener:
    """Opens groups and numbers them."""

    def __init__(
        self,
        config: QueueConfig,
        leases: Leases,
        *,
        evaluations: EvaluationScheduler,
        training: TrainingGroups | None,
        book: GroupBook,
    ) -> None:
        self._config = config
        self._leases = leases
        self._evaluations = evaluations
        self._training = training
        self._book = book
        self.count = evaluations.first_number
        """Groups opened so far; new ones get numbers from here on."""

    def rules(self, synced: int, next_step: int | None) -> LeaseRules:
        """Which generators may take which groups while that version is the synced one."""
        staleness = self._config.max_staleness
        if self._training is not None and next_step is not None:
            staleness = self._training.lowest_staleness(next_step)
        evaluators = self._evaluations.evaluators
        return LeaseRules(
            synced,
            staleness,
            self._config.strict_staleness,
            evaluators.names,
            evaluators.version,
        )

    def open(self, synced: int, next_step: int | None) -> Group | None:
        """A new group, if one is wanted and a generator has room for at least one completion.

        Training groups are opened while an evaluation waits for its last completions, too.
        next_step: the first step that a new group could be trained in; None when training is over.
        """
        rules = self.rules(synced, next_step)
        if self._evaluations.has_unopened and self._has_room(rules, is_evaluation=True):
            group = self._evaluations.open_group(self.count)
        elif (
            next_step is not None
            and self._training is not None
            and (stage := self._training.due_stage(self._book, next_step, synced)) is not None
            and self._has_room(rules, is_evaluation=False)
        ):
            group = self._training.open(self.count, synced, stage)
            self._book.open(group)
        else:
            return None
        # A group that is generated again keeps its number, which is below the count.
        self.count = max(self.count, group.number + 1)
        return group

    def _has_room(self, rules: LeaseRules, *, is_evaluation: bool) -> bool:
        return self._leases.can_take(rules, is_evaluation=is_evaluation)
