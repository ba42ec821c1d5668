import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.protocol.config import VerifierConfig
from megatron_rl.protocol.types import ScoreDone, ScoreFailed, ScoreRequest
from tests.verification.requests import RULES, boxed, make_request
from verification.pool import Outcome, Pool

TIMEOUT_S = 1.0
HOSTILE = "tests.verification.hostile_tasks"
# Towers, factorials, sums and nests that made bare math-verify run out of time or memory.
BOMBS = [
    "9^{9^{9^{9}}}", "9**9**9**9", "10^{10^{10}}", "(((9^9)^9)^9)^9", "1000000!", "((3!)!)!",
    "\\sum_{n=1}^{10000000} \\frac{1}{n^2}", "\\prod_{n=1}^{1000000} n",
    "\\int_0^{1} \\sin(x^x)^{x^x} dx", "\\binom{10000000}{5000000}", "2^{9999}^{9999}",
    "(x+1)^{9999}", "(x+y+z)^{400}", "\\frac{" * 30 + "1" + "}{2}" * 30, "9" * 399,
    "\\sqrt{" * 25 + "2" + "}" * 25, "(" * 500, "+".join(f"x_{{{i}}}" for i in range(140)),
    "\\sin(" * 20 + "1" + ")" * 20, "\\lim_{x\\to 0} \\frac{\\sin(x^{99})}{x^{99}}",
    "\x00\x01", "\\begin{pmatrix}" + "1&" * 300 + "1\\end{pmatrix}", "\ud7ff" * 900,
]  # fmt: skip


@pytest.fixture
def pool() -> Iterator[Pool]:
    cfg = VerifierConfig(workers=1, timeout_s=TIMEOUT_S)
    with Pool(cfg, RULES) as pool:
        yield pool


def _collect(pool: Pool, limit_s: float) -> dict[int, Outcome]:
    """Outcomes by request id, once nothing is pending."""
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + limit_s
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} items are late"
        select.select([pool], [], [], 0.05)
        outcomes |= {outcome.request_id: outcome for outcome in pool.collect()}
    return outcomes


def _hostile(name: str, request_id: int, entry: str = "") -> ScoreRequest:
    return make_request(boxed("7"), task=f"{HOSTILE}:{name}", request_id=request_id, entry=entry)


def _assert_graded(outcomes: dict[int, Outcome], request_ids: range) -> None:
    for request_id in request_ids:
        outcome = outcomes[request_id]
        assert isinstance(outcome, ScoreDone)
        assert outcome.score.is_correct is (request_id % 2 == 0), request_id


def _submit_neighbours(pool: Pool, request_ids: range) -> None:
    """Ordinary math answers: right for even ids."""
    for request_id in request_ids:
        box = "\\frac{14}{2}" if request_id % 2 == 0 else "\\frac{15}{2}"
        pool.submit(make_request(boxed(box), request_id=request_id))


def test_hung_task_is_killed_at_its_deadline_and_keeps_the_format_reward(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 6))
    pool.submit(_hostile("hang", 100))
    _submit_neighbours(pool, range(6, 12))
    start = time.monotonic()
    outcomes = _collect(pool, 30)
    elapsed_s = time.monotonic() - start
    _assert_graded(outcomes, range(12))
    hung = outcomes[100]
    assert isinstance(hung, ScoreDone)
    assert (hung.score.reward, hung.score.reason) == (0.1, "grading_timeout")
    assert pool.kills == 1
    assert elapsed_s < TIMEOUT_S + 15


def test_deadline_is_kept_when_processes_are_warm(pool: Pool) -> None:
    pool.submit(_hostile("obey", 1))
    pool.submit(_hostile("hang", 2))
    _collect(pool, 30)
    pool.submit(_hostile("obey", 3))
    _collect(pool, 30)
    pool.submit(_hostile("hang", 4))
    start = time.monotonic()
    _collect(pool, 30)
    # A fraction of a second to load the plugged-in task, then the deadline.
    assert TIMEOUT_S * 0.9 < time.monotonic() - start < TIMEOUT_S + 3


def test_task_that_kills_its_process_fails_alone_and_is_never_a_reward(pool: Pool) -> None:
    deadly = {
        100: ("exit_at_once", "exit code 7"),
        101: ("kill_itself", "exit code -9"),
        102: ("segfault", "exit code -11"),
        103: ("raise_error", "a bug in the user's reward"),
    }
    for request_id, (name, _) in deadly.items():
        pool.submit(_hostile(name, request_id))
        pool.submit(_hostile("obey", request_id + 100))
    outcomes = _collect(pool, 60)
    for request_id, (_, reason) in deadly.items():
        failed, neighbour = outcomes[request_id], outcomes[request_id + 100]
        assert isinstance(failed, ScoreFailed)
        assert reason in failed.reason
        assert isinstance(neighbour, ScoreDone)
        assert neighbour.score.reward == 1.0
    assert pool.deaths == 2 * len(deadly)


def test_death_that_does_not_repeat_costs_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.submit(_hostile("die_once", 1, entry=str(tmp_path / "died")))
    outcome = _collect(pool, 30)[1]
    assert isinstance(outcome, ScoreDone)
    assert outcome.score.reward == 1.0
    assert pool.deaths == 1


def test_process_killed_from_outside_while_idle_is_replaced(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 2))
    _collect(pool, 30)
    os.kill(pool.pids[0], signal.SIGKILL)
    _submit_neighbours(pool, range(2, 8))
    _assert_graded(_collect(pool, 30), range(2, 8))


