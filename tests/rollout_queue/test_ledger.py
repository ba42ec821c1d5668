"""A queue that is killed at any moment continues as if nothing had happened."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.frames import encode_frames
from megatron_rl.protocol.ledger import LOG, STATE, Sent, read_state, segment_path
from megatron_rl.protocol.metrics import JsonlWriter, read_jsonl
from megatron_rl.protocol.types import SaveState, Score
from megatron_rl.rollout_queue import ledger
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.coordinator import BATCHES, Outgoing
from megatron_rl.rollout_queue.effects import LedgerMaker, LedgerMetrics, LedgerWriter
from megatron_rl.rollout_queue.ledger import Ledger, Parts
from megatron_rl.rollout_queue.record_files import NOT_REMOVED, RecordFiles
from megatron_rl.rollout_queue.recovery import Live, recover
from megatron_rl.rollout_queue.stall import UnixTime
from megatron_rl.rollout_queue.states import MOST_LOGS, References
from tests.full_disk import fill_disk
from tests.rollout_queue.played_queue import PlayedQueue

LABEL = "secret.train"
NEVER = 1 << 60


class Mortal:
    """A ledger that dies after every `every`-th call, and is recovered from its files.

    What it had read without writing it down is sent again, as generators and trainer do.
    """

    def __init__(self, queue: PlayedQueue, every: int) -> None:
        self._every, self._calls, self.deaths = every, 0, 0
        self._folder = queue.config.run.dir / "ledger"
        self._folder.mkdir(exist_ok=True)
        made = queue.coordinator
        prompts = made._training._prompts
        self._unix_s = made._recorder._to_unix_s = UnixTime()
        self._references = References(
            queue.config, prompts, folder=self._folder, unix_s=self._unix_s
        )
        records = queue.config.run.dir / "rollouts"
        self._live = lambda: Live(
            BatchMaker(),
            RecordFiles(records, keeps_tokens=True),
            records,
            JsonlWriter(queue.config.run.dir / "metrics.jsonl", "queue"),
            queue.config.run.dir / "metrics.jsonl",
        )
        live = self._live()
        parts = Parts(
            made, LedgerMaker(live.maker), LedgerWriter(live.writer), LedgerMetrics(live.metrics)
        )
        made._maker, made._recorder.writer = parts.maker, parts.writer
        made._metrics = made._evaluations._metrics = parts.metrics
        self.ledger = Ledger(
            self._folder,
            parts,
            self._references,
            self._unix_s,
            label=LABEL,
            metrics_begin=0,
            limit_s=1.0,
        )
        self._unwritten: list[Callable[[], Any]] = []

    def _count(self) -> None:
        self._calls += 1
        if self._calls % self._every == 0:
            self._die()

    def _die(self) -> None:
        self.deaths += 1
        self.ledger.close()
        self._unix_s.clock = None
        found = recover(
            self._folder, self._references, self._unix_s, self._live(), label=LABEL, limit_s=1.0
        )
        assert found is not None
        self._unix_s.clock = None  # the test moves the time
        self.ledger, _ = found
        lost, self._unwritten = self._unwritten, []
        for call in lost:
            self._do(*call)

    def _do(self, name: str, *given: Any) -> None:
        self._unwritten.append((name, *given))
        getattr(self.ledger, name)(*given)
        if not self.ledger._file._waiting:
            # A new segment began, after all of these.
            self._unwritten.clear()

    def handle(self, *given: Any) -> None:
        self._do("handle", *given)
        self._count()

    def tick(self, now: float) -> None:
        self._do("tick", now)
        self._count()

    def outgoing(self, now: float) -> Sequence[Outgoing]:
        messages = self.ledger.outgoing(now)
        self._unwritten.clear()
        self._count()
        return messages


def judge(prompt: str, index: int) -> Score | str | None:
    """Every fifth prompt is solved by all completions; the others by some."""
    number = int(prompt[1:])
    right = number % 5 == 0 or (number + index) % 3 == 0
    return Score(float(right), {"correct": float(right)}, "right" if right else "wrong")


MODULE_OF_A_USER = """
import functools


def less(share):
    def estimate(group, cfg):
        return group.rewards - share * group.rewards.mean()
    return estimate


def halved(advantages, cfg, *, by):
    return [one / by for one in advantages]


estimator, normalization = less(0.5), functools.partial(halved, by=2.0)


def aggregation(lengths, cfg):
    return [0.25 + 0.0 * one for one in lengths]
