"""Signs of life between steps: rows of bounded rate, and the likely fault within 30 s."""

from pathlib import Path

import pytest

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import Score
from tests.rollout_queue.played_queue import PlayedQueue

FORMAT_FAILURE = Score(0.0, {"format": 0.0, "correct": 0.0}, "no_think_start")


def activity_rows(folder: Path) -> list[dict]:
    rows = read_jsonl(folder / "metrics.jsonl")
    return [row for row in rows if any(name.startswith("activity/") for name in row)]


def total(rows: list[dict], name: str) -> float:
    return sum(row.get(f"activity/{name}", 0) for row in rows)


@pytest.mark.parametrize("is_slow", [False, True])
def test_reasons_and_fix_are_told_within_30_s_of_the_first_rollout(
    tmp_path: Path, is_slow: bool
) -> None:
    # A group of 64 at one completion a second is not complete within 30 s.
    queue = PlayedQueue(
        tmp_path, lambda prompt, index: FORMAT_FAILURE,
        train={"group_size": 64 if is_slow else 4},
    )  # fmt: skip
    queue.start()
    queue.play(30, is_slow=is_slow)
    rows = activity_rows(tmp_path)
    told = [row["activity/diagnosis"] for row in rows if row.get("activity/diagnosis")]
    assert "no_think_start" in told[0] and "reward.tasks.math" in told[0]
    assert "render.system_prompt" in told[0] and "sft.steps" in told[0]
    assert "One begins: 'p" in told[0]
    # Said again only when there is four times the evidence.
    assert len(told) <= 3


def test_rows_have_a_bounded_rate_and_count_each_event_once(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: FORMAT_FAILURE)
    queue.start()
    queue.play(1)
    [first] = activity_rows(tmp_path)
    assert first["activity/rollouts_scored"] > 0
    queue.play(60)
    list(queue.coordinator.farewell(queue.now))
    rows = activity_rows(tmp_path)
    assert 10 <= len(rows) <= 14
    scored = total(rows, "rollouts_scored")
    assert (
        scored == total(rows, "rollouts_generated") == total(rows, "format_failures/no_think_start")
    )
    assert total(rows, "tokens") == 3 * scored
    records = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    assert (
        total(rows, "groups_dropped/zero_variance")
        == total(rows, "groups_complete")
        == len(records) / 4
    )


@pytest.mark.parametrize(("reward", "said"), [(0.0, "too hard"), (0.25, "equal rewards inside")])
def test_rewards_of_an_environment_are_no_sign_of_hard_prompts(
    tmp_path: Path, reward: float, said: str
) -> None:
    """It names no completion correct, and gives all replies to a prompt the same reward."""
    score = Score(reward, {"environment": reward}, "worse", is_outcome=True)
    queue = PlayedQueue(tmp_path, lambda prompt, index: score)
    queue.start()
    queue.play(30)
    rows = activity_rows(tmp_path)
    [first, *_] = [row["activity/diagnosis"] for row in rows if row.get("activity/diagnosis")]
    assert said in first and "worse" in first


def test_silent_queue_writes_no_rows(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: FORMAT_FAILURE)
    for _ in range(20):
        queue.now += 1
        queue.coordinator.tick(queue.now)
    assert activity_rows(tmp_path) == []