def test_process_killed_from_outside_at_work_loses_no_item(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 60))
    outcomes: dict[int, Outcome] = {}
    while not outcomes:
        select.select([pool], [], [], 0.05)
        outcomes |= {outcome.request_id: outcome for outcome in pool.collect()}
    os.kill(pool.pids[0], signal.SIGKILL)
    outcomes |= _collect(pool, 30)
    assert len(outcomes) == 60
    _assert_graded(outcomes, range(60))


def test_memory_beyond_the_limit_is_the_models_fault(pool: Pool) -> None:
    pool.submit(_hostile("eat_memory", 100))
    _submit_neighbours(pool, range(0, 4))
    outcomes = _collect(pool, 30)
    assert isinstance(outcomes[100], ScoreDone)
    assert outcomes[100].score.reason == "grading_memory"
    assert outcomes[100].score.reward == 0.1
    _assert_graded(outcomes, range(4))
    assert pool.deaths == 0


def test_broken_or_unknown_plug_in_fails_with_its_name(pool: Pool) -> None:
    pool.submit(_hostile("return_nothing", 1))
    pool.submit(_hostile("no_such_task", 2))
    outcomes = _collect(pool, 30)
    assert isinstance(outcomes[1], ScoreFailed)
    assert "returned NoneType, expected a Score" in outcomes[1].reason
    assert isinstance(outcomes[2], ScoreFailed)
    assert "no_such_task" in outcomes[2].reason


def test_second_process_works_on_while_the_first_hangs() -> None:
    with Pool(VerifierConfig(workers=2, timeout_s=6.0), RULES) as pool:
        _submit_neighbours(pool, range(0, 2))
        _collect(pool, 30)
        pool.submit(_hostile("hang", 100))
        pool.collect()
        # The first process is busy: these start the second one.
        _submit_neighbours(pool, range(2, 4))
        done: set[int] = set()
        while len(done) < 2:
            select.select([pool], [], [], 0.05)
            done |= {outcome.request_id for outcome in pool.collect()}
        assert done == {2, 3}
        assert len(pool.pids) == 2
        assert pool.pending == 1


def test_large_completions_pass_through(pool: Pool) -> None:
    thoughts = "é" * 1_000_000
    for request_id in range(6):
        text = f"<think>{thoughts}</think>\\boxed{{\\frac{{14}}{{2}}}}"
        pool.submit(make_request(text, request_id=request_id))
    outcomes = _collect(pool, 30)
    assert all(isinstance(o, ScoreDone) and o.score.is_correct for o in outcomes.values())
    assert len(outcomes) == 6


def test_bombs_are_contained_and_ordinary_items_stay_right(pool: Pool) -> None:
    start = time.monotonic()
    for number, bomb in enumerate(BOMBS):
        pool.submit(make_request(boxed(bomb), request_id=1000 + number))
    _submit_neighbours(pool, range(0, 40))
    outcomes = _collect(pool, 100)
    _assert_graded(outcomes, range(40))
    for number, bomb in enumerate(BOMBS):
        outcome = outcomes[1000 + number]
        assert isinstance(outcome, ScoreDone), (bomb, outcome)
        assert not outcome.score.is_correct, bomb
        assert outcome.score.reward <= 0.1
    # Each costs at most its deadline and a new process.
    assert time.monotonic() - start < len(BOMBS) * (TIMEOUT_S + 2)


def test_short_answers_are_graded_fast(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 2))
    _collect(pool, 30)
    start = time.monotonic()
    _submit_neighbours(pool, range(0, 256))
    _assert_graded(_collect(pool, 30), range(256))
    # Measured: 0.1 to 0.5 s; the bound allows for a crowded machine.
    assert time.monotonic() - start < 10


def test_grading_process_inherits_nothing_but_its_socket(pool: Pool, tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        pool.submit(_hostile("list_open_files", 1))
        outcome = _collect(pool, 30)[1]
    assert isinstance(outcome, ScoreDone)
    opened = outcome.score.reason.split()
    assert opened.count("socket") == 1
    assert "secret" not in outcome.score.reason
    assert "pipe" not in opened


def test_no_process_outlives_the_pool_and_none_is_a_zombie(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    # The test session may have helper processes of its own (resource trackers of other tests).
    before = set(psutil.Process().children(recursive=True))
    with Pool(VerifierConfig(workers=2, timeout_s=TIMEOUT_S), RULES) as pool:
        pool.submit(_hostile("leave_grandchild", 1, entry=str(marker)))
        pool.submit(_hostile("exit_at_once", 2))
        pool.submit(_hostile("obey", 3))
        _collect(pool, 30)
        assert pool.pids
        started = set(psutil.Process().children()) - before
        assert {process.pid for process in started} == set(pool.pids)
    assert set(psutil.Process().children(recursive=True)) <= before
    deadline = time.monotonic() + 5
    while _is_alive(int(marker.read_text())):
        assert time.monotonic() < deadline, "a grandchild lives"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_processes_of_a_big_parent_do_not_retire_for_its_memory(pool: Pool) -> None:
    # Linux counts what the parent held before exec in the child's ru_maxrss.
    ballast = bytearray(b"x" * 1_200_000_000)
    _submit_neighbours(pool, range(0, 8))
    _assert_graded(_collect(pool, 30), range(8))
    first = pool.pids
    _submit_neighbours(pool, range(8, 16))
    _assert_graded(_collect(pool, 30), range(8, 16))
    assert pool.pids == first != []
    del ballast
