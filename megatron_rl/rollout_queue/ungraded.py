"""What becomes of a completion that cannot be graded: it alone is dropped, not its group.

Used by the rollout queue. A training completion is generated anew, at most
expert.queue.max_replacements times, so that groups stay whole; then its group goes on without it,
as long as enough members are left to compare with one another. An evaluation never draws again,
since the completions that can be graded are not a fair sample of all; it counts what it could
grade.
"""

import collections
import enum
import logging
import math
from typing import NamedTuple

from megatron_rl.config.tree import QueueConfig
from megatron_rl.rollout_queue.activity import ActivityLog
from megatron_rl.rollout_queue.breaker import CircuitBreaker
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.failures import GroupFailure, ScoreFailure
from megatron_rl.rollout_queue.groups import Group, GroupBook
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.record import Recorder

log = logging.getLogger(__name__)

_MIN_TO_COMPARE = 2
"""A group of one has no other reward to differ from."""


class Fate(enum.Enum):
    """What a group is after the loss of a completion."""

    OPEN = "it waits for others, or for a replacement"
    SCORED = "it has no open completion any more"
    TOO_SMALL = "too few are left: it is to be dropped"


class DropObservers(NamedTuple):
    """Who is told of each completion that is dropped."""

    recorder: Recorder
    activity: ActivityLog
    breaker: CircuitBreaker


class Ungraded:
    """Drops, records and counts completions that cannot be graded."""

    def __init__(
        self,
        config: QueueConfig,
        leases: Leases,
        *,
        book: GroupBook,
        evaluations: EvaluationScheduler,
        tellers: DropObservers,
    ) -> None:
        self._config = config
        self._leases = leases
        self._book = book
        self._evaluations = evaluations
        self._tellers = tellers

    def drop(self, failure: ScoreFailure) -> Fate:
        """Drop one completion of a group that is not abandoned. Raises TooManyFailures."""
        group, index = failure.group, failure.rollout.index
        log.error(
            "completion %d of prompt %r dropped as %s: %r",
            index,
            group.prompt.id,
            failure.reason,
            failure.detail,
        )
        record = self._tellers.recorder.write_ungraded(failure)
        self._tellers.activity.add_ungraded(failure.reason)
        self._tellers.breaker.note_failed(failure, record)
        if group.evaluation:
            self._evaluations.count_ungraded(group)
        else:
            self._book.count_left_out(failure.reason)
            if not failure.is_late and may_replace(group, index, self._config):
                group.replacements[index] += 1
                self._leases.replace(group, index)
                return Fate.OPEN
        group.lost[index] = failure.reason
        if group.size - len(group.lost) < least_members(group, self._config):
            return Fate.TOO_SMALL
        return Fate.SCORED if group.is_scored else Fate.OPEN


def may_replace(group: Group, index: int, config: QueueConfig) -> bool:
    """Whether another completion is to be generated in the place of one that training lost."""
    # A greedy one would be the same again.
    is_drawn = group.sampling.temperature > 0
    return is_drawn and group.replacements[index] < config.max_replacements


def least_members(group: Group, config: QueueConfig) -> int:
    """Scored completions that a group needs, to be of use."""
    if group.evaluation:
        return 1
    return max(_MIN_TO_COMPARE, math.ceil(config.min_group_share * group.size))


def too_small(group: Group, detail: str) -> GroupFailure:
    """Why a group is dropped of which too few completions can be graded."""
    reasons = collections.Counter(group.lost.values())
    text = f"{len(group.lost)} of {group.size} completions could not be graded; last: {detail}"
    return GroupFailure(group, reasons.most_common(1)[0][0], text)
