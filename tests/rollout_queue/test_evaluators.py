"""Evaluation beside training: some generators keep the version that is measured."""

from pathlib import Path

import msgspec
import pytest

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.queue_state import QueueState, UnfinishedEvaluation
from megatron_rl.protocol.types import (
    GeneratorReady,
    Hold,
    Lease,
    NextBatch,
    RankBatch,
    RolloutDone,
    SaveState,
    ScoreDone,
    ScoreRequest,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.running_evaluation import Evaluators
from tests.rollout_queue.makers import make_rollout, make_score
from tests.rollout_queue.virtual import VERIFIER_ROOM, open_coordinator

TRAIN = {"steps": 4, "prompts_per_batch": 2, "group_size": 4}


class Pair:
    """Generators a and b with room for 4 each, which do as they are told; scores come at once."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.now = 0.0
        self.versions, self.held = {"a": 0, "b": 0}, {"a": False, "b": False}
        self.open: list[tuple[str, Lease, int]] = []
        self.batches: list[int] = []
        self.states: list[QueueState] = []
        self.verify()

    def verify(self) -> None:
        ready = VerifierReady(VERIFIER_ROOM, session=1)
        self.coordinator.handle("verify", "v", ready, self.now)

    def announce(self, name: str, session: int = 1) -> None:
        ready = GeneratorReady(4, self.versions[name], session, self.held[name])
        self.coordinator.handle("prompts", name, ready, self.now)

    def sync(self, version: int, *, is_final: bool = False) -> None:
        """As the syncer does it: held generators are passed by."""
        for name in self.versions:
            if not self.held[name]:
                self.versions[name] = version
            self.announce(name)
        self.coordinator.handle("batches", "t", WeightsSynced(version, is_final), self.now)
        self.coordinator.handle("batches", "t", NextBatch(version, 0, 1), self.now)
        self.pump()

    def pump(self, *, obeys: bool = True) -> None:
        while sent := list(self.coordinator.outgoing(self.now)):
            for _, peer, message in sent:
                match message:
                    case Lease() as lease:
                        self.open += [(peer, lease, index) for index in lease.indices]
                    case ScoreRequest() as asked:
                        score = make_score(1.0 if asked.text == "0" else 0.0)
                        done = ScoreDone(asked.request_id, score)
                        self.coordinator.handle("verify", "v", done, self.now)
                    case RankBatch() as batch:
                        self.batches.append(batch.step)
                    case QueueState() as state:
                        # As a checkpoint holds it.
                        text = msgspec.json.encode(state)
                        self.states.append(msgspec.json.decode(text, type=QueueState))
                    case Hold(is_held) if obeys:
                        self.held[peer] = is_held
                        self.announce(peer)

    def finish(self, split: str, count: int = 100, *, version: int | None = None) -> int:
        """Return completions of a split; version: of their tokens, if not their generator's."""
        done = [item for item in self.open if item[1].prompt.split == split][:count]
        for item in done:
            self.open.remove(item)
            name, lease, index = item
            sampled = self.versions[name] if version is None else version
            rollout = make_rollout(
                index, lease_id=lease.lease_id, versions=(sampled,), text=str(index)
            )
            self.coordinator.handle("prompts", name, RolloutDone(rollout), self.now)
        self.pump()
        return len(done)

    def of(self, split: str) -> set[str]:
        """Who generates completions of a split."""
        return {name for name, lease, _ in self.open if lease.prompt.split == split}


BESIDE = {"train": TRAIN, "generator": {"replicas": 2}, "queue": {"max_staleness": 1}}


def test_training_leases_never_stop_beside_an_evaluation_of_one_version(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=6, **BESIDE) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        assert pair.held == {"a": False, "b": True}
        assert pair.of("held_out") == {"b"} and pair.of("train") == {"a"}
        # Three versions come out while the evaluation has not returned a single completion.
        for step in range(3):
            while pair.batches != list(range(step + 1)):
                assert pair.finish("train") > 0, "training has no lease"
            pair.sync(step + 1)
            assert pair.versions == {"a": step + 1, "b": 0} and pair.of("train") == {"a"}
        while pair.finish("held_out"):
            assert pair.of("held_out") <= {"b"} and pair.of("train") == {"a"}
        # Let go, it trains again once it has got the version of now.
        assert pair.held == {"a": False, "b": False} and pair.of("train") == {"a"}
        pair.versions["b"] = 3
        pair.announce("b")
        pair.pump()
        assert pair.of("train") == {"a", "b"}
    [row] = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "label" in row]
    assert (row["label"], row["step"], row["eval/n"], row["eval/lost"]) == ("before", 0, 6, 0)
    records = read_jsonl(tmp_path / "rollouts" / "eval_before.jsonl")
    assert [record["versions"] for record in records] == [[0]] * 6


