"""What the queue sends when, without sockets, by a clock that the test moves."""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.protocol.generator_messages import PROMPT_UNRENDERABLE
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import (
    Cancel,
    GeneratorReady,
    Lease,
    NextBatch,
    RankBatch,
    RolloutDone,
    RolloutFailed,
    SaveState,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
    Stop,
    VerifierReady,
    WeightsSynced,
)  # fmt: skip
from megatron_rl.rollout_queue.circuit_breakers import FailureCount
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.drop_reasons import GroupFailure, TooManyFailures
from tests.rollout_queue.makers import make_group, make_rollout, make_score
from tests.rollout_queue.virtual import VERIFIER_ROOM, open_coordinator

TRAIN = {"steps": 4, "prompts_per_batch": 2, "group_size": 4}


def _is_of(item: tuple[Lease, int], lease_id: int) -> bool:
    return item[0].lease_id == lease_id


class Peers:
    """One generator and one verifier, which answer when they are told to."""

    def __init__(self, coordinator: Coordinator, capacity: int) -> None:
        self.coordinator, self.capacity = coordinator, capacity
        self.version = -1
        self.open: list[tuple[Lease, int]] = []
        """Completions leased and not returned."""
        self.cancelled: list[tuple[Lease, int]] = []
        self.batches: list[RankBatch] = []
        self.others: list[object] = []
        """Every other message that the queue sent."""
        coordinator.handle("verify", "v", VerifierReady(VERIFIER_ROOM, session=1), 0.0)

    def sync(self, version: int) -> None:
        self.version = version
        self.announce()
        self.coordinator.handle("batches", "t", WeightsSynced(version), 0.0)
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
                    case Cancel(lease_id):
                        self.cancelled += [item for item in self.open if _is_of(item, lease_id)]
                        self.open = [item for item in self.open if not _is_of(item, lease_id)]
                    case message:
                        self.others.append(message)

    def split(self, name: str) -> list[tuple[Lease, int]]:
        """Open completions of a split of the prompts."""
        return [(lease, index) for lease, index in self.open if lease.prompt.split == name]

    def fail(self, lease: Lease, index: int, drop_as: str = "") -> None:
        self.open.remove((lease, index))
        failure = RolloutFailed(lease.lease_id, index, "too slow", drop_as)
        self.coordinator.handle("prompts", "g", failure, 0.0)
        self.pump()

    def finish(self, completions: list[tuple[Lease, int]]) -> None:
        for lease, index in completions:
            self.open.remove((lease, index))
            rollout = make_rollout(
                index, lease_id=lease.lease_id, versions=(self.version,), text=str(index)
            )
            self.coordinator.handle("prompts", "g", RolloutDone(rollout), 0.0)
        self.pump()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows but those about who is there."""
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "peers/missing" not in row]


def test_training_goes_on_beside_the_tail_of_an_evaluation(tmp_path: Path) -> None:
    with open_coordinator(
        tmp_path, held_out=6, train=TRAIN, queue={"max_staleness": 0, "strict_staleness": True}
    ) as coordinator:
        peers = Peers(coordinator, capacity=8)
        peers.sync(0)
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
    [row] = rows_of(tmp_path)
    assert (row["label"], row["step"], row["eval/n"]) == ("before", 0, 6)
    records = read_jsonl(tmp_path / "rollouts" / "eval_before.jsonl")
    assert [record["versions"] for record in records] == [[0]] * 6


def test_evaluation_comes_before_training_at_each_free_slot(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=6, train=TRAIN) as coordinator:
        peers = Peers(coordinator, capacity=4)
        peers.sync(0)
        assert len(peers.split("held_out")) == 4 and not peers.split("train")
        peers.finish(peers.open[:1])
        assert len(peers.split("held_out")) == 4
        peers.finish(peers.open[:3])
        assert len(peers.split("held_out")) == 2 and len(peers.split("train")) == 2


def test_group_whose_completion_fails_for_good_is_dropped_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    train = {"steps": 1, "prompts_per_batch": 2, "group_size": 4}
    queue = {"max_staleness": 0, "max_attempts": 3}
    with open_coordinator(tmp_path, train=train, queue=queue) as coordinator:
        peers = Peers(coordinator, capacity=8)
        peers.sync(0)
        prompts = sorted({lease.prompt.id for lease, _ in peers.open})
        assert len(prompts) == 2 and len(peers.open) == 8
        lost = peers.open[0][0].prompt.id
        for _ in range(3):
            # Tried again in the slot that it leaves.
            [slow] = [(le, i) for le, i in peers.open if (le.prompt.id, i) == (lost, 0)]
            peers.fail(*slow)
        assert [(lease.prompt.id, index) for lease, index in peers.cancelled] == [
            (lost, 1), (lost, 2), (lost, 3),
        ]  # fmt: skip
        # Its place in admission is free: another group was opened, in its slots.
        assert len(peers.open) == 8 and lost not in {le.prompt.id for le, _ in peers.open}
        peers.finish(list(peers.open))
        assert [batch.step for batch in peers.batches] == [0]
        coordinator.handle("batches", "t", SaveState(1), 0.0)
        peers.pump()
        [state] = [message for message in peers.others if isinstance(message, QueueState)]
        # Not generated again when the run is resumed.
        assert (state.groups_opened, state.unfinished) == (3, [])
        # A restarted trainer repeats the step, and saves the same state.
        coordinator.handle("batches", "t", SaveState(1), 0.0)
        peers.pump()
        assert [message for message in peers.others if isinstance(message, QueueState)] == [
            state, state,
        ]  # fmt: skip
        assert peers.batches[0].metrics["queue/groups_dropped_attempts_exhausted"][0] == 1


def test_prompt_that_cannot_be_rendered_is_dropped_at_once(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, train=TRAIN, queue={"max_staleness": 0}) as coordinator:
        peers = Peers(coordinator, capacity=4)
        peers.sync(0)
        long = peers.open[0][0].prompt.id
        peers.fail(*peers.open[0], drop_as=PROMPT_UNRENDERABLE)
        assert long not in {lease.prompt.id for lease, _ in peers.open} and len(peers.open) == 4
        coordinator.tick(1.0)
    [row] = rows_of(tmp_path)
    assert row["activity/groups_dropped/prompt_unrenderable"] == 1


def test_group_of_which_a_completion_cannot_be_graded_is_dropped_where_all_are_needed(
    tmp_path: Path,
) -> None:
    queue = {"max_staleness": 0, "max_attempts": 1, "max_replacements": 0, "min_group_share": 1.0}
    with open_coordinator(tmp_path, train=TRAIN, queue=queue) as coordinator:
        peers = Peers(coordinator, capacity=4)
        peers.sync(0)
        lease, index = peers.open.pop(0)
        rollout = RolloutDone(make_rollout(index, lease_id=lease.lease_id))
        coordinator.handle("prompts", "g", rollout, 0.0)
        sent = [outgoing.message for outgoing in coordinator.outgoing(0.0)]
        [asked] = [message for message in sent if isinstance(message, ScoreRequest)]
        coordinator.handle("verify", "v", ScoreFailed(asked.request_id, "pool died"), 0.0)
        peers.pump()
        assert len(peers.cancelled) == 3
        coordinator.tick(1.0)
    [row] = rows_of(tmp_path)
    assert row["activity/groups_dropped/ungradable"] == 1
    assert row["activity/completions_dropped/ungradable"] == 1


def test_evaluation_ends_without_the_prompts_that_failed_and_says_how_many(tmp_path: Path) -> None:
    queue = {"max_attempts": 1}
    with open_coordinator(tmp_path, held_out=4, train=TRAIN, queue=queue) as coordinator:
        peers = Peers(coordinator, capacity=4)
        peers.sync(0)
        peers.fail(*peers.open[0])
        peers.finish(peers.split("held_out"))
    [row] = rows_of(tmp_path)
    assert (row["label"], row["eval/n"], row["eval/lost"]) == ("before", 3, 1)


def test_evaluation_that_lost_all_its_prompts_ends_the_run(tmp_path: Path) -> None:
    queue = {"max_attempts": 1}
    with open_coordinator(tmp_path, held_out=2, train=TRAIN, queue=queue) as coordinator:
        peers = Peers(coordinator, capacity=2)
        peers.sync(0)
        peers.fail(*peers.open[0])
        with pytest.raises(TooManyFailures, match="'before' lost all its 2 prompts"):
            peers.fail(*peers.open[0])


def test_broken_engine_ends_the_run_and_says_why(tmp_path: Path) -> None:
    queue = {"max_attempts": 2, "max_failed_groups": 2}
    with open_coordinator(tmp_path, train=TRAIN, queue=queue) as coordinator:
        peers = Peers(coordinator, capacity=4)
        peers.sync(0)
        said = "2 groups failed .*attempts_exhausted.*too slow"
        failed = 0
        with pytest.raises(TooManyFailures, match=said):
            while failed < 100:
                failed += 1
                # Always the same one of its group: the engine itself is not suspected.
                peers.fail(*min(peers.open, key=lambda item: (item[0].prompt.id, item[1])))
    # Each of two groups: its first completion twice.
    assert failed == 2 * 2


def test_run_with_some_hard_prompts_goes_on() -> None:
    count = FailureCount(max_failed_groups=3)
    failure = GroupFailure(make_group(0, [0.0]), "attempts_exhausted", "too slow")
    for _ in range(50):
        count.note_failed(failure)
        count.note_failed(failure)
        count.note_completed()
        count.note_completed()
    count.note_failed(failure)
    count.note_failed(failure)
    with pytest.raises(TooManyFailures):
        count.note_failed(failure)


def test_leases_left_when_training_ends_are_cancelled(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=2, train=TRAIN | {"steps": 1}) as coordinator:
        peers = Peers(coordinator, capacity=24)
        peers.sync(0)
        peers.finish(peers.split("held_out"))
        left = len(peers.split("train"))
        peers.version = 1
        coordinator._leases.limits.note_version(1)
        peers.announce()
        coordinator.handle("batches", "t", WeightsSynced(1, is_final=True), 0.0)
        peers.pump()
        # The last evaluation has all slots.
        assert len(peers.cancelled) == left > 0
        assert len(peers.split("held_out")) == 2 and not peers.split("train")


def test_a_fenced_generator_keeps_its_leases_for_a_weight_sync_and_a_half(tmp_path: Path) -> None:
    queue = {"max_staleness": 1, "heartbeat_timeout_s": 10.0, "lease_timeout_s": 600.0}
    with open_coordinator(tmp_path, train=TRAIN, queue=queue) as coordinator:
        # 40 s lie between two weight syncs, so the grace is 60 s.
        coordinator._leases.limits.note_version(1)
        for version, now in ((0, 0.0), (1, 40.0)):
            coordinator.handle("batches", "t", WeightsSynced(version), now)
            coordinator.handle("prompts", "g", GeneratorReady(4, version, session=1), now)
        sent = [outgoing.message for outgoing in coordinator.outgoing(40.0)]
        leased = {message.lease_id for message in sent if isinstance(message, Lease)}
        assert leased
        cancelled = {}
        for now in range(42, 112, 2):
            coordinator.handle("prompts", "g", GeneratorReady(4, -1, session=1), float(now))
            coordinator.tick(float(now))
            for outgoing in coordinator.outgoing(float(now)):
                if isinstance(outgoing.message, Cancel):
                    cancelled[outgoing.message.lease_id] = now
    # Fenced at 42 s: the first look beyond 102 s.
    assert cancelled == dict.fromkeys(leased, 104)


def test_a_weight_sync_that_a_later_one_overtook_does_not_set_the_version_back(
    tmp_path: Path,
) -> None:
    with open_coordinator(tmp_path, train=TRAIN) as coordinator:
        coordinator._leases.limits.note_version(2)
        for version, now in ((0, 0.0), (2, 40.0)):
            coordinator.handle("batches", "t", WeightsSynced(version), now)
        before = (coordinator._synced, coordinator._presence._synced_at)
        coordinator.handle("batches", "t", WeightsSynced(1), 50.0)
        assert (coordinator._synced, coordinator._presence._synced_at) == before == (2, 40.0)


def test_a_queue_that_is_asked_to_stop_deals_the_built_batch_and_no_other(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, train=TRAIN) as coordinator:
        peers = Peers(coordinator, capacity=24)
        peers.sync(0)
        peers.finish(peers.split("train"))
        assert [batch.step for batch in peers.batches] == [0]
        open_before = list(peers.open)
        coordinator.stop_training()
        # The answer may have been lost: a built batch is trained on.
        coordinator.handle("batches", "t", NextBatch(0, 0, 1), 0.0)
        peers.pump()
        assert peers.batches[-1].step == 0 and len(peers.batches) == 2
        peers.finish(open_before)
        peers.sync(1)
        assert [m.reason for m in peers.others if isinstance(m, Stop)] == [
            "the run is asked to stop"
        ]
        assert len(peers.batches) == 2 and not peers.open
        coordinator.handle("batches", "t", SaveState(1), 0.0)
        peers.pump()
        (state,) = [m for m in peers.others if isinstance(m, QueueState)]
        # The groups of the next batch are complete, and are sampled again by the resumed run.
        assert state.step == 1 and len(state.unfinished) >= 2
        assert not coordinator.is_over


def test_a_queue_that_has_finished_training_cannot_be_asked_to_stop(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=2, train=TRAIN | {"steps": 1}) as coordinator:
        peers = Peers(coordinator, capacity=24)
        peers.version = 1
        coordinator._leases.limits.note_version(1)
        coordinator.handle("batches", "t", WeightsSynced(0), 0.0)
        coordinator.handle("batches", "t", WeightsSynced(1, is_final=True), 0.0)
        coordinator.stop_training()
        peers.announce()
        peers.pump()
        assert len(peers.split("held_out")) == 2


def test_a_stop_after_the_last_batch_leaves_the_last_evaluation(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=2, train=TRAIN | {"steps": 1}) as coordinator:
        peers = Peers(coordinator, capacity=24)
        peers.sync(0)
        peers.finish(peers.split("held_out"))
        peers.finish(peers.split("train"))
        assert [batch.step for batch in peers.batches] == [0]
        coordinator.stop_training()
        peers.version = 1
        peers.announce()
        coordinator.handle("batches", "t", WeightsSynced(1, is_final=True), 0.0)
        peers.pump()
        assert len(peers.split("held_out")) == 2
