"""Users' functions that fork: the value of a child is no verdict, and the log names them."""

import math

import pytest

from megatron_rl.config.reward import (
    ExtraReward,
    RewardConfig,
    TaskConfig,
    VerifierConfig,
    WorkerPoolConfig,
)
from megatron_rl.protocol.types import Score
from tests.verification.requests import boxed
from verification.library import Grading, Sample

MINE = "tests.verification.pool.hostile_tasks"
ONE = VerifierConfig(custom=WorkerPoolConfig(workers=1, timeout_s=20.0))


def graded(name: str, count: int = 6, **reward: object) -> list[Score]:
    """Scores by one grading process, of a user's comparison."""
    tasks = {name: TaskConfig(compare=f"{MINE}:{name}")}
    with Grading(RewardConfig(tasks=tasks, **reward), ONE) as grading:
        samples = [Sample(text=boxed(str(n)), answer="0", task=name) for n in range(count)]
        found = grading.score(samples)
    assert all(isinstance(one, Score) for one in found), found
    return found  # type: ignore[return-value]  # all are scores


@pytest.mark.parametrize("name", ["fork_and_return", "fork_and_raise", "fork_and_await"])
def test_a_child_that_returns_gives_no_verdict_and_is_named_in_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Parents say that the first answer alone is right; children say the contrary at once.
    assert [one.is_correct for one in graded(name)] == [True] + [False] * 5
    told = [line for line in caplog.messages if "forked" in line]
    assert len(told) == 1 and told[0].startswith(f"'{MINE}:{name}' forked and its child returned")
    assert "grading process" not in caplog.text


def test_a_child_of_an_extra_reward_adds_nothing() -> None:
    extra = ExtraReward(name="forks", function=f"{MINE}:half_of_parent", weight=0.5)
    found = graded("obey_quietly", 4, extra=[extra])
    assert all(math.isclose(one.parts["forks"], 0.25) for one in found)


def test_processes_of_multiprocessing_work_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    assert [one.is_correct for one in graded("ask_processes")] == [True] + [False] * 5
    assert "forked" not in caplog.text
