"""The table of reasons to drop groups and completions, and the types of failures.

Used by the rollout queue. A failed group is our own fault: `group_end.py` drops and counts it, and
never trains on an invented reward.
"""

from typing import NamedTuple

from megatron_rl.protocol.generator_messages import PROMPT_UNRENDERABLE
from megatron_rl.protocol.types import NOT_GRADED, UNGRADABLE, Rollout
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.groups import Group

ZERO_VARIANCE = "zero_variance"
NOT_NEEDED = "not_needed"
ATTEMPTS_EXHAUSTED = "attempts_exhausted"
LOSSES_EXHAUSTED = "losses_exhausted"
CLASSES_UNGRADABLE = "classes_ungradable"
CLASSES_NOT_GRADED = "classes_not_graded"
EVALUATOR_LOST = "evaluator_lost"
EVALUATION_LATE = "evaluation_late"

GROUP_REASONS = {
    ZERO_VARIANCE: "all rewards (or verdicts) of the group are equal",
    ATTEMPTS_EXHAUSTED: "a completion failed expert.queue.max_attempts times",
    LOSSES_EXHAUSTED: "generators lost a completion expert.queue.max_lost_attempts times",
    PROMPT_UNRENDERABLE: "the prompt has no tokens, or leaves no room for a completion",
    UNGRADABLE: "too few completions could be graded, by our own fault",
    NOT_GRADED: "too few completions could be graded in time",
    CLASSES_UNGRADABLE: "no verifier could tell which answers are the same, by our own fault",
    CLASSES_NOT_GRADED: "no verifier had the time to tell which answers are the same",
    NOT_NEEDED: "training ended before a batch took the group",
    EVALUATOR_LOST: "the generators that held the version of the evaluation are gone",
    EVALUATION_LATE: "expert.eval.timeout_s was over before the group was complete",
}
"""Reason to drop a group -> meaning. A single completion is dropped as UNGRADABLE or NOT_GRADED, or
because it has no place for the reference answer (`GoldAnswer.fault`)."""


class GroupFailure(NamedTuple):
    """A group that is to be dropped."""

    group: Group
    reason: str
    """One of GROUP_REASONS."""
    detail: str


class ScoreFailure(NamedTuple):
    """A completion that cannot be graded."""

    group: Group
    rollout: Rollout
    reason: str
    """UNGRADABLE or NOT_GRADED."""
    detail: str
    """The number of tries, and the last error, which may quote the completion."""
    is_late: bool = False
    """Grading took so long that the completion is not replaced."""


class TooManyFailures(DeadlineExceeded):
    """The number of failures shows that something is broken; the text names the last one."""
