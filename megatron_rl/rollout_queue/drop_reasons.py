"""The table of reasons to drop groups and completions, and the types of failures.

Used by the rollout queue. A failed group is our own fault: `group_end.py` drops and counts it, and
never trains on an invented reward.
"""

from typing import NamedTuple

from megatron_rl.protocol.generator_messages import PROMPT_UNRENDERABLE, RolloutFailed
from megatron_rl.protocol.rollout import no_rollout
from megatron_rl.protocol.types import NOT_GRADED, UNGRADABLE, Rollout
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from megatron_rl.rollout_queue.groups import Group

ZERO_VARIANCE = "zero_variance"
NOT_NEEDED = "not_needed"
ATTEMPTS_EXHAUSTED = "attempts_exhausted"
LOSSES_EXHAUSTED = "losses_exhausted"
CLASSES_UNGRADABLE = "classes_ungradable"
CLASSES_NOT_GRADED = "classes_not_graded"
EVALUATOR_LOST = "evaluator_lost"
EVALUATION_LATE = "evaluation_late"
ENVIRONMENT_FAILED = "environment_failed"

GROUP_REASONS = {
    ZERO_VARIANCE: "all rewards (or verdicts, or returns of replies) of the group are equal",
    ATTEMPTS_EXHAUSTED: "a completion failed expert.queue.max_attempts times",
    LOSSES_EXHAUSTED: "generators lost a completion expert.queue.max_lost_attempts times",
    PROMPT_UNRENDERABLE: "the prompt has no tokens, or leaves no room for a completion",
    UNGRADABLE: "too few completions could be graded, by our own fault",
    NOT_GRADED: "too few completions could be graded in time",
    CLASSES_UNGRADABLE: "no verifier could tell which answers are the same, by our own fault",
    CLASSES_NOT_GRADED: "no verifier had the time to tell which answers are the same",
    NOT_NEEDED: "training ended before a batch took the group",
    EVALUATOR_LOST: "the generators that held the version of the evaluation are gone",
    ENVIRONMENT_FAILED: "environments failed too many conversations of the group",
    EVALUATION_LATE: "expert.eval.timeout_s was over before the group was complete",
}
"""Reason to drop a group -> meaning. A single completion is dropped as UNGRADABLE, NOT_GRADED or
ENVIRONMENT_FAILED, or because it has no place for the reference answer (`GoldAnswer.fault`)."""


class GroupFailure(NamedTuple):
    """A group that is to be dropped."""

    group: Group
    reason: str
    """One of GROUP_REASONS."""
    detail: str


class ScoreFailure(NamedTuple):
    """A completion that cannot be graded, or whose environment failed."""

    group: Group
    rollout: Rollout
    reason: str
    """UNGRADABLE, NOT_GRADED or ENVIRONMENT_FAILED."""
    detail: str
    """The number of tries, and the last error, which may quote the completion."""
    is_late: bool = False
    """Grading took so long that the completion is not replaced."""


def check_reason(generator: str, failure: RolloutFailed) -> None:
    """Raise WireError if the failure asks to drop its group for a reason that there is not."""
    if failure.drop_as and failure.drop_as not in GROUP_REASONS:
        raise WireError(
            f"{generator} wants a group dropped as {failure.drop_as!r}; allowed are "
            f"{sorted(GROUP_REASONS)}"
        )


def lost_conversation(group: Group, failure: RolloutFailed, tries: int) -> ScoreFailure:
    """The end of a completion whose environment failed in every try."""
    why = f"tried {tries} times (expert.queue.max_attempts); last: {failure.reason}"
    nothing = no_rollout(failure.lease_id, failure.index)
    return ScoreFailure(group, nothing, ENVIRONMENT_FAILED, why, is_late=True)


class TooManyFailures(DeadlineExceeded):
    """The number of failures shows that something is broken; the text names the last one."""
