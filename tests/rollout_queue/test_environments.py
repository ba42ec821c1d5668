"""Conversations whose environment fails: each is tried again, then lost alone, never a reward."""

import collections
import itertools
from pathlib import Path

import msgspec

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import Lease, Rollout, RolloutDone, RolloutFailed, Score
from megatron_rl.rollout_queue.coordinator import PROMPTS
from tests.rollout_queue.played_queue import PlayedQueue

TRIES = 3
SOLVED = Score(1.0, {"environment": 1.0}, "correct")
LOST = Score(0.0, {"environment": 0.0}, "out_of_turns")


class Conversations(PlayedQueue):
    """Environments that fail 9 of 10 tries of the task "game", and no other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            lambda prompt, index: LOST,
            tasks=("game", "chat"),
            queue={"max_attempts": TRIES},
            reward={"tasks": {name: {"environment": f"games:{name}"} for name in ("game", "chat")}},
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
        if lease.prompt.task == "game" and next(self._number) % 10:
            why = "the environment failed: start: no socket"
            return RolloutFailed(lease.lease_id, index, why, fault="environment")
        self.ended[key] = SOLVED if index % 2 else LOST
        rollout = self._rollout(lease, index)
        return RolloutDone(msgspec.structs.replace(rollout, score=self.ended[key]))


def test_environment_that_fails_nine_of_ten_tries_loses_its_completions_and_nothing_else(
    tmp_path: Path,
) -> None:
    queue = Conversations(tmp_path)
    queue.open = []
    queue.start()
    for version in range(1, 4):
        queue.play(12)
        queue.sync(version)
    assert len(queue.batches) == 3 and queue.requests == []
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
    # What is trained has the rewards that its conversations ended with.
    trained = [line for path in records.glob("step_*") for line in read_jsonl(path)]
    rewards = {(int(line["prompt_id"][1:]), line["index"]): line["reward"] for line in trained}
    assert rewards == {key: queue.ended[key].reward for key in rewards}
    # The groups of the other task are whole, and tried once.
    whole = collections.Counter(key[0] for key in rewards if key[0] % 2)
    assert whole and set(whole.values()) == {4}
    assert {count for key, count in queue.tries.items() if key[0] % 2} == {1}


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
