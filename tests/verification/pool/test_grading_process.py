"""The verifier's end of a grading process, without a fork server."""

import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from verification.comparisons import FORKED
from verification.pool.grading_process import GradingProcess


@pytest.fixture
def process() -> Iterator[GradingProcess]:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as last_words:
        yield GradingProcess(0, ours, last_words)


def dead_child() -> tuple[int, int]:
    """(pid, pidfd) of a child that is reaped already."""
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    return pid, pidfd


def test_a_child_that_is_reaped_but_not_yet_reported_may_be_killed(process: GradingProcess) -> None:
    process.on_birth(*dead_child())
    process.kill()
    process.on_death(3)
    process.kill()
    assert process.exit_code == 3


def test_so_may_one_that_was_doomed_before_its_birth(process: GradingProcess) -> None:
    process.kill()
    process.on_birth(*dead_child())
    process.on_death(3)
    assert process.exit_code == 3


def test_a_child_that_forked_is_found_once_and_is_no_last_word() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as stderr:
        process = GradingProcess(0, ours, stderr)
        os.write(stderr.fileno(), f"a word\n\n'mine:f' {FORKED}\n".encode())
        assert process.find_forks() == [f"'mine:f' {FORKED}"] and process.find_forks() == []
        assert process.last_words() == "a word"
