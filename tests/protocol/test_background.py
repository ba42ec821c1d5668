"""Rows and log lines on a disk that stands still: the caller goes on, and nothing is lost."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.protocol import background
from megatron_rl.protocol.background import BackgroundJsonlWriter
from megatron_rl.protocol.disk_room import WriteFailed
from megatron_rl.protocol.process import set_up_logging
from tests.full_disk import fill_disk

TEXT = "x" * 1000
ROWS = 300
"""More than a pipe holds: 300 kB against 64 kB."""


def make_stuck_disk(path: Path) -> int:
    """A pipe that nobody reads: writing to it waits as soon as it is full."""
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def read_lines(pipe: int, count: int) -> list[str]:
    data, ends_at = b"", time.monotonic() + 60
    while data.count(b"\n") < count:
        assert time.monotonic() < ends_at, "lines are missing"
        try:
            data += os.read(pipe, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    return data.decode().splitlines()


def test_rows_are_written_by_a_thread_in_their_order(tmp_path: Path) -> None:
    pipe = make_stuck_disk(tmp_path / "metrics.jsonl")
    writer = BackgroundJsonlWriter(tmp_path / "metrics.jsonl", "queue")
    started = time.monotonic()
    for step in range(ROWS):
        writer.write(step, {"a": TEXT})
    assert time.monotonic() - started < 30.0
    rows = [json.loads(line) for line in read_lines(pipe, ROWS)]
    assert [row["step"] for row in rows] == list(range(ROWS))
    writer.close()
    assert not writer._thread.is_alive()
    os.close(pipe)


def test_rows_beyond_the_bound_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "WAITING_LINES", 5)
    monkeypatch.setattr(background, "CLOSE_S", 0.1)
    pipe = make_stuck_disk(tmp_path / "metrics.jsonl")
    writer = BackgroundJsonlWriter(tmp_path / "metrics.jsonl", "queue")
    for step in range(ROWS):
        writer.write(step, {"a": TEXT})
        # Lets the thread fill the pipe first.
        time.sleep(0.001)
    with caplog.at_level("WARNING"):
        writer.close()
    assert "metrics rows were lost" in caplog.text
    # At most what the pipe holds, what waits, and the row in the thread's hand.
    assert writer._line.dropped >= ROWS - 65 - 5 - 1
    os.set_blocking(pipe, False)
    os.close(pipe)


def test_rows_wait_for_room_and_none_is_torn(small_disk: Path) -> None:
    """Of two processes that share a file."""
    path = small_disk / "metrics.jsonl"
    with (
        BackgroundJsonlWriter(path, "queue", limit_s=60.0) as first,
        BackgroundJsonlWriter(path, "trainer", limit_s=60.0) as second,
    ):
        filler = fill_disk(small_disk, left_bytes=20_000)
        for step in range(100):
            first.write(step, {"a": TEXT})
            second.write(step, {"a": TEXT})
        # Whole pages are taken, and a row that does not fit is taken back.
        until = time.monotonic() + 60
        while path.stat().st_size < 12_000:
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        before = path.read_bytes()
        assert before.endswith(b"}\n") and before.count(b"\n") < 30
        filler.unlink()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for source in ("queue", "trainer"):
        assert [row["step"] for row in rows if row["source"] == source] == list(range(100))


def test_rows_without_room_end_the_process_after_the_limit(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    with BackgroundJsonlWriter(tmp_path / "metrics.jsonl", "queue", limit_s=0.5) as writer:
        writer.write(1, {"a": 1.0})
        assert writer._thread.is_alive()
        writer._thread.join(60)
        with pytest.raises(WriteFailed, match=r"metrics.jsonl could not .*No space left.* resumes"):
            writer.write(2, {"a": 1.0})


def test_log_lines_are_written_by_a_thread_with_one_prefix(tmp_path: Path) -> None:
    pipe = make_stuck_disk(tmp_path / "tester.log")
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up_logging("tester", tmp_path, in_background=True)
        started = time.monotonic()
        for number in range(ROWS):
            logging.getLogger("a").info("%d %s", number, TEXT)
        assert time.monotonic() - started < 30.0
        lines = read_lines(pipe, ROWS)
    finally:
        logging.basicConfig(handlers=before, level=level, force=True)
    assert [line.partition(" tester INFO a: ")[2] for line in lines] == [
        f"{number} {TEXT}" for number in range(ROWS)
    ]
    os.close(pipe)


@pytest.mark.parametrize("level", ["error", "exception"])
def test_a_process_that_ends_has_written_its_last_line(tmp_path: Path, level: str) -> None:
    script = (
        "import logging, sys; from pathlib import Path\n"
        "from megatron_rl.protocol.process import set_up_logging\n"
        "set_up_logging('tester', Path(sys.argv[1]), in_background=True)\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n"
        f"    logging.getLogger('a').{level}('the last words')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=200)
    text = (tmp_path / "tester.log").read_text()
    assert "ERROR a: the last words" in text
    assert ("ZeroDivisionError" in text) == (level == "exception")