"""


class Cramped(Mortal):
    """Its disk has room for a state in every fifth pass only."""

    failures = 0
    passes = 0

    def outgoing(self, now: float) -> Sequence[Outgoing]:
        self.passes += 1
        if self.passes % 5 == 0:
            return super().outgoing(now)
        state = segment_path(self._folder, self.ledger._number, STATE)
        left = max(24_000, state.stat().st_size // 2)
        filler = fill_disk(self._folder, left_bytes=left)
        try:
            return super().outgoing(now)
        finally:
            filler.unlink()
            self.failures += self.ledger._shortage._since_s is not None


def play(
    folder: Path,
    every: int,
    make: Callable[[PlayedQueue, int], Mortal] = Mortal,
    **sections: dict,
) -> tuple[PlayedQueue, Mortal]:
    folder.mkdir(exist_ok=True)
    sections = {"eval": {"every_steps": 2}, "train": {"steps": 6}, **sections}
    queue = PlayedQueue(folder, judge, held_out=6, **sections)
    mortal = queue.coordinator = make(queue, every)
    queue.start()
    for version in range(1, 7):
        queue.reach(version)
        if version in (2, 4):
            mortal.handle(BATCHES, "t", SaveState(version), queue.now)
        queue.sync(version)
    queue.play(3)
    return queue, mortal


def as_bytes(batches: Sequence[Any]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in encode_frames(batch)] for batch in batches]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> PlayedQueue:
    return play(tmp_path_factory.mktemp("runs") / "unkilled", NEVER)[0]


@pytest.mark.parametrize("most_records", [7, 10_000])
@pytest.mark.parametrize("every", [1, 3, 11, 40])
def test_a_queue_killed_after_every_nth_event_deals_the_same_batches(
    tmp_path: Path,
    unkilled: PlayedQueue,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    most_records: int,
) -> None:
    """From states in the middle of a run, and from the first state alone."""
    monkeypatch.setattr(ledger, "MOST_RECORDS", most_records)
    queue, mortal = play(tmp_path / "killed", every)
    assert mortal.deaths >= 5
    assert len(queue.batches) == 6
    assert as_bytes(queue.batches) == as_bytes(unkilled.batches)
    assert queue.leased == unkilled.leased
    assert queue.graded == unkilled.graded
    assert files_of(queue.config.run.dir) == files_of(unkilled.config.run.dir)


def test_a_queue_continues_with_functions_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closure, which has no pickle, a partial and a function, of a module that is not ours."""
    (tmp_path / "user_of_ledger.py").write_text(MODULE_OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ledger, "MOST_RECORDS", 7)
    names = {
        "advantage_estimator": {"name": "user_of_ledger:estimator"},
        "normalization": {"name": "user_of_ledger:normalization"},
        "aggregation": {"name": "user_of_ledger:aggregation"},
    }
    whole, _ = play(tmp_path / "whole", NEVER, algorithm=names)
    queue, mortal = play(tmp_path / "killed", 11, algorithm=names)
    assert mortal.deaths >= 5 and mortal.ledger._number >= 5
    assert len(queue.batches) == 6
    assert as_bytes(queue.batches) == as_bytes(whole.batches)


def test_a_row_that_a_thread_wrote_past_the_ledger_costs_none_of_the_queues_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    live = JsonlWriter(path, "queue")
    killed = LedgerMetrics(live)
    killed.write(1, {"queue/a": 1})
    killed.release()
    live.write(1, {NOT_REMOVED: 1})
    continued = LedgerMetrics(live)
    continued.begin_replay(live, path, 0)
    continued.write(1, {"queue/a": 1})
    for step in (2, 3):
        continued.write(step, {"queue/a": 1})
    continued.release()
    rows = [(row["step"], NOT_REMOVED in row) for row in read_jsonl(path)]
    assert rows == [(1, False), (1, True), (2, False), (3, False)]


