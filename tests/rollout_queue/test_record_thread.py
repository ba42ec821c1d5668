"""Records are written beside the loop: all of them, in order, and no error is lost."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import read_rollouts
from megatron_rl.protocol.types import QueueState, SaveState
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.record_files import Job, RecordFiles, RecordThread
from tests.full_disk import fill_disk
from tests.rollout_queue.makers import make_group, make_score
from tests.rollout_queue.played_queue import PlayedQueue


class GatedFiles(RecordFiles):
    """A disk that is slow until the gate opens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keeps_tokens=True)
        self.gate = threading.Event()
        self.threads: set[int] = set()

    def write(self, job: Job) -> None:
        self.gate.wait(20)
        self.threads.add(threading.get_ident())
        super().write(job)


def rollouts_dir(folder: Path) -> Path:
    (folder / "rollouts").mkdir()
    return folder / "rollouts"


def fill(recorder: Recorder) -> None:
    for step in range(3):
        recorder.write_dropped(make_group(10 * step, [0.1, 0.1], tokens=[9, 7]), ZERO_VARIANCE)
        groups = [make_group(10 * step + n, [0.1, 1.0], tokens=[8, n + 2]) for n in (1, 2)]
        recorder.write_step(step, groups, now=4.0)
        recorder.write_evaluation("before", [make_group(100 + step, [1.0])])


def test_what_the_thread_writes_is_what_is_written_at_once(tmp_path: Path) -> None:
    (tmp_path / "at_once").mkdir()
    (tmp_path / "beside").mkdir()
    fill(Recorder(tmp_path / "at_once"))
    files = GatedFiles(rollouts_dir(tmp_path / "beside"))
    with RecordThread(files, jobs=50, limit_s=60) as thread:
        fill(Recorder(tmp_path / "beside", writer=thread))
        # Nothing is there yet, and the loop went on.
        assert list(files.folder.iterdir()) == []
        files.gate.set()
    assert files.threads and threading.get_ident() not in files.threads
    written = {path.name: path.read_bytes() for path in (tmp_path / "at_once/rollouts").iterdir()}
    assert len(written) == 14
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == written
    found = [(r.source.step, r.group, r.index) for r in read_rollouts(tmp_path / "beside")]
    assert found[:6] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]


def test_a_group_that_changes_after_its_record_was_made_is_recorded_as_it_was(
    tmp_path: Path,
) -> None:
    files = GatedFiles(rollouts_dir(tmp_path))
    group = make_group(0, [0.1, 1.0])
    with RecordThread(files, jobs=50, limit_s=60) as thread:
        recorder = Recorder(tmp_path, writer=thread)
        recorder.write_dropped(group, ZERO_VARIANCE)
        group.scored.clear()
        group.origins.clear()
        files.gate.set()
    assert [rollout.reward for rollout in read_rollouts(tmp_path)] == [0.1, 1.0]


def test_writing_never_waits_and_says_when_the_line_is_full(tmp_path: Path) -> None:
    files = GatedFiles(rollouts_dir(tmp_path))
    with RecordThread(files, jobs=3, limit_s=60) as thread:
        recorder = Recorder(tmp_path, writer=thread)
        # One is at the gate, three may wait; the first write is two jobs.
        fullness = []
        started = time.monotonic()
        for number in range(5):
            recorder.write_evaluation("e", [make_group(number, [1.0])] if number else [])
            fullness.append(recorder.writer.is_full)
        assert fullness == [False, False, True, True, True]
        assert time.monotonic() - started < 20
        assert (recorder.writer.put, recorder.writer.written) == (6, 0)
        files.gate.set()
        ends_at = time.monotonic() + 60
        while recorder.writer.written < recorder.writer.put:
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        assert not recorder.writer.is_full
        assert [rollout.group for rollout in read_rollouts(tmp_path)] == [1, 2, 3, 4]


def test_a_disk_that_takes_nothing_for_too_long_is_refused(tmp_path: Path) -> None:
    files = GatedFiles(rollouts_dir(tmp_path))
    thread = RecordThread(files, jobs=2, limit_s=0.3)
    recorder = Recorder(tmp_path, writer=thread)
    recorder.write_evaluation("e", [make_group(1, [1.0])])
    recorder.writer.check()
    time.sleep(0.4)
    with pytest.raises(DeadlineExceeded, match="groups wait .* the disk took none for 0 s"):
        recorder.writer.check()
    files.gate.set()
    thread.close()
    assert [rollout.group for rollout in read_rollouts(tmp_path)] == [1]


