"""Small records for the tests of the rollout queue."""

from typing import Any

import numpy as np

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import (
    ChatMessage,
    Prompt,
    RankBatch,
    Rollout,
    Sampling,
    Score,
    ScoredRollout,
    ScoreFailed,
    VerifierReady,
    VersionSpan,
)  # fmt: skip
from megatron_rl.rollout_queue.batches import deal_batch, order_batch
from megatron_rl.rollout_queue.groups import DroppedGroups, Group, Origin
from megatron_rl.rollout_queue.scoring import Scoring

RIGHT = Score(1.0, {"format": 0.1, "correct": 0.9}, "correct")
WRONG = Score(0.1, {"format": 0.1, "correct": 0.0}, "wrong_answer")
FORMAT_FAILURE = Score(0.0, {"format": 0.0, "correct": 0.0}, "no_boxed")


def mixed(prompt: str, index: int) -> Score:
    """One right, two wrong, one without an answer."""
    return [RIGHT, WRONG, WRONG, FORMAT_FAILURE][index]


def make_prompt(
    name: str = "p", *, task: str = "math", answer: str = "1", split: str = "train"
) -> Prompt:
    return Prompt(name, task, [ChatMessage("user", f"question {name}")], answer, split)


def make_rollout(
    index: int = 0,
    *,
    lease_id: int = 0,
    tokens: int = 3,
    prompt_tokens: int = 2,
    versions: tuple[int, ...] = (0,),
    text: str = "text",
    finish_reason: str = "stop",
) -> Rollout:
    """The first versions have one token each, the last one the rest."""
    edges = [*range(len(versions)), tokens]
    spans = [VersionSpan(v, edges[i], edges[i + 1]) for i, v in enumerate(versions)]
    return Rollout(
        lease_id,
        index,
        np.arange(prompt_tokens, dtype=np.int32),
        np.arange(100, 100 + tokens, dtype=np.int32),
        np.full(tokens, -0.5, dtype=np.float32),
        spans,
        finish_reason,
        text,
    )


def make_score(reward: float) -> Score:
    is_correct = reward > 0.5
    return Score(reward, {"format": 0.1}, "correct" if is_correct else "wrong_answer")


def make_group(
    number: int,
    rewards: list[float],
    *,
    tokens: list[int] | None = None,
    opened_version: int = 0,
    versions: tuple[int, ...] = (0,),
    prompt_tokens: int = 2,
) -> Group:
    """A complete group."""
    group = Group(number, make_prompt(f"p{number}"), Sampling(8, 1.0), len(rewards), opened_version)
    for index, reward in enumerate(rewards):
        length = tokens[index] if tokens else 3
        rollout = make_rollout(index, tokens=length, prompt_tokens=prompt_tokens, versions=versions)
        group.origins[index] = Origin("generator-0", leased_at=1.0, done_at=2.0)
        group.add(ScoredRollout(rollout, make_score(reward)), now=3.0)
    return group


def form_batch(step: int, groups: list[Group], stage: Config, **known: Any) -> list[RankBatch]:
    """The shares of one rank, unless more are `known`."""
    functions = find_advantage_functions(stage.algorithm)
    given = {"dropped": DroppedGroups(), "dp_size": 1} | known
    return deal_batch(
        order_batch(step, groups, stage=stage, advantage_functions=functions, **given)
    )


def lose_request(scoring: Scoring, request_id: int, how: str) -> None:
    """What the verifier "v" has been asked at 0 s is lost by 16 s, in one of five ways."""
    if how == "restart":
        scoring.announce("v", VerifierReady({"answers": 4}, session=2), 1.0)
    elif how == "failure":
        scoring.take_failure("v", ScoreFailed(request_id, "pool died"), 1.0)
    elif how == "unreachable":
        scoring.drop_verifier("v")
    else:
        if how == "timeout":
            scoring.announce("v", VerifierReady({"answers": 4}, session=1), 14.0)
        scoring.expire(16.0)
