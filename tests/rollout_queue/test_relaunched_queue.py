"""A queue whose launcher was killed continues its ledger with new peers, and loses nothing."""

import os
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.ledger import read_built
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    GeneratorReady,
    NextBatch,
    RankBatch,
    SaveState,
    Score,
    Stop,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, VERIFY
from megatron_rl.rollout_queue.effects import LedgerMaker
from megatron_rl.rollout_queue.recovery import recover
from megatron_rl.rollout_queue.stall import UnixTime
from megatron_rl.rollout_queue.states import References
from tests.rollout_queue.played_queue import ROOM, PlayedQueue
from tests.rollout_queue.test_batch_thread import order_of
from tests.rollout_queue.test_ledger import NEVER, Mortal, judge

STEPS = 6


class Relaunched(Mortal):
    """Its launcher dies with all peers; the next one has another label."""

    launches = 0

    def relaunch(self) -> None:
        self.launches += 1
        self.recover()

    def recover(self) -> None:
        """As a new queue of the present launcher."""
        self.ledger.close()
        self._unix_s, objects = UnixTime(), self._references._objects
        self._references = References(
            objects["config"], objects["prompts"], folder=self._folder, unix_s=self._unix_s
        )
        found = recover(
            self._folder, self._references, self._unix_s, self._live(),
            label=f"start {self.launches}", limit_s=1.0,
        )  # fmt: skip
        assert found is not None
        self._unix_s.clock = None  # the test moves the time
        self.ledger, _ = found


def begin(folder: Path, **sections: object) -> tuple[PlayedQueue, Relaunched]:
    folder.mkdir(exist_ok=True)
    queue = PlayedQueue(folder, judge, train={"steps": STEPS}, **sections)
    mortal = queue.coordinator = Relaunched(queue, NEVER)
    queue.start()
    return queue, mortal


def kill(queue: PlayedQueue, mortal: Relaunched) -> set[tuple[str, int]]:
    """Kill the launcher; (prompt, index) of the completions that were being generated.

    All verdicts are in the ledger: one that was on its way would be asked for again.
    """
    queue.open = getattr(queue, "open", [])
    queue._send()
    in_flight = {(lease.prompt.id, index) for lease, index in queue.open}
    queue.open = []
    mortal.relaunch()
    assert mortal.ledger.peers == set()
    return in_flight


def start_again(queue: PlayedQueue, mortal: Relaunched, *, at: int, to: int) -> None:
    """New peers; the trainer resumes at version `at`, and repeats steps up to version `to`.

    Only then does the generator get weights.
    """
    mortal.handle(VERIFY, "v", VerifierReady(ROOM, 1), queue.now)
    mortal.handle(PROMPTS, "g", GeneratorReady(8, -1, 1), queue.now)
    for version in range(at, to + 1):
        mortal.handle(BATCHES, "t", WeightsSynced(version), queue.now)
        assert list(mortal.outgoing(queue.now)) == []
    queue.version = to
    mortal.handle(PROMPTS, "g", GeneratorReady(8, to, 1), queue.now)
    mortal.handle(BATCHES, "t", NextBatch(to, 0, 1), queue.now)


def members(batches: list[RankBatch]) -> list[tuple[int, int]]:
    """(group, index) of the sequences of all batches."""
    return [
        sequence.rollout
        for batch in batches
        for minibatch in batch.minibatches
        for microbatch in minibatch.microbatches
        for sequence in microbatch
    ]


