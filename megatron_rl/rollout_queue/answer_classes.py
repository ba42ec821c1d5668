"""Classes of equal answers in a group: asked of a verifier, checked, set. Pure.

Used by the rollout queue's grading (`scoring.py`). Right answers are one class by definition; a
verifier compares the others with each other.
"""

from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.class_messages import NO_ANSWER, ClassDone, ClassRequest
from megatron_rl.protocol.types import ScoreDone, ScoreRequest
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.groups import Group

RIGHT = 0
"""Class of the right answers; the classes of a request come after it."""


def find_without_asking(group: Group) -> bool:
    """Whether a scored group has the classes that it needs; sets them if all answers are right.

    Conversations whose environment decides have no answers to compare.
    """
    if any(scored.rollout.score is not None for scored in group.ordered):
        group.needs_classes = False
    if not group.is_complete and not _to_compare(group):
        group.classes = dict.fromkeys(group.scored, RIGHT)
    return group.is_complete


def class_request(request_id: int, group: Group, reward: RewardConfig) -> ClassRequest:
    """The request for the classes of the answers of a scored group that are not right."""
    prompt = group.prompt
    rollouts = [group.scored[index].rollout for index in _to_compare(group)]
    is_own = ":" in reward.all_tasks[prompt.task].compare
    return ClassRequest(
        request_id,
        prompt.task,
        texts=[rollout.graded_text for rollout in rollouts],
        prompt_tails=[rollout.prompt_tail for rollout in rollouts],
        problem=prompt.question,
        entry=prompt.entry if is_own else "",
    )


def check_answer(
    verifier: str, request: ScoreRequest | ClassRequest, done: ScoreDone | ClassDone
) -> None:
    """Raise WireError for an answer to another question."""
    if isinstance(request, ScoreRequest):
        if isinstance(done, ClassDone):
            raise WireError(f"{verifier} answered a request for a score with classes")
    elif isinstance(done, ScoreDone):
        raise WireError(f"{verifier} answered a request for classes with a score")
    elif len(done.classes) != len(request.texts):
        raise WireError(
            f"{verifier} sent {len(done.classes)} classes of the {len(request.texts)} answers of "
            f"request {done.request_id}"
        )
    elif max(done.classes, default=0) >= len(request.texts):
        text = f"{done.classes!r:.200}"
        raise WireError(f"{verifier} sent classes {text} of request {done.request_id}")


def set_classes(group: Group, found: list[int]) -> None:
    """Set the classes of a group. found: those of its answers that are not right."""
    classes = dict.fromkeys(group.scored, RIGHT)
    for index, one in zip(_to_compare(group), found, strict=True):
        classes[index] = NO_ANSWER if one == NO_ANSWER else RIGHT + 1 + one
    group.classes = classes


def _to_compare(group: Group) -> list[int]:
    """Indices of the completions that are scored and not right."""
    return [index for index in sorted(group.scored) if not group.scored[index].score.is_correct]
