"""The ledger's files: torn ends, full disks, and states that load nothing foreign."""

import io
import pickle
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.frames import encode, encode_frames
from megatron_rl.protocol.ledger import (
    LOG,
    Began,
    LogFile,
    Received,
    Ticked,
    read_began,
    read_entries,
    read_state,
    remove_segments,
    segment_path,
    segments,
    write_state,
)
from megatron_rl.protocol.types import Rollout, RolloutDone, VersionSpan
from megatron_rl.rollout_queue.states import Place, References

FRAMES = [b"head", b"", bytes(range(256)) * 300]


def write_some(path: Path) -> list[int]:
    """Five records; the end of each."""
    ends = []
    with LogFile(path, limit_s=0.0) as file:
        for number in range(5):
            file.append(Received("prompts", f"generator-{number}", float(number)), FRAMES[:number])
            file.flush()
            ends.append(file.bytes)
    return ends


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ends = write_some(tmp_path / "log")
    entries = list(read_entries(tmp_path / "log"))
    assert [entry.end for entry in entries] == ends
    assert [bytes(frame) for frame in entries[3].frames] == FRAMES
    assert entries[2].record == Received("prompts", "generator-2", 2.0)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_log_that_was_cut_anywhere_ends_before_the_torn_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = write_some(path)
    whole = path.read_bytes()
    places = {*range(0, ends[2] + 20), ends[3] - 1, ends[4] - 1, ends[4] - 70_000}
    for place in places:
        path.write_bytes(whole[:place])
        assert [entry.end for entry in read_entries(path)] == [e for e in ends if e <= place]
    # A new process writes over the torn end.
    path.write_bytes(whole[: ends[2] + 7])
    with LogFile(path, end=ends[2], limit_s=0.0) as file:
        file.append(Ticked(5.0, True, 0.5))
        file.flush()
    assert [entry.record for entry in read_entries(path)][3:] == [Ticked(5.0, True, 0.5)]


def test_a_flipped_bit_hides_what_follows_and_nothing_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = write_some(path)
    whole = bytearray(path.read_bytes())
    for place in range(ends[1], ends[2]):
        whole[place] ^= 4
        path.write_bytes(whole)
        assert [entry.end for entry in read_entries(path)] == ends[:2]
        whole[place] ^= 4


def test_a_full_disk_is_waited_for_and_leaves_no_half_record(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(800_000))
    frames = [bytes(100_000)] * 5

    def make_room() -> None:
        time.sleep(1.0)
        (small_disk / "other").unlink()

    with LogFile(small_disk / "log", limit_s=30.0) as file:
        file.append(Ticked(1.0, True, 0.0))
        file.flush()
        file.append(Ticked(2.0, True, 0.0), frames)
        thread = threading.Thread(target=make_room)
        began = time.monotonic()
        thread.start()
        file.flush()
        thread.join()
        assert time.monotonic() - began >= 1.0
    assert [len(entry.frames) for entry in read_entries(small_disk / "log")] == [0, 5]


def test_a_disk_that_stays_full_is_refused_and_the_log_is_whole(small_disk: Path) -> None:
    with LogFile(small_disk / "log", limit_s=0.5) as file:
        file.append(Ticked(1.0, True, 0.0))
        file.flush()
        file.append(Ticked(2.0, True, 0.0), [bytes(2_000_000)])
        with pytest.raises(
            InputError, match=r"/log could not .* for 0 s: No space left.* has 0\.001"
        ):
            file.flush()
    assert [entry.record for entry in read_entries(small_disk / "log")] == [Ticked(1.0, True, 0.0)]


