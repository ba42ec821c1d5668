"""A launcher that lives is found from every host, whatever the clocks say; a dead one is not."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.launcher.run_folder import is_running, locked
from megatron_rl.observe import heartbeat
from megatron_rl.observe.heartbeat import (
    ALIVE,
    Beat,
    FolderTaken,
    Heartbeat,
    find_living,
    is_stopped,
    read_beat,
)
from megatron_rl.protocol.disk_room import WriteFailed

HOLD = """
import sys, time
from pathlib import Path
from megatron_rl.launcher.run_folder import locked
with locked(Path(sys.argv[1]), "waiting"):
    print("held", flush=True)
    time.sleep(600)
"""
# What a clock that goes wrong by a day makes of it does not count.
FAR = Beat("far", 7, "another machine", 5, time.time() + 86_400.0, "training", 3)


@pytest.mark.parametrize("how", ["gone", "read-only"])
def test_a_run_folder_that_is_lost_is_named_and_may_come_back(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    run_dir = small_disk / "run"
    run_dir.mkdir()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    with Heartbeat(run_dir) as beats:
        if how == "gone":
            run_dir.rename(small_disk / "elsewhere")
        else:
            subprocess.run(remount, check=True)
        await_fault(beats, has_one=True)
        beats.check()  # not for long enough
        if how == "gone":
            (small_disk / "elsewhere").rename(run_dir)
        else:
            subprocess.run([*remount[:2], "remount,rw", str(small_disk)], check=True)
        await_fault(beats, has_one=False)
        monkeypatch.setattr(heartbeat, "GONE_S", 0.2)
        beats.check()
        if how == "gone":
            run_dir.rename(small_disk / "elsewhere")
        else:
            subprocess.run(remount, check=True)
        await_fault(beats, has_one=True)
        time.sleep(0.3)
        said = {
            "gone": "the folder .*/run is gone. Bring it back",
            "read-only": "Mount its disk for",
        }
        with pytest.raises(WriteFailed, match=f"alive.json could not be written.*{said[how]}"):
            beats.check()


def await_fault(beats: Heartbeat, *, has_one: bool) -> None:
    until = time.monotonic() + 60
    while (beats._fault is not None) != has_one:
        assert time.monotonic() < until
        time.sleep(0.01)


def leave(folder: Path, beat: Beat) -> None:
    (folder / ALIVE).write_bytes(msgspec.json.encode(beat))


def beating(folder: Path, *beats: Beat) -> Callable[[float], None]:
    """Stands for time that passes while another host writes these."""
    rest = list(beats)
    return lambda seconds: leave(folder, rest.pop(0)) if rest else None


def test_a_launcher_on_another_host_lives_when_its_file_changes(tmp_path: Path) -> None:
    assert find_living(tmp_path) is None
    later = msgspec.structs.replace(FAR, count=4)
    for beats, found in [
        ((FAR, FAR, later), later),
        ((), None),
        ((FAR, msgspec.structs.replace(later, has_ended=True)), None),
    ]:
        leave(tmp_path, FAR)
        assert find_living(tmp_path, watch_s=1.0, wait=beating(tmp_path, *beats)) == found
    # Its file is torn between two beats.
    leave(tmp_path, FAR)
    looks = iter([lambda: (tmp_path / ALIVE).write_bytes(b"{"), lambda: leave(tmp_path, later)])
    assert find_living(tmp_path, wait=lambda seconds: next(looks)()) == later


def test_a_launcher_of_this_machine_is_found_dead_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        beat = read_beat(tmp_path)
        assert beat is not None and (beat.pid, beat.phase) == (holder.pid, "waiting")
        assert is_running(tmp_path)
        started = time.monotonic()
        said = f"a run is running in {tmp_path}: end it first, .* .it is pid {holder.pid} on "
        with pytest.raises(InputError, match=said), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        assert not is_running(tmp_path)
        with locked(tmp_path, "mine"):
            assert is_running(tmp_path)
    assert time.monotonic() - started < 60
    left = read_beat(tmp_path)
    assert left is not None and left.has_ended and left.pid == os.getpid()


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_heartbeat_keeps_a_second_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not is_running(tmp_path)
    with locked(tmp_path):
        assert "has no locks" in caplog.text and "-o flock" in caplog.text
        assert is_running(tmp_path)
        with pytest.raises(InputError, match="a run is running in"), locked(tmp_path):
            pass
    assert not is_running(tmp_path)


def test_a_launcher_notices_another_one_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    with Heartbeat(tmp_path) as own:
        for _ in range(200):
            if (beat := read_beat(tmp_path)) is not None and beat.count > 2:
                break
            time.sleep(0.02)
        assert beat is not None and beat.count > 2
        own.check()
        with pytest.raises(FolderTaken, match="taken by another launcher .pid 7 on far"):
            for _ in range(200):
                # The other one renews it, too: between a look and a write of ours one may be lost.
                leave(tmp_path, FAR)
                own.check()
                time.sleep(0.02)
    # The other one's heartbeat stays as it is.
    assert read_beat(tmp_path) == FAR


def test_a_launcher_that_a_signal_stopped_is_seen_on_its_own_host(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert launcher.stdout.readline() == "held\n"
        beat = read_beat(tmp_path)
        assert beat is not None and not is_stopped(beat)
        launcher.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(beat)
        assert not is_stopped(msgspec.structs.replace(beat, machine="another machine"))
    finally:
        launcher.kill()
        launcher.wait(60)
