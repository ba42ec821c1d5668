"""Groups that are given up, under which reason, and when that is too much.

Used by the rollout queue. A failed group is ours to answer for: it is dropped and counted, never
trained on with an invented reward.
"""

from typing import NamedTuple

from megatron_rl.protocol.types import Rollout
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.groups import Group

EVALUATOR_LOST = "evaluator_lost"
"""The generators that held the version of an evaluation are gone."""
EVALUATION_LATE = "evaluation_late"
"""The time of an evaluation was over before all completions of a prompt were there."""
ATTEMPTS_EXHAUSTED = "attempts_exhausted"
"""A completion failed as often as expert.queue.max_attempts allows."""
LOSSES_EXHAUSTED = "losses_exhausted"
"""Generators lost a completion as often as expert.queue.max_lost_attempts allows."""
CLASSES_UNGRADABLE = "classes_ungradable"
"""By our own fault it is not known which answers of a group are the same."""
CLASSES_NOT_GRADED = "classes_not_graded"
"""The host had no time to tell which answers of a group are the same."""


class GroupFailure(NamedTuple):
    """Why a group is given up."""

    group: Group
    reason: str
    """ATTEMPTS_EXHAUSTED, LOSSES_EXHAUSTED, CLASSES_UNGRADABLE, CLASSES_NOT_GRADED, what a
    generator wants it dropped as, or why too few of its completions are graded."""
    detail: str


class ScoreFailure(NamedTuple):
    """Why a completion is given up that cannot be graded."""

    group: Group
    rollout: Rollout
    reason: str
    """UNGRADABLE or NOT_GRADED."""
    detail: str
    """How often it was tried, and what was said last: perhaps text that the completion made."""
    is_late: bool = False
    """It has taken so long that nobody should wait for another one."""


class TooManyFailures(DeadlineExceeded):
    """So much failed that something is broken; the text says what failed last."""


class FailureCount:
    """Failed groups beyond completed ones: a few hard prompts are outweighed, a fault is not."""

    def __init__(self, max_failed_groups: int) -> None:
        self._limit = max_failed_groups
        self._excess = 0

    def note_completed(self) -> None:
        """A group is complete."""
        self._excess = max(0, self._excess - 1)

    def note_failed(self, failure: GroupFailure) -> None:
        """A group failed, other than for want of time to grade. Raises TooManyFailures."""
        if failure.reason == CLASSES_NOT_GRADED:
            return
        self._excess += 1
        if self._excess >= self._limit:
            raise TooManyFailures(
                f"{self._excess} groups failed beyond those completed "
                f"(expert.queue.max_failed_groups = {self._limit}); the last one, "
                f"{failure.group.prompt.id!r}, as {failure.reason}: {failure.detail!r}. Look into "
                "the logs of generators, and of verifiers where classes of answers are missing "
                f"({CLASSES_UNGRADABLE})"
            )
