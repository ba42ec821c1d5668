"""Score requests for tests."""

from megatron_rl.protocol.types import ScoreRequest
from verification.score import RewardRules

RULES = RewardRules(correct_reward=0.9, format_reward=0.1, max_tokens=100, margin_tokens=0)


def boxed(answer: str) -> str:
    """A well-formed response."""
    return f"<think>Let me see.</think>It is \\boxed{{{answer}}}."


def make_request(
    text: str,
    *,
    task: str = "math",
    answer: str = "7",
    entry: str = "",
    request_id: int = 1,
    completion_tokens: int = 10,
    is_finished: bool = True,
) -> ScoreRequest:
    """A request with the usual values."""
    return ScoreRequest(
        request_id=request_id,
        task=task,
        answer=answer,
        entry=entry,
        text=text,
        completion_tokens=completion_tokens,
        is_finished=is_finished,
    )