def test_segments_are_whole_or_not_there(tmp_path: Path) -> None:
    for number in (0, 1, 2):
        write = partial(write_ten_thousand, bytes([number]))
        write_state(tmp_path, number, Began(f"start {number}", 7, 0.5), write)
    assert segments(tmp_path) == [0, 1, 2]
    assert read_began(tmp_path, 1) == Began("start 1", 7, 0.5)
    assert bytes(read_state(tmp_path, 1)) == b"\1" * 10_000
    damaged = tmp_path / "000002.state"
    damaged.write_bytes(damaged.read_bytes()[:10])
    assert read_began(tmp_path, 2) is None
    remove_segments(tmp_path, before=2)
    assert segments(tmp_path) == [2]
    remove_segments(tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove_segments(tmp_path / "missing")


def test_a_segment_tells_the_launchers_that_ended_before_it(tmp_path: Path) -> None:
    """A ledger of an earlier release tells none."""
    ended = tuple((float(number), 1.75e9 + number) for number in range(3_000))
    write = partial(write_ten_thousand, b"a")
    write_state(tmp_path, 0, Began("start", 7, 0.5, ended=ended), write)
    began = read_began(tmp_path, 0)
    assert began is not None and began.ended == ended
    assert bytes(read_state(tmp_path, 0)) == b"a" * 10_000
    earlier = msgspec.msgpack.encode(["began", "start", 7, 0.5, "program", 2.0, 3])
    assert msgspec.msgpack.decode(earlier, type=Began) == Began("start", 7, 0.5, "program", 2.0, 3)


def test_a_state_that_does_not_fit_leaves_its_room_to_others(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_state(small_disk, 3, Began("start", 7, 0.5), lambda file: file.write(bytes(2 << 20)))
    assert list(small_disk.iterdir()) == []
    (small_disk / "other").write_bytes(bytes(1_000_000))


def test_what_a_kill_has_left_is_removed_with_the_segments(tmp_path: Path) -> None:
    """The log of a removed state, and a state that was being written."""
    write = partial(write_ten_thousand, b"a")
    write_state(tmp_path, 5, Began("start", 7, 0.5), write)
    for name in ("000003.log", "000004.partial", "000005.log", "000006.log", "000006.partial"):
        (tmp_path / name).touch()
    assert segments(tmp_path) == [5]
    remove_segments(tmp_path, before=5)
    names = ["000005.log", "000005.state", "000006.log", "000006.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    remove_segments(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write_ten_thousand(byte: bytes, file: BinaryIO) -> None:
    file.write(byte * 10_000)


def dumped(one: object, references: References) -> bytes:
    file = io.BytesIO()
    references.dump(one, file, number=0)
    return file.getvalue()


class Foreign:
    def __reduce__(self) -> tuple:
        return subprocess.check_output, (["touch", "/tmp/never"],)


def test_a_state_calls_nothing_foreign(tmp_path: Path) -> None:
    references = References(Config(), PromptSets([], [], [], 0), folder=tmp_path)
    for one in (Foreign(), print, subprocess.Popen, getattr):
        with pytest.raises(pickle.UnpicklingError, match="a state of the queue has no"):
            references.load(dumped(one, references))
    config = references.find("config")
    assert references.load(dumped([config, {"a"}], references))[0] is config


def test_a_state_names_the_rollouts_of_the_last_eight_logs_and_contains_older_ones(
    tmp_path: Path,
) -> None:
    references = References(Config(), PromptSets([], [], [], 0), folder=tmp_path)
    rollouts, ids = [], np.arange(10_000, dtype=np.int32)
    for number in range(10):
        spans = [VersionSpan(number, 0, 10_000)]
        rollout = Rollout(
            number, 0, ids[:9], ids + 1, -ids.astype(np.float32), spans, "stop", "text"
        )
        with LogFile(segment_path(tmp_path, number, LOG), limit_s=0.0) as file:
            file.append(Ticked(1.0, True, 0.0))
            begin = file.end
            file.append(Received("prompts", "g", 1.0), encode_frames(RolloutDone(rollout)))
            file.flush()
        references.note(rollout, Place(number, begin, file.end))
        rollouts.append(rollout)
    state = io.BytesIO()
    named = references.dump(rollouts, state, number=10)
    assert [place.segment for place in named] == list(range(2, 10))
    # Two rollouts of 20,009 words, and a few bytes for each of the others.
    assert 2 * 80_036 < len(state.getvalue()) < 2 * 80_036 + 2_000
    others = References(Config(), PromptSets([], [], [], 0), folder=tmp_path)
    found = others.load(state.getvalue())
    assert [encode(one) for one in found] == [encode(one) for one in rollouts]
    again = others.dump(found, io.BytesIO(), number=11)
    assert [place.segment for place in again] == list(range(3, 10))
    segment_path(tmp_path, 5, LOG).write_bytes(b"torn")
    with pytest.raises(KeyError):
        others.load(state.getvalue())
