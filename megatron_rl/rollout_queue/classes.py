"""Which answers of a group are the same: what a verifier is asked, and what its answer means.

Used by the rollout queue, for any group with `needs_classes`. All right answers are one class by
definition; the others are compared with each other alone, by the verifier, whose `classes.py` says
how. `Scoring` hands the requests out.
"""

from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.class_messages import NO_ANSWER, ClassDone, ClassRequest
from megatron_rl.protocol.types import NOT_GRADED
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.failures import (
    CLASSES_NOT_GRADED,
    CLASSES_UNGRADABLE,
    GroupFailure,
)  # fmt: skip
from megatron_rl.rollout_queue.groups import Group

RIGHT = 0
"""Class of the right answers; those of a request come after it."""


def find_without_asking(group: Group) -> bool:
    """Whether a scored group has the classes that it needs; notes them where all are right."""
    if not group.is_complete and not _to_compare(group):
        group.classes = dict.fromkeys(group.scored, RIGHT)
    return group.is_complete


def class_request(request_id: int, group: Group, reward: RewardConfig) -> ClassRequest:
    """The question which of a scored group's answers that are not right are the same."""
    prompt = group.prompt
    rollouts = [group.scored[index].rollout for index in _to_compare(group)]
    is_own = ":" in reward.all_tasks[prompt.task].compare
    return ClassRequest(
        request_id,
        prompt.task,
        texts=[rollout.text for rollout in rollouts],
        prompt_tails=[rollout.prompt_tail for rollout in rollouts],
        problem=prompt.question,
        entry=prompt.entry if is_own else "",
    )


def take_classes(verifier: str, group: Group, request: object, done: ClassDone) -> None:
    """Give a group its classes. Raises WireError for an answer to another question."""
    indices = _to_compare(group)
    if not isinstance(request, ClassRequest) or len(done.classes) != len(indices):
        raise WireError(
            f"{verifier} sent {len(done.classes)} classes to {type(request).__name__} "
            f"{done.request_id} about {len(indices)} answers"
        )
    classes = dict.fromkeys(group.scored, RIGHT)
    for index, found in zip(indices, done.classes, strict=True):
        classes[index] = NO_ANSWER if found == NO_ANSWER else RIGHT + 1 + found
    group.classes = classes


def class_failure(group: Group, kind: str, detail: str) -> GroupFailure:
    """Why a group without classes is given up; kind as in ScoreFailed."""
    reason = CLASSES_NOT_GRADED if kind == NOT_GRADED else CLASSES_UNGRADABLE
    return GroupFailure(group, reason, detail)


def _to_compare(group: Group) -> list[int]:
    """Indices of the completions that are scored and not right."""
    return [index for index in sorted(group.scored) if not group.scored[index].score.is_correct]
