"""Conversations whose environment fails: each is tried again, then lost alone, never a reward.

An environment that is down loses none: its task waits.
"""

import collections
import itertools
from pathlib import Path

import msgspec
import pytest

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import Lease, Rollout, RolloutDone, RolloutFailed, Score
from megatron_rl.rollout_queue.coordinator import PROMPTS
from megatron_rl.rollout_queue.drop_reasons import TooManyFailures
from tests.rollout_queue.played_queue import PlayedQueue

TRIES = 3
SOLVED = Score(1.0, {"environment": 1.0}, "correct")
LOST = Score(0.0, {"environment": 0.0}, "out_of_turns")


class Conversations(PlayedQueue):
    """Environments that fail most tries of the task "game", and no other."""

    works_every = 8
    """Of this number of tries one works. So few failures in a row stop no lease."""

    def __init__(self, folder: Path, **sections: dict) -> None:
        super().__init__(
            folder,
            lambda prompt, index: LOST,
            tasks=("game", "chat"),
            queue={"max_attempts": TRIES},
            reward={"tasks": {name: {"environment": f"games:{name}"} for name in ("game", "chat")}},
            **sections,
        )
        self.tries: collections.Counter[tuple[int, int]] = collections.Counter()
        """By the number of the prompt and the index."""
        self.ended: dict[tuple[int, int], Score] = {}
        self._number = itertools.count()

    def _answer(self, limit: int) -> None:
        self._send()
        for lease, index in self.open:
            self.coordinator.handle(PROMPTS, "g", self._end(lease, index), self.now)
        self.open.clear()
        self._send()

    def _end(self, lease: Lease, index: int) -> RolloutDone | RolloutFailed:
        key = int(lease.prompt.id[1:]), index
        self.tries[key] += 1
        if lease.prompt.task == "game" and self._fails():
            why = "the environment failed: start: no socket"
            return RolloutFailed(lease.lease_id, index, why, fault="start")
        self.ended[key] = SOLVED if index % 2 else LOST
        rollout = self._rollout(lease, index)
        return RolloutDone(msgspec.structs.replace(rollout, score=self.ended[key]))

    def _fails(self) -> bool:
        return bool(next(self._number) % self.works_every)


class Outage(Conversations):
    """The environment of "game" is down for a time, in seconds since the start."""

    def __init__(self, folder: Path, begin: float, end: float) -> None:
        super().__init__(folder, train={"prompts_per_batch": 16})
        self.begin, self.end = self.now + begin, self.now + end
        self.open = []
        self.tried_at: collections.defaultdict[str, list[float]] = collections.defaultdict(list)

    def _end(self, lease: Lease, index: int) -> RolloutDone | RolloutFailed:
        self.tried_at[lease.prompt.task].append(self.now)
        return super()._end(lease, index)

    def _fails(self) -> bool:
        return self.begin <= self.now < self.end


def test_environment_that_is_down_loses_no_completion(tmp_path: Path) -> None:
    queue = Outage(tmp_path, begin=20, end=100)
    queue.start()
    for version in range(1, 5):
        queue.play(60)
        queue.sync(version)
    queue.play(5)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    failed = sum(row.get("activity/attempts_failed/start", 0) for row in rows)
    down = [at for at in queue.tried_at["game"] if queue.begin <= at < queue.end]
    assert failed == len(down)
    # Eight in a row, and what was leased already; then one probe after each pause.
    probes = [at for at in sorted(set(down)) if down.count(at) == 1][-5:]
    assert len(down) < 8 + 8 + 7
    assert [b - a for a, b in itertools.pairwise(probes)] == [4, 8, 16, 32]
    # All four batches are there. No group was dropped before the end, none is short.
    assert len(queue.batches) == 4
    dropped = [line for path in tmp_path.glob("rollouts/dropped_*") for line in read_jsonl(path)]
    assert {line["reason"] for line in dropped} <= {"not_needed"}
    trained = [line for path in tmp_path.glob("rollouts/step_*") for line in read_jsonl(path)]
    sizes = collections.Counter(line["prompt_id"] for line in trained)
    assert len(sizes) == 4 * 16 and set(sizes.values()) == {4}
    # The screen names the task and its environment while it waits.
    texts = [row["activity/diagnosis"] for row in rows if "activity/diagnosis" in row]
    assert any("'game'" in text and "'games:game'" in text for text in texts)


