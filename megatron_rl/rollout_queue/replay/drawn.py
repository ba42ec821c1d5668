"""The replayed groups of a batch, and the metrics that count them apart.

Used by the rollout queue.
"""

from typing import NamedTuple

from megatron_rl.protocol.metrics import Metric
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.replay.stored_groups import StoredGroup
from megatron_rl.rollout_queue.train_sequence import NO_VERSION


class Drawn(NamedTuple):
    """What a step replays."""

    groups: tuple[Group | StoredGroup, ...] = ()
    of_source: tuple[Metric, ...] = ()
    """Of what there is to draw from."""

    def load(self) -> list[Group]:
        """The groups with their arrays; reads files. Raises InputError where a file was cut."""
        return [
            group.load(keeps_versions=False) if isinstance(group, StoredGroup) else group
            for group in self.groups
        ]

    def metrics(self, step: int) -> list[Metric]:
        """queue/replayed_*: of the groups; ages are of this run's own ones."""
        if not self.groups:
            return list(self.of_source)
        rewards = [reward for group in self.groups for reward in group.rewards]
        count = len(rewards)
        own = [group for group in self.groups if isinstance(group, Group)]
        oldest = [scored.rollout.oldest_version for group in own for scored in group.ordered]
        ages = [step - version for version in oldest if version != NO_VERSION]
        return [
            *self.of_source,
            Metric("queue/replayed_groups", len(self.groups), "sum", len(self.groups)),
            Metric("queue/replayed_rollouts", count, "sum", count),
            Metric("queue/replayed_reward", sum(rewards), "mean", count),
            Metric("queue/replayed_age_versions_mean", sum(ages), "mean", len(ages)),
            *([Metric("queue/replayed_age_versions_max", max(ages), "max")] if ages else []),
        ]


NOTHING = Drawn()
