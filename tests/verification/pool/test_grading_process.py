"""The verifier's end of a grading process, without a fork server."""

import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from megatron_rl.config.reward import WorkerPoolConfig
from tests.verification.requests import boxed, make_request
from verification.comparisons import FORKED
from verification.draft import Draft
from verification.format import FormatResult
from verification.pool.faults import HOST
from verification.pool.grading_process import GradingProcess, Item
from verification.pool.suspects import Suspects


@pytest.fixture
def process() -> Iterator[GradingProcess]:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as last_words:
        yield GradingProcess(0, ours, last_words)


def test_an_item_that_must_run_alone_gets_no_company(process: GradingProcess) -> None:
    draft = Draft(make_request(boxed("7")), FormatResult(answer="7"), ())
    quiet = Item(0, draft, frozenset(), faults=[HOST])
    other = Item(1, draft, frozenset())

    def fork(item: Item) -> GradingProcess:
        process.items.append(item)
        return process

    suspects = Suspects(WorkerPoolConfig(workers=4), fork, may_pause=False)
    suspects.doubtful = [quiet, other]
    assert [item for _, item in suspects.give_turns(0.0, is_busy=False)] == [quiet]
    assert list(suspects.give_turns(0.0, is_busy=False)) == []
    assert suspects.doubtful == [other]


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
