"""What the queue sends when, without sockets, by a clock that the test moves."""

from pathlib import Path

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    GeneratorReady,
    Lease,
    NextBatch,
    Published,
    RankBatch,
    RolloutDone,
    ScoreDone,
    ScoreRequest,
    VerifierReady,
)  # fmt: skip
from megatron_rl.rollout_queue.coordinator import Coordinator
from tests.rollout_queue.makers import make_rollout, make_score
from tests.rollout_queue.virtual import VERIFIER_ROOM, open_coordinator

TRAIN = {"steps": 4, "groups_per_batch": 2, "group_size": 4}


class Peers:
    """One generator and one verifier, which answer when they are told to."""

    def __init__(self, coordinator: Coordinator, capacity: int) -> None:
        self.coordinator, self.capacity = coordinator, capacity
        self.version = -1
        self.open: list[tuple[Lease, int]] = []
        """Completions leased and not returned."""
        self.batches: list[RankBatch] = []
        self.others: list[object] = []
        """Every other message that the queue sent."""
        coordinator.handle("verify", "v", VerifierReady(VERIFIER_ROOM, session=1), 0.0)

    def publish(self, version: int) -> None:
        self.version = version
        self.announce()
        self.coordinator.handle("batches", "t", Published(version), 0.0)
        self.coordinator.handle("batches", "t", NextBatch(version, 0, 1), 0.0)
        self.pump()

    def announce(self) -> None:
        ready = GeneratorReady(self.capacity, self.version, session=1)
        self.coordinator.handle("prompts", "g", ready, 0.0)

    def pump(self) -> None:
        """Take all that the queue sends; score at once, index 0 of a group best."""
        while sent := list(self.coordinator.outgoing(0.0)):
            for outgoing in sent:
                match outgoing.message:
                    case Lease() as lease:
                        self.open += [(lease, index) for index in lease.indices]
                    case ScoreRequest() as asked:
                        score = make_score(1.0 if asked.text == "0" else 0.0)
                        done = ScoreDone(asked.request_id, score)
                        self.coordinator.handle("verify", "v", done, 0.0)
                    case RankBatch() as batch:
                        self.batches.append(batch)
                    case message:
                        self.others.append(message)

    def split(self, name: str) -> list[tuple[Lease, int]]:
        """Open completions of a split of the prompts."""
        return [(lease, index) for lease, index in self.open if lease.prompt.split == name]

    def finish(self, completions: list[tuple[Lease, int]]) -> None:
        for lease, index in completions:
            self.open.remove((lease, index))
            rollout = make_rollout(
                index, lease_id=lease.lease_id, versions=(self.version,), text=str(index)
            )
            self.coordinator.handle("prompts", "g", RolloutDone(rollout), 0.0)
        self.pump()


def test_training_goes_on_beside_the_tail_of_an_evaluation(tmp_path: Path) -> None:
    with open_coordinator(
        tmp_path, held_out=6, train=TRAIN, queue={"max_staleness": 0, "strict_staleness": True}
    ) as coordinator:
        peers = Peers(coordinator, capacity=8)
        peers.publish(0)
        assert len(peers.split("held_out")) == 6 and len(peers.split("train")) == 2
        peers.finish(peers.split("held_out")[:5])
        # Five slots came free; what admission allows, a batch of 2 x 4 completions, is in them.
        assert len(peers.split("held_out")) == 1 and len(peers.split("train")) == 7
        peers.finish(peers.split("train"))
        peers.finish(peers.split("train"))
        assert len(peers.open) == 1 and peers.batches == []
        # The batch that makes version 1 is ready, and held back until version 0 is measured.
        peers.finish(peers.split("held_out"))
        assert [batch.step for batch in peers.batches] == [0]
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert (row["label"], row["step"], row["eval/n"]) == ("before", 0, 6)
    records = read_jsonl(tmp_path / "rollouts" / "eval_before.jsonl")
    assert [record["versions"] for record in records] == [[0]] * 6


def test_evaluation_comes_before_training_at_each_free_slot(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=6, train=TRAIN) as coordinator:
        peers = Peers(coordinator, capacity=4)
        peers.publish(0)
        assert len(peers.split("held_out")) == 4 and not peers.split("train")
        peers.finish(peers.open[:1])
        assert len(peers.split("held_out")) == 4
        peers.finish(peers.open[:3])
        assert len(peers.split("held_out")) == 2 and len(peers.split("train")) == 2