def test_all_sets_of_a_version_are_measured_while_training_goes_on(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=2, sets=("one", "two"), **BESIDE) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        for step in range(3):
            while pair.batches != list(range(step + 1)):
                assert pair.finish("train") > 0, "training has no lease"
            pair.sync(step + 1)
            # One set a version: held-out prompts, then each set by name.
            assert pair.finish("held_out") > 0 and pair.versions["b"] == 0
        assert pair.held == {"a": False, "b": False}
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "label" in row]
    assert [(row["label"], row["step"], row["eval/n"]) for row in rows] == [
        ("before", 0, 2), ("before.one", 0, 1), ("before.two", 0, 1),
    ]  # fmt: skip


def test_no_version_comes_before_the_evaluator_holds_its_own(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=2, **BESIDE) as coordinator:
        pair = Pair(coordinator)
        for name in pair.versions:
            pair.announce(name)
        coordinator.handle("batches", "t", WeightsSynced(0), 0.0)
        coordinator.handle("batches", "t", NextBatch(0, 0, 1), 0.0)
        pair.pump(obeys=False)
        done = [item for item in pair.open if item[1].prompt.split == "train"]
        for _ in range(4):
            for name, lease, index in done:
                pair.open.remove((name, lease, index))
                rollout = make_rollout(
                    index, lease_id=lease.lease_id, versions=(0,), text=str(index)
                )
                coordinator.handle("prompts", name, RolloutDone(rollout), 0.0)
            pair.pump(obeys=False)
            done = [item for item in pair.open if item[1].prompt.split == "train"]
        assert pair.batches == [] and pair.of("held_out") == {"b"}
        pair.held["b"] = True
        pair.announce("b")
        pair.pump()
        assert pair.batches == [0]


def test_tokens_of_another_version_do_not_count_in_an_evaluation(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, held_out=1, **BESIDE) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        coordinator._leases.limits.note_version(1)
        assert pair.finish("held_out", 1, version=1) == 1
        assert len([item for item in pair.open if item[1].prompt.split == "held_out"]) == 1
        pair.finish("held_out")
    [record] = read_jsonl(tmp_path / "rollouts" / "eval_before.jsonl")
    assert record["versions"] == [0]


@pytest.mark.parametrize("has_moved_on", [False, True])
def test_an_evaluator_that_is_lost_is_replaced_or_what_it_owed_is_counted(
    tmp_path: Path, *, has_moved_on: bool
) -> None:
    with open_coordinator(tmp_path, held_out=6, **BESIDE) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        assert pair.finish("held_out", 3) == 3
        if has_moved_on:
            while pair.batches != [0]:
                assert pair.finish("train") > 0
            pair.sync(1)
        pair.held["b"] = False
        pair.versions["b"] = -1
        pair.announce("b", session=2)
        pair.open = [item for item in pair.open if item[0] != "b"]
        pair.pump()
        if not has_moved_on:
            # Nothing newer is out: the other generator measures the same version.
            while pair.finish("held_out") or pair.finish("train"):
                pass
    [row] = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "label" in row]
    counts = (3, 3) if has_moved_on else (6, 0)
    assert (row["step"], row["eval/n"], row["eval/lost"]) == (0, *counts)


def test_the_last_evaluation_has_all_generators(tmp_path: Path) -> None:
    train = TRAIN | {"steps": 1}
    with open_coordinator(tmp_path, held_out=8, **(BESIDE | {"train": train})) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        while pair.batches != [0] or pair.of("held_out"):
            assert pair.finish("train") + pair.finish("held_out") > 0
        pair.sync(1, is_final=True)
        assert pair.of("held_out") == {"a", "b"} and pair.held == {"a": False, "b": False}


def test_the_last_evaluation_lacks_evaluators_that_are_still_at_work(tmp_path: Path) -> None:
    """The trainer has ended, so they keep their version."""
    train = TRAIN | {"steps": 1}
    with open_coordinator(tmp_path, held_out=8, **(BESIDE | {"train": train})) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        while pair.batches != [0]:
            assert pair.finish("train") > 0
        pair.sync(1, is_final=True)
        assert coordinator.requests.is_dismissed and pair.of("held_out") == {"b"}
        while not coordinator.is_over:
            assert pair.finish("held_out", 1) == 1
    records = [
        read_jsonl(tmp_path / "rollouts" / f"eval_{label}.jsonl") for label in ("before", "after")
    ]
    assert [[one["versions"] for one in some] for some in records] == [[[0]] * 8, [[1]] * 8]
    assert [{one["generator"] for one in some} for some in records] == [{"b"}, {"a"}]


@pytest.mark.parametrize(("is_final", "steps"), [(False, [0, 0, 0, 1]), (True, [0, 0, 0, 1, 1, 1])])
def test_evaluations_of_two_versions_follow_each_other_within_the_limit(
    tmp_path: Path, *, is_final: bool, steps: list[int]
) -> None:
    """Engines answer nothing of three sets.

    The end waits for both versions. The batch waits until both generators hold version 1, which
    they do after its first set: then one of them evaluates, and training continues.
    """
    timeout_s = 60.0
    train = TRAIN | ({"steps": 1} if is_final else {})
    sets = [{"name": name, "prompts": {"path": f"{name}.jsonl"}} for name in ("s1", "s2")]
    eval_ = {"prompts": 8, "sets": sets, "every_steps": 1, "timeout_s": timeout_s}
    sections = BESIDE | {"train": train, "eval": eval_}
    with open_coordinator(tmp_path, held_out=8, sets=("s1", "s2"), **sections) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        while pair.batches != [0]:
            assert pair.finish("train") > 0
        pair.sync(1, is_final=is_final)
        while pair.batches == [0] and not coordinator.is_over:
            pair.now += 1.0
            assert pair.now < 1000.0
            for name in pair.versions:
                if not pair.held[name]:
                    pair.versions[name] = 1
                pair.announce(name)
            pair.verify()
            pair.finish("train")
            coordinator.tick(pair.now)
            pair.pump()
        rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "label" in row]
        assert [row["step"] for row in rows] == steps
        # A tick follows each second, so an evaluation ends within a second of its limit.
        assert len(steps) * timeout_s <= pair.now <= len(steps) * (timeout_s + 1)
        assert coordinator._config.eval_delay_s == 2 * 3 * timeout_s


