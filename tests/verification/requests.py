"""Rules and score requests for tests, and what a pool answers."""

import time
from multiprocessing.connection import wait
from typing import Any

from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.types import ScoreRequest
from verification.pool.pool import Pool
from verification.pool.worker_pool import Finished
from verification.rules import RewardRules


def make_rules(**reward: Any) -> RewardRules:
    """Rules with a limit of 100 tokens and these keys of the reward section."""
    return RewardRules(reward=RewardConfig(**reward), max_tokens=100)


RULES = make_rules()


def boxed(answer: str) -> str:
    """A well-formed response."""
    return f"<think>Let me see.</think>It is \\boxed{{{answer}}}."


def make_request(text: str, **fields: Any) -> ScoreRequest:
    """A request with the usual values, but for the given fields."""
    usual = {
        "request_id": 1, "task": "math", "answer": "7", "entry": "", "completion_tokens": 10,
        "is_finished": True,
    }  # fmt: skip
    return ScoreRequest(text=text, **usual | fields)


def collect(pool: Pool, limit_s: float, most_held: int = 1000) -> dict[int, Finished]:
    """What is finished by request id, in its order, once nothing is pending.

    most_held: slow answers that the pool may hold at once.
    """
    finished: dict[int, Finished] = {}
    deadline = time.monotonic() + limit_s
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} items are late"
        wait([pool], 0.02)
        finished |= {reply.request_id: reply for reply in pool.collect()}
        assert len(pool.pools["answers"].suspects.processes) <= most_held
    return finished