def test_run_ends_if_an_environment_never_works(tmp_path: Path) -> None:
    queue = Outage(tmp_path, begin=0, end=1e9)
    queue.start()
    with pytest.raises(TooManyFailures, match=r"'game' wait.*no socket.*5 more conversations"):
        queue.play(100)
    # 1 + 2 + 4 + 8 + 16 s of pauses.
    assert 31 <= queue.now - 1000 <= 40


def play_steps(queue: Conversations, steps: int) -> None:
    queue.open = []
    queue.start()
    for version in range(1, steps + 1):
        for _ in range(600):
            queue.play(1)
            if len(queue.batches) == version:
                break
        queue.sync(version)
    assert len(queue.batches) == steps and queue.requests == []


def assert_trained_as_played(queue: Conversations, folder: Path) -> None:
    """What is trained has the rewards that its conversations ended with."""
    trained = [line for path in folder.glob("rollouts/step_*") for line in read_jsonl(path)]
    rewards = {(int(line["prompt_id"][1:]), line["index"]): line["reward"] for line in trained}
    assert rewards == {key: queue.ended[key].reward for key in rewards}
    # The groups of the other task are whole, and tried once.
    whole = collections.Counter(key[0] for key in rewards if key[0] % 2)
    assert whole and set(whole.values()) == {4}
    assert {count for key, count in queue.tries.items() if key[0] % 2} == {1}


def test_environment_that_fails_nine_of_ten_tries_is_contained(tmp_path: Path) -> None:
    queue = Conversations(tmp_path)
    queue.works_every = 10
    play_steps(queue, 3)
    assert_trained_as_played(queue, tmp_path)
    game = [count for key, count in queue.tries.items() if not key[0] % 2]
    assert sum(game) > 20 and any(not key[0] % 2 for key in queue.ended)


def test_environment_that_fails_often_loses_its_completions_and_nothing_else(
    tmp_path: Path,
) -> None:
    queue = Conversations(tmp_path)
    play_steps(queue, 3)
    tried = {key for key, count in queue.tries.items() if count == TRIES} - queue.ended.keys()
    assert max(queue.tries.values()) == TRIES
    records = tmp_path / "rollouts"
    dropped = [line for path in records.glob("dropped_*") for line in read_jsonl(path)]
    lost = [line for line in dropped if line["reason"] == "environment_failed"]
    # Lost is what failed in each try, once, without tokens and without a reward. A group with one
    # completion left goes too, under the same reason.
    found = [(int(line["prompt_id"][1:]), line["index"]) for line in lost]
    assert set(found) <= tried and len(found) == len(set(found)) > 12
    assert all((line["tokens"], line["reward"]) == (0, None) for line in lost)
    counted = sum(
        batch.metrics.get("queue/completions_dropped_environment_failed", (0,))[0]
        for batch in queue.batches
    )
    assert 0 < counted <= len(found)
    assert_trained_as_played(queue, tmp_path)


class GradedConversations(PlayedQueue):
    """Conversations of which the verifier grades the last reply."""

    def _rollout(self, lease: Lease, index: int) -> Rollout:
        rollout = super()._rollout(lease, index)
        return msgspec.structs.replace(rollout, text="all turns", to_grade=rollout.text)


def test_last_reply_goes_to_the_verifier_and_the_record_keeps_both(tmp_path: Path) -> None:
    right = Score(1.0, {"format": 0.1, "correct": 0.9}, "correct")
    wrong = Score(0.1, {"format": 0.1, "correct": 0.0}, "wrong_answer")
    queue = GradedConversations(
        tmp_path,
        lambda prompt, index: right if index % 2 else wrong,
        reward={"tasks": {"math": {"environment": "games:solve"}}},
    )
    queue.start()
    queue.play(12)
    [batch] = queue.batches
    trained = [line for path in tmp_path.glob("rollouts/step_*") for line in read_jsonl(path)]
    assert {line["to_grade"] for line in trained} <= set(queue.graded) and len(trained) == 8
    for line in trained:
        assert line["to_grade"] == f"{line['prompt_id']}/{line['index']}"
        assert (line["text"], line["reward"]) == ("all turns", [0.1, 1.0][line["index"] % 2])
        assert "is_outcome" not in line
    # Sums over 8 completions of one reply each, all of them conversations.
    assert batch.metrics["environment/turns"][0] == 8.0
    assert batch.metrics["rollout/correct"][0] == 4.0
