"""Rules and score requests for tests."""

from typing import Any

from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.types import ScoreRequest
from verification.rules import RewardRules


def make_rules(**reward: Any) -> RewardRules:
    """Rules with a limit of 100 tokens and these keys of the reward section."""
    return RewardRules(reward=RewardConfig(**reward), max_tokens=100)


RULES = make_rules()


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
    problem: str = "",
    language: str = "",
    seed: int = 0,
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
        problem=problem,
        language=language,
        seed=seed,
    )
