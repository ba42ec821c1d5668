"""Groups that are given up, under which reason, and when that is too much.

Used by the rollout queue. A failed group is ours to answer for: it is dropped and counted, never
trained on with an invented reward.
"""

from typing import NamedTuple

from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.groups import Group

ATTEMPTS_EXHAUSTED = "attempts_exhausted"
"""A completion failed as often as queue.max_attempts allows."""


class GroupFailure(NamedTuple):
    """Why a group is given up."""

    group: Group
    reason: str
    """ATTEMPTS_EXHAUSTED, UNGRADABLE, or what a generator wants it dropped as."""
    detail: str


class TooManyFailures(DeadlineExceeded):
    """So many groups failed that something is broken; the text says what failed last."""


class FailureCount:
    """Failed groups beyond completed ones: a few hard prompts are outweighed, a fault is not."""

    def __init__(self, max_failed_groups: int) -> None:
        self._limit = max_failed_groups
        self._excess = 0

    def note_completed(self) -> None:
        """A group is complete."""
        self._excess = max(0, self._excess - 1)

    def note_failed(self, failure: GroupFailure) -> None:
        """A group failed. Raises TooManyFailures."""
        self._excess += 1
        if self._excess >= self._limit:
            raise TooManyFailures(
                f"{self._excess} groups failed beyond those completed (queue.max_failed_groups = "
                f"{self._limit}); the last one, {failure.group.prompt.id!r}, as {failure.reason}: "
                f"{failure.detail}. Look into the logs of generators and verifiers"
            )
