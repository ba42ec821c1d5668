"""Only failures to grade across many unrelated prompts stop a run."""

import collections
import hashlib
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import NOT_GRADED, UNGRADABLE, Sampling, Score
from megatron_rl.rollout_queue.circuit_breakers import CircuitBreaker
from megatron_rl.rollout_queue.drop_reasons import ScoreFailure, TooManyFailures
from megatron_rl.rollout_queue.groups import Group
from tests.rollout_queue.makers import RIGHT, make_prompt, make_rollout
from tests.rollout_queue.played_queue import PlayedQueue

WRONG = Score(0.0, {"format": 0.0, "correct": 0.0}, "wrong_answer")
# Six answers for a group: with window 4, share 0.75 and 3 prompts at least.
CONFIG = QueueConfig(breaker_window_groups=4, breaker_share=0.75, breaker_min_prompts=3)


def group_of(number: int, task: str = "math", prompt: int | None = None) -> Group:
    name = f"p{number if prompt is None else prompt}"
    return Group(number, make_prompt(name, task=task), Sampling(8, 1.0), 6, 0)


def lose(breaker: CircuitBreaker, group: Group, times: int, kind: str = UNGRADABLE) -> None:
    for _ in range(times):
        failure = ScoreFailure(group, make_rollout(), kind, "tried 3 times; last: \x1b[31mboom")
        breaker.note_failed(failure, Path("run/rollouts/dropped_000007.jsonl"))


def score(breaker: CircuitBreaker, group: Group, times: int) -> None:
    for _ in range(times):
        breaker.note_scored(group)


def test_prompts_weigh_the_same_however_many_attempts_one_burns() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=100)
    lose(breaker, group_of(0), 1000)
    lose(breaker, group_of(1), 1000)
    for number in (2, 3):
        score(breaker, group_of(number), 1)
    # Half of the prompts; a third one of four is three quarters, but only when it fails whole.
    score(breaker, group_of(4), 1)
    lose(breaker, group_of(4), 9)
    # The window is now 1, 2, 3, 4: (1 + 0 + 0 + 0.9) / 4.
    lose(breaker, group_of(5), 6)
    # 2, 3, 4, 5: 1.9 / 4. Then 3, 4, 5, 6: 2.9 / 4. Then 4, 5, 6, 7: 3.9 / 4.
    lose(breaker, group_of(6), 6)
    with pytest.raises(TooManyFailures):
        lose(breaker, group_of(7), 1)


def test_message_tells_how_many_of_how_many_and_what_to_do() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=100)
    for number in range(2):
        lose(breaker, group_of(number, "code"), 6)
    with pytest.raises(TooManyFailures) as caught:
        lose(breaker, group_of(2, "code"), 1)
    text = str(caught.value)
    assert (
        "task 'code'" in text
        and "13 of 13 failed in the last 3 groups, of 3 different prompts" in text
    )
    assert "expert.queue.breaker_share = 0.75" in text and "breaker_min_prompts = 3" in text
    assert "run/rollouts/dropped_000007.jsonl" in text and "'p2'" in text
    assert "boom" in text and "\x1b" not in text and "megatron-rl doctor" in text


def test_a_few_answers_decide_nothing() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=100)
    # Three prompts, all failed: 5 completions are too few to tell, two for each prompt enough.
    lose(breaker, group_of(0), 2)
    lose(breaker, group_of(1), 2)
    lose(breaker, group_of(2), 1)
    with pytest.raises(TooManyFailures):
        lose(breaker, group_of(2), 1)


def test_many_groups_of_few_prompts_are_few() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=100)
    for number in range(50):
        lose(breaker, group_of(number, prompt=number % 2), 6)
    with pytest.raises(TooManyFailures, match="of 3 different prompts"):
        lose(breaker, group_of(50, prompt=2), 1)


def test_all_prompts_that_there_are_are_enough_when_as_many_groups_fail() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=2)
    for number in range(2):
        lose(breaker, group_of(number, prompt=number), 600)
    with pytest.raises(TooManyFailures, match="of 2 different prompts"):
        lose(breaker, group_of(2, prompt=0), 1)


def test_scores_of_one_task_do_not_hide_that_another_is_broken() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=100)
    score(breaker, group_of(50), 1000)
    with pytest.raises(TooManyFailures, match="task 'code'"):
        for number in range(3):
            score(breaker, group_of(100 + number), 1000)
            lose(breaker, group_of(number, "code"), 6)


def test_broken_pool_is_seen_through_tasks_of_few_prompts_each() -> None:
    tasks = {name: {"format_check": "code", "compare": "code"} for name in ("one", "two", "three")}
    breaker = CircuitBreaker(CONFIG, RewardConfig.model_validate({"tasks": tasks}), prompts=100)
    score(breaker, group_of(50), 1000)
    with pytest.raises(TooManyFailures, match="worker pool 'code'"):
        for number, task in enumerate(tasks):
            lose(breaker, group_of(number, task), 6)