def test_nothing_that_arrived_is_leased_again_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    """The launcher is killed before the first batch, before a checkpoint, and after one."""
    queue, mortal = begin(tmp_path / "run")
    queue.play(1, is_slow=True)
    lost = kill(queue, mortal)
    assert len(queue.graded) == 1 and len(lost) == 7 + 1
    start_again(queue, mortal, at=0, to=0)
    for version in range(1, STEPS + 1):
        queue.reach(version)
        if version == 4:
            mortal.handle(BATCHES, "t", SaveState(4), queue.now)
        if version in (2, 5):
            lost |= kill(queue, mortal)
            start_again(queue, mortal, at=0 if version == 2 else 4, to=version)
        else:
            queue.sync(version)
    assert mortal.launches == 3
    twice = {one for one in queue.leased if queue.leased.count(one) > 1}
    assert twice == lost
    assert len(queue.graded) == len(set(queue.graded))
    trained = members(queue.batches)
    assert len(trained) == len(set(trained)) == STEPS * 2 * 4
    assert [batch.step for batch in queue.batches] == list(range(STEPS))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_launcher_that_was_killed_while_it_stopped_does_not_stop_the_next(
    tmp_path: Path, is_cut: bool
) -> None:
    """Whether the request is in the log or in the state; the next launcher can be stopped too."""
    queue, mortal = begin(tmp_path / "run")
    for version in range(1, STEPS + 1):
        queue.reach(version)
        if version not in (1, 3):
            queue.sync(version)
            continue
        mortal.ledger.stop_training()
        if is_cut:
            mortal.ledger._cut_if_room()
        queue.sync(version)
        [(_, peer, answer)] = mortal.outgoing(queue.now)
        assert (peer, answer) == ("t", Stop("the run is asked to stop"))
        kill(queue, mortal)
        start_again(queue, mortal, at=0, to=version)
    assert [batch.step for batch in queue.batches] == list(range(STEPS))
    trained = members(queue.batches)
    assert len(trained) == len(set(trained)) == STEPS * 2 * 4


def test_deaths_of_launchers_count_against_no_completion(tmp_path: Path) -> None:
    limits = {"max_attempts": 2, "max_lost_attempts": 2}
    queue, mortal = begin(tmp_path / "run", queue=limits)
    for _ in range(5):
        queue.play(1, is_slow=True)
        kill(queue, mortal)
        start_again(queue, mortal, at=0, to=0)
    queue.reach(1)
    assert not list((queue.config.run.dir / "rollouts").glob("dropped_0*.jsonl"))


def test_a_queue_that_dies_under_the_next_launcher_keeps_its_peers(tmp_path: Path) -> None:
    queue, mortal = begin(tmp_path / "run")
    queue.play(1, is_slow=True)
    kill(queue, mortal)
    start_again(queue, mortal, at=0, to=0)
    queue.play(1, is_slow=True)
    leased = list(queue.leased)
    mortal.recover()
    assert mortal.ledger.peers == {(PROMPTS, "g"), (VERIFY, "v")}
    assert list(mortal.outgoing(queue.now)) == [] and queue.leased == leased
    queue.reach(1)


def test_the_clock_of_an_evaluation_stands_until_engines_have_weights(tmp_path: Path) -> None:
    queue, mortal = begin(tmp_path / "run", held_out=20, eval={"timeout_s": 30.0})
    queue.play(3, is_slow=True)
    kill(queue, mortal)
    mortal.handle(VERIFY, "v", VerifierReady(ROOM, 1), queue.now)
    # Engines load for an hour.
    for _ in range(360):
        queue.now += 10.0
        mortal.tick(queue.now)
        list(mortal.outgoing(queue.now))
    start_again(queue, mortal, at=0, to=0)
    queue.reach(1)
    [row] = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "eval/n" in row]
    assert (row["label"], row["eval/n"], row["eval/lost"]) == ("before", 20, 0)
    assert row["eval/seconds"] < 30


def test_a_trainer_that_begins_again_after_the_last_step_is_told_to_stop(tmp_path: Path) -> None:
    queue, mortal = begin(tmp_path / "run")
    for version in range(1, STEPS):
        queue.reach(version)
        queue.sync(version)
    queue.reach(STEPS)
    mortal.handle(BATCHES, "t", WeightsSynced(STEPS, is_final=True), queue.now)
    kill(queue, mortal)
    queue.now += 7200.0
    mortal.tick(queue.now)
    assert list(mortal.outgoing(queue.now)) == [] and not mortal.ledger.is_over
    mortal.handle(BATCHES, "t", WeightsSynced(STEPS, is_final=True), queue.now)
    mortal.handle(BATCHES, "t", NextBatch(STEPS, 0, 1), queue.now)
    [(_, peer, answer)] = mortal.outgoing(queue.now)
    assert peer == "t" and isinstance(answer, Stop) and mortal.ledger.is_over