class Alarm(Exception):
    """Raised by a signal, wherever the loop is."""


def raise_alarm(number: int, frame: object) -> None:
    raise Alarm


def test_a_signal_amid_a_write_does_not_keep_the_thread(tmp_path: Path) -> None:
    """It may come within a lock or a wake-up of Python's own."""
    before = signal.signal(signal.SIGALRM, raise_alarm)
    draw = random.Random(1)
    try:
        for number in range(600):
            folder = tmp_path / str(number)
            folder.mkdir()
            files = NoFiles(folder, keeps_tokens=False)
            with RecordThread(files, jobs=2, limit_s=5) as thread:
                try:
                    # Again after a second: Python ignores what is raised within a collection.
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3), 1.0)
                    while True:
                        thread.write(Job("step", [], is_first=False))
                except Alarm:
                    signal.setitimer(signal.ITIMER_REAL, 0.0)
            assert not thread._thread.is_alive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("meets_it", ["write", "check", "close"])
def test_a_full_disk_is_told_with_its_cause_wherever_the_loop_meets_it(
    tmp_path: Path, meets_it: str
) -> None:
    folder = rollouts_dir(tmp_path)
    # Every write to this device fails as on a full disk.
    os.symlink("/dev/full", folder / "dropped_000000.int32")
    os.symlink("/dev/full", folder / "dropped_000000.jsonl")
    files = FullDisk(folder, keeps_tokens=True)
    thread = RecordThread(files, jobs=50, limit_s=60)
    recorder = Recorder(tmp_path, writer=thread)
    recorder.write_dropped(make_group(0, [0.1, 0.1]), ZERO_VARIANCE)
    if meets_it != "close":
        thread._thread.join(60)
    act = {
        "write": lambda: recorder.write_step(0, [], now=1.0),
        "check": recorder.writer.check,
        "close": thread.close,
    }[meets_it]
    with pytest.raises(
        InputError, match=r"could not be written: No space left.* files free. Make room"
    ):
        act()


def test_records_wait_for_room_and_are_whole(tmp_path: Path, small_disk: Path) -> None:
    fill(Recorder(tmp_path))
    thread = RecordThread(
        RecordFiles(rollouts_dir(small_disk), keeps_tokens=True, limit_s=60), jobs=50, limit_s=60
    )
    recorder = Recorder(small_disk, writer=thread)
    # Each file takes a page: the third write of words, or that of its lines, fails.
    filler = fill_disk(small_disk, left_bytes=5 * 4096)
    with thread:
        fill(recorder)
        until = time.monotonic() + 60
        while recorder.writer.written < 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        assert recorder.writer.written < recorder.writer.put
        filler.unlink()
    found = {path.name: path.read_bytes() for path in (small_disk / "rollouts").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "rollouts").iterdir()}


class NoFiles(RecordFiles):
    """Writes nothing, at once."""

    def write(self, job: Job) -> None:
        pass


class FullDisk(RecordFiles):
    """Appends to what is there, a device that is full."""

    def write(self, job: Job) -> None:
        super().write(job._replace(is_first=False))


def test_a_checkpoints_state_is_given_once_the_records_before_it_are_on_the_disk(
    tmp_path: Path,
) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: make_score(float(index == 0)))
    files = GatedFiles(tmp_path / "rollouts")
    with RecordThread(files, jobs=50, limit_s=60) as thread:
        queue.coordinator._recorder.writer = thread
        queue.start()
        queue.play(6)
        assert len(queue.batches) == 1 and list(files.folder.iterdir()) == []
        started = time.monotonic()
        queue.coordinator.handle("batches", "t", SaveState(1), queue.now)
        assert [m for _, _, m in queue.coordinator.outgoing(queue.now) if is_state(m)] == []
        # The loop did not wait for the disk.
        assert time.monotonic() - started < 20
        files.gate.set()
        recorder = queue.coordinator._recorder
        while recorder.writer.written < recorder.writer.put:
            assert time.monotonic() - started < 60
            time.sleep(0.01)
        assert len([r for r in read_rollouts(tmp_path) if r.source.step == 0]) == 8
        [state] = [m for _, _, m in queue.coordinator.outgoing(queue.now) if is_state(m)]
        assert state.step == 1


def is_state(message: object) -> bool:
    return isinstance(message, QueueState)