def test_a_host_without_time_stops_no_run() -> None:
    breaker = CircuitBreaker(CONFIG, RewardConfig(), prompts=100)
    for number in range(100):
        lose(breaker, group_of(number, "code"), 6, NOT_GRADED)
    found = breaker.find_trouble()
    assert found is not None and found.kind == "not_graded"
    assert "24 of 24 completions of the last groups of task 'code'" in found.text
    assert "verifier.code.workers" in found.text and "dropped_000007.jsonl" in found.text
    assert "boom" in found.text and "\x1b" not in found.text
    # It is no evidence against a verifier, and none for it.
    with pytest.raises(TooManyFailures, match="13 of 13"):
        for number in range(200, 203):
            lose(breaker, group_of(number, "code"), 6)


def test_few_completions_without_a_grade_are_no_trouble() -> None:
    breaker = CircuitBreaker(QueueConfig(), RewardConfig(), prompts=100)
    for number in range(32):
        score(breaker, group_of(number), 15)
        lose(breaker, group_of(number), 1)
    assert breaker.find_trouble() is None
    for number in range(8):
        lose(breaker, group_of(number), 3, NOT_GRADED)
    # 32 + 24 of 32 x 16 + 24: more than a tenth.
    assert breaker.find_trouble() is not None


def test_window_that_can_never_hold_enough_prompts_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"queue\.breaker_window_groups=8 .* raise"):
        QueueConfig(breaker_window_groups=8, breaker_min_prompts=9)


def play(queue: PlayedQueue, seconds: int, *, steps: int = 0) -> None:
    """Play, and train on each batch at once."""
    queue.start()
    for _ in range(seconds):
        queue.play(1)
        version = len(queue.batches)
        if queue.version < version < steps:
            queue.sync(version)


@pytest.mark.parametrize("group_size", [2, 16, 64])
def test_broken_compiler_stops_a_run_whose_math_is_graded_well(
    tmp_path: Path, group_size: int
) -> None:
    lost: collections.Counter[str] = collections.Counter()

    def judge(prompt: str, index: int) -> Score | str:
        if int(prompt[1:]) % 2:
            lost[prompt] += 1
            return UNGRADABLE
        return WRONG

    queue = PlayedQueue(
        tmp_path,
        judge,
        tasks=("math", "code"),
        queue={"max_attempts": 1},
        train={"group_size": group_size},
    )
    with pytest.raises(TooManyFailures) as caught:
        play(queue, 2000)
    text = str(caught.value)
    assert "task 'code'" in text and "v failed" in text
    told = re.search(r"(\d+) of (\d+) failed in the last (\d+) groups", text)
    assert told is not None
    failed, judged, groups = map(int, told.groups())
    assert failed == judged and 16 <= groups <= 32
    # Soon: not many more prompts are tried than it takes to call them many.
    assert len(lost) <= 32
    path = tmp_path / "rollouts" / "dropped_000000.jsonl"
    assert str(path) in text
    records = [line for line in read_jsonl(path) if line["reward"] is None]
    assert len(records) == failed


def test_a_handful_of_prompts_that_cannot_be_graded_never_stops_a_run(tmp_path: Path) -> None:
    lost: collections.Counter[str] = collections.Counter()

    def judge(prompt: str, index: int) -> Score | str:
        if int(prompt[1:]) % 2 == 0 and int(prompt[1:]) < 24:
            lost[prompt] += 1
            return UNGRADABLE
        return WRONG

    # Each is met again many times; of code, 12 of the 15 prompts there are cannot be graded.
    queue = PlayedQueue(
        tmp_path, judge, train_prompts=30, tasks=("code", "math"), queue={"max_attempts": 2}
    )
    play(queue, 500)
    assert len(lost) == 12 and min(lost.values()) >= 20


def test_trick_that_half_of_all_completions_try_does_not_stop_the_training(tmp_path: Path) -> None:
    tries: collections.Counter[tuple[str, int]] = collections.Counter()

    def judge(prompt: str, index: int) -> Score | str:
        tries[prompt, index] += 1
        # The same on each run: by the digest of which completion of which place it is.
        name = f"{prompt}/{index}/{tries[prompt, index]}".encode()
        if hashlib.sha256(name).digest()[0] < 128:
            return UNGRADABLE
        return RIGHT if index % 2 else WRONG

    queue = PlayedQueue(
        tmp_path, judge, queue={"max_attempts": 1}, train={"steps": 12, "group_size": 8}
    )
    play(queue, 200, steps=12)
    assert [batch.step for batch in queue.batches] == list(range(12))
    lost = sum(batch.metrics["queue/completions_dropped_ungradable"][0] for batch in queue.batches)
    assert lost > 100


def test_run_whose_every_prompt_cannot_be_graded_ends_however_few_they_are(tmp_path: Path) -> None:
    broken = PlayedQueue(tmp_path, lambda prompt, index: UNGRADABLE, train_prompts=3)
    with pytest.raises(TooManyFailures, match="of 3 different prompts"):
        play(broken, 300)
    one_left = PlayedQueue(
        tmp_path,
        lambda prompt, index: WRONG if prompt == "p2" else UNGRADABLE,
        train_prompts=3,
    )
    play(one_left, 300)


def test_overloaded_host_is_told_in_the_rows_with_its_fix(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: NOT_GRADED, queue={"max_attempts": 1})
    play(queue, 120)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    told = [row["activity/diagnosis"] for row in rows if row.get("activity/diagnosis")]
    assert told and all("had no time" in text and "Fix:" in text for text in told)
    assert 2 <= len(told) <= 6
    assert sum(row.get("activity/completions_dropped/not_graded", 0) for row in rows) > 100