def save_during_evaluation(folder: Path, *, completions_after: int) -> QueueState:
    """The state after step 1, while version 0 is measured; two of 6 prompts are done by then."""
    with open_coordinator(folder, held_out=6, sets=("one",), **BESIDE) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        assert pair.finish("held_out", 2) == 2
        while pair.batches != [0]:
            assert pair.finish("train") > 0
        coordinator.handle("batches", "t", SaveState(1), 0.0)
        pair.pump()
        pair.sync(1)
        for _ in range(completions_after):
            assert pair.finish("held_out", 1) == 1
        [state] = pair.states
    return state


@pytest.mark.parametrize(
    ("completions_after", "rows"),
    [
        # A file that was begun after the save may be an older one's: it counts for nothing.
        (0, [("before", 0, 2, 4), ("before.one", 0, 0, 1)]),
        (3, [("before", 0, 5, 1), ("before.one", 0, 0, 1)]),
        (5, [("before", 0, 6, 0), ("before.one", 0, 1, 0)]),
    ],
)
def test_an_evaluation_under_way_at_a_checkpoint_is_told_once_whatever_follows(
    tmp_path: Path, completions_after: int, rows: list[tuple[str, int, int, int]]
) -> None:
    state = save_during_evaluation(tmp_path, completions_after=completions_after)
    assert state.evaluated == [] and state.unfinished_evaluations == [
        UnfinishedEvaluation("before", 0, has_begun=True),
        UnfinishedEvaluation("before.one", 0, has_begun=False),
    ]
    for _ in range(2):
        with open_coordinator(tmp_path, held_out=6, sets=("one",), **BESIDE) as coordinator:
            coordinator.resume(state)
            pair = Pair(coordinator)
            pair.sync(1)
            # Nobody holds version 0 any more.
            assert pair.of("train") == {"a", "b"} and not pair.of("held_out")
            while pair.batches != [1]:
                assert pair.finish("train") > 0
            coordinator.handle("batches", "t", SaveState(2), 0.0)
            pair.pump()
        [later] = pair.states
        assert (later.evaluated, later.unfinished_evaluations) == (["before", "before.one"], [])
        found = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "label" in row]
        assert rows == [
            (row["label"], row["step"], row["eval/n"], row["eval/lost"]) for row in found
        ]
        records = read_jsonl(tmp_path / "rollouts" / "eval_before.jsonl")
        assert len(records) == rows[0][2]


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_version_of_a_checkpoint_is_measured_once(tmp_path: Path, has_ended: bool) -> None:
    sections = BESIDE | {"eval": {"prompts": 2, "every_steps": 1}}
    with open_coordinator(tmp_path, held_out=2, **sections) as coordinator:
        pair = Pair(coordinator)
        pair.sync(0)
        while pair.batches != [0] or pair.of("held_out"):
            assert pair.finish("train") + pair.finish("held_out") > 0
        coordinator.handle("batches", "t", SaveState(1), 0.0)
        pair.sync(1)
        assert pair.finish("held_out", 2 if has_ended else 1) > 0
        [state] = pair.states
    assert state.evaluated == ["before"]
    with open_coordinator(tmp_path, held_out=2, **sections) as coordinator:
        coordinator.resume(state)
        pair = Pair(coordinator)
        pair.sync(1)
        assert pair.finish("held_out") == (0 if has_ended else 2)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "label" in row]
    assert [(row["label"], row["eval/n"]) for row in rows] == [("before", 2), ("step_1", 2)]


def test_a_state_of_an_earlier_release_has_no_unfinished_evaluations(tmp_path: Path) -> None:
    state = save_during_evaluation(tmp_path, completions_after=0)
    saved = msgspec.json.decode(msgspec.json.encode(state))
    del saved["unfinished_evaluations"]
    assert msgspec.convert(saved, QueueState).unfinished_evaluations == []


def test_a_state_that_contradicts_the_order_has_it_repeated() -> None:
    evaluators = Evaluators(1)
    evaluators.names = frozenset({"a"})
    for name in "ab":
        for is_held in (True, False):
            evaluators.correct(name, is_held=is_held)
    assert evaluators.pop_orders() == [("a", Hold(is_held=True)), ("b", Hold(is_held=False))]
    assert evaluators.pop_orders() == []