@pytest.mark.parametrize("is_cut", [False, True])
def test_times_of_rollouts_before_the_end_of_a_launcher_stay(tmp_path: Path, is_cut: bool) -> None:
    """Also when the queue is killed under the third launcher, in a later segment."""
    queue, mortal = begin(tmp_path / "run")
    ends = []
    for offset_s in (5000.0, 12_000.0):
        mortal._unix_s.offset_s = offset_s
        mortal.tick(queue.now)
        mortal.outgoing(queue.now)
        kill(queue, mortal)
        ends.append(queue.now)
        queue.now += 10.0
    mortal._unix_s.offset_s = 36_000.0
    mortal.tick(queue.now)
    mortal.outgoing(queue.now)
    if is_cut:
        mortal.ledger._cut_if_room()
    assert mortal.ledger._number == is_cut
    for _ in range(2):
        unix_s = mortal._unix_s
        assert unix_s(ends[0]) == ends[0] + 5000.0
        assert unix_s(ends[0] + 1) == ends[0] + 1 + 12_000.0
        assert unix_s(ends[1]) == ends[1] + 12_000.0
        assert unix_s(ends[1] + 1) == ends[1] + 1 + 36_000.0
        mortal.recover()


def test_a_ledger_tells_how_many_batches_it_knows(tmp_path: Path) -> None:
    """From the state that begins its segment, and from the log after it."""
    queue, mortal = begin(tmp_path / "run")
    folder = tmp_path / "run" / "ledger"
    for built in (0, 1):
        queue.reach(built)
        assert read_built(folder, mortal.ledger._number) == built
    mortal.ledger._cut_if_room()
    assert mortal.ledger._number == 1 and read_built(folder, 1) == 1


def test_a_batch_is_stored_when_the_ledger_has_its_cause() -> None:
    """Else a trainer could repeat a batch that the continued queue does not know."""
    stored: list[list[RankBatch]] = []
    maker = LedgerMaker(BatchMaker(store=stored.append))
    maker.put(order_of(2, 2, step=3))
    assert not maker.look() and maker.is_busy and stored == []
    for _ in range(2):
        maker.release()
        assert [batch[0].step for batch in stored] == [3]
    assert maker.look() and not maker.is_busy


def test_a_ledger_that_cannot_be_written_stores_no_batch_and_no_record(tmp_path: Path) -> None:
    queue, mortal = begin(tmp_path / "run")
    stored: list[list[RankBatch]] = []
    maker = mortal.ledger._parts.maker
    maker._maker = BatchMaker(store=stored.append)
    queue.reach(1)
    assert [batch[0].step for batch in stored] == [0]
    records = tmp_path / "run" / "rollouts"
    before = {path.name for path in records.iterdir()}
    assert "step_000000.jsonl" in before
    # The second batch is ordered in the pass in which the disk fails.
    mortal.handle(BATCHES, "t", WeightsSynced(1), queue.now)
    mortal.handle(BATCHES, "t", NextBatch(1, 0, 1), queue.now)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, mortal.ledger._file._file)
    os.close(full)
    with pytest.raises(InputError, match="could not be written"):
        mortal.outgoing(queue.now)
    assert maker.is_busy and mortal.ledger._parts.writer._waiting
    assert [batch[0].step for batch in stored] == [0]
    assert {path.name for path in records.iterdir()} == before


def test_an_evaluation_that_begins_before_engines_have_weights_takes_no_negative_time(
    tmp_path: Path,
) -> None:
    """Verdicts of the first set arrive under the next launcher, whose engines load for long."""
    is_graded = False

    def grade(prompt: str, index: int) -> Score | str | None:
        return None if prompt.startswith("h") and not is_graded else judge("p1", index)

    one = {"name": "one", "prompts": {"path": "one.jsonl"}}
    queue = PlayedQueue(
        tmp_path, grade, held_out=3, eval_sets={"one": 3}, eval={"sets": [one]},
        train={"steps": STEPS},
    )  # fmt: skip
    mortal = queue.coordinator = Relaunched(queue, NEVER)
    queue.start()
    queue.play(6)
    kill(queue, mortal)
    is_graded = True
    for _ in range(60):
        queue.now += 10.0
        mortal.handle(VERIFY, "v", VerifierReady(ROOM, 1), queue.now)
        queue._send()
        mortal.tick(queue.now)
    start_again(queue, mortal, at=0, to=0)
    queue.play(5)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/n" in row]
    assert [(row["label"], row["eval/n"]) for row in rows] == [("before", 3), ("before.one", 3)]
    # The first one begins 5 s before the kill, is graded 10 s after it, and ends in the next pass,
    # 10 s later. Engines answer the second one within a second of their weights.
    assert [row["eval/seconds"] for row in rows] == [25.0, 1.0]