def test_a_queue_without_room_for_its_states_goes_on_with_the_old_segment(
    tmp_path: Path, unkilled: PlayedQueue, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MOST_RECORDS", 7)
    monkeypatch.setattr(ledger, "CUT_AGAIN_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger").symlink_to(small_disk)
    queue, mortal = play(tmp_path / "run", 11, Cramped)
    assert mortal.deaths >= 5 and mortal.failures >= 5
    assert mortal.ledger._number >= 5
    assert as_bytes(queue.batches) == as_bytes(unkilled.batches)
    assert queue.leased == unkilled.leased
    assert files_of(queue.config.run.dir) == files_of(unkilled.config.run.dir)


def test_a_state_is_tried_again_after_a_while_and_each_shortage_has_the_whole_limit(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger").symlink_to(small_disk)
    mortal = Mortal(PlayedQueue(tmp_path / "run", judge), NEVER)
    clock, passed_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed_s)
    for number in range(2):
        filler = fill_disk(small_disk, left_bytes=8192)
        mortal.ledger._cut_if_room()
        filler.unlink()
        # Longer than the limit of 1 s, and shorter than CUT_AGAIN_S of 30 s.
        passed_s += 29.0
        mortal.ledger._cut_if_room()
        assert mortal.ledger._number == number
        passed_s += 2.0
        mortal.ledger._cut_if_room()
        assert mortal.ledger._number == number + 1


def test_a_state_is_written_after_so_many_records_of_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MOST_RECORDS", 7)
    mortal = Mortal(PlayedQueue(tmp_path, judge), NEVER)
    numbers = []
    # Two records a pass, so the fourth one has the eighth record.
    for now in range(9):
        mortal.ledger.tick(float(now))
        mortal.ledger.outgoing(float(now))
        numbers.append(mortal.ledger._number)
    assert numbers == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_a_queue_that_would_send_other_messages_than_the_killed_one_is_not_continued(
    tmp_path: Path,
) -> None:
    queue = PlayedQueue(tmp_path, judge)
    mortal = queue.coordinator = Mortal(queue, NEVER)
    queue.start()
    queue.play(1)
    for check in (0, 1):
        # It has nothing to send at once: no messages, whose checksum is 0.
        mortal.ledger._add(Sent(queue.now, mortal.ledger._parts.writer.written, False, 0, check))
        mortal.ledger._flush()
        if not check:
            mortal._die()
    wanted = (
        r"cannot be continued: after \d+ records the queue sends 0 messages \(checksum 00000000"
    )
    with pytest.raises(InputError, match=wanted + r"\), but the killed one sent 0 \(00000001\)"):
        mortal._die()


def test_a_disk_without_room_for_a_state_ends_the_queue_after_the_limit(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was written until then can be continued."""
    monkeypatch.setattr(ledger, "MOST_RECORDS", 7)
    monkeypatch.setattr(ledger, "CUT_AGAIN_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger").symlink_to(small_disk)
    queue = PlayedQueue(tmp_path / "run", judge, held_out=6, train={"steps": 6})
    mortal = Mortal(queue, NEVER)
    fill_disk(small_disk, left_bytes=16_384)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"ledger could not be written for 1 s: No space left"):
        while time.monotonic() < began + 100:
            mortal.outgoing(0.0)
            time.sleep(0.01)
    assert time.monotonic() - began > 0.9
    assert sorted(path.name for path in small_disk.glob("0*")) == [
        "000000.log", "000000.state", "000001.log"
    ]  # fmt: skip
    mortal._die()
    assert mortal.ledger._number == 0 and mortal.ledger._file.bytes > 0


class Examined(Mortal):
    """As another process it loads each state that it writes."""

    loaded = 0

    def outgoing(self, now: float) -> Sequence[Outgoing]:
        number = self.ledger._number
        messages = super().outgoing(now)
        if self.ledger._number > number:
            objects = self._references._objects
            References(
                objects["config"], objects["prompts"], folder=self._folder, unix_s=self._unix_s
            ).load(read_state(self._folder, self.ledger._number))
            self.loaded += 1
            oldest = min(int(path.stem) for path in self._folder.glob(f"*{LOG}"))
            assert oldest >= self.ledger._number - MOST_LOGS
        return messages


@pytest.mark.parametrize(("seed", "most_records"), [(0, 5), (1, 9), (2, 20), (3, 33)])
def test_each_state_can_be_loaded_whatever_rollouts_are_freed_between_two_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, most_records: int
) -> None:
    """Groups wait for the trainer while an evaluation's younger rollouts come and go."""
    monkeypatch.setattr(ledger, "MOST_RECORDS", most_records)

    def draw(prompt: str, index: int) -> Score:
        right = float(random.Random(f"{seed}/{prompt}/{index}").random() < 0.5)
        return Score(right, {"correct": right}, "right" if right else "wrong")

    queue = PlayedQueue(tmp_path, draw, held_out=60, eval={"every_steps": 1}, train={"steps": 3})
    mortal = queue.coordinator = Examined(queue, NEVER)
    queue.start()
    for version in range(1, 4):
        queue.reach(version, seconds=200)
        queue.play(40)  # the trainer computes
        mortal._die()
        queue.sync(version)
    assert len(queue.batches) == 3
    assert mortal.loaded > 3 * MOST_LOGS
