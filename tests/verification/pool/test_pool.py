import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.reward import TaskConfig, VerifierConfig, WorkerPoolConfig
from megatron_rl.protocol.types import ScoreDone, ScoreFailed, ScoreRequest
from tests.verification.requests import boxed, collect, make_request, make_rules
from verification.draft import Draft
from verification.pool.faults import Repetitions
from verification.pool.fork_client import ForkServerDied
from verification.pool.pool import Pool
from verification.pool.worker_pool import Finished
from verification.score import screen

TIMEOUT_S = 1.0
HOSTILE = "tests.verification.pool.hostile_tasks"
MISDEEDS = (
    "obey", "hang", "exit_at_once", "kill_itself", "segfault", "die_once", "raise_error",
    "eat_memory", "return_nothing", "no_such_task", "leave_grandchild", "list_open_files",
    "recurse",
)  # fmt: skip
RULES = make_rules(tasks={name: TaskConfig(compare=f"{HOSTILE}:{name}") for name in MISDEEDS})
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


def _limits(workers: int = 1, timeout_s: float = TIMEOUT_S) -> VerifierConfig:
    pool = WorkerPoolConfig(workers=workers, timeout_s=timeout_s)
    return VerifierConfig(answers=pool, language=pool, custom=pool)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(_limits(), RULES) as pool:
        yield pool


def _submit(pool: Pool, request: ScoreRequest) -> dict[int, Finished]:
    """Give a request to the pool, or return the score where plain text decides it."""
    found = screen(request, RULES)
    if isinstance(found, Draft):
        pool.submit(found)
        return {}
    return {request.request_id: ScoreDone(request.request_id, found)}


def _hostile(name: str, request_id: int, entry: str = "") -> ScoreRequest:
    return make_request(boxed("7"), task=name, request_id=request_id, entry=entry)


def _assert_graded(finished: dict[int, Finished], request_ids: range) -> None:
    for request_id in request_ids:
        reply = finished[request_id]
        assert isinstance(reply, ScoreDone)
        assert reply.score.is_correct is (request_id % 2 == 0), request_id


def _submit_neighbours(pool: Pool, request_ids: range) -> None:
    """Ordinary answers that need a computation: right for even ids."""
    for request_id in request_ids:
        box = f"(x+{request_id})(x-1)" if request_id % 2 == 0 else f"(x+{request_id})(x-2)"
        answer = f"x^2+({request_id}-1)x-{request_id}"
        _submit(pool, make_request(boxed(box), answer=answer, request_id=request_id))


def test_hung_task_is_killed_at_its_deadline_and_keeps_the_format_reward(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 6))
    _submit(pool, _hostile("hang", 100))
    _submit_neighbours(pool, range(6, 12))
    start = time.monotonic()
    finished = collect(pool, 120)
    elapsed_s = time.monotonic() - start
    _assert_graded(finished, range(12))
    hung = finished[100]
    assert isinstance(hung, ScoreDone)
    assert (hung.score.reward, hung.score.reason) == (0.1, "grading_timeout")
    # Tried again by a fresh process before it counts.
    assert pool.kills == 2
    assert elapsed_s < 2 * TIMEOUT_S + 60


def test_deadline_is_kept_when_processes_are_warm(pool: Pool) -> None:
    _submit(pool, _hostile("obey", 1))
    _submit(pool, _hostile("hang", 2))
    collect(pool, 120)
    _submit(pool, _hostile("obey", 3))
    collect(pool, 120)
    start = time.monotonic()
    _submit(pool, _hostile("hang", 4))
    collect(pool, 120)
    # Two deadlines, a fraction of a second to load the plugged-in function, and for a busy host.
    assert 2 * TIMEOUT_S * 0.9 < time.monotonic() - start < 2 * TIMEOUT_S + 60


def test_process_that_exits_is_our_own_failure_and_never_a_reward(pool: Pool) -> None:
    faulty = {
        100: ("exit_at_once", "exit code 7"),
        103: ("raise_error", "a bug in the user's reward"),
    }
    for request_id, (name, _) in faulty.items():
        _submit(pool, _hostile(name, request_id))
        _submit(pool, _hostile("obey", request_id + 100))
    finished = collect(pool, 120)
    for request_id, (_, reason) in faulty.items():
        failed, neighbour = finished[request_id], finished[request_id + 100]
        assert isinstance(failed, ScoreFailed)
        assert reason in failed.reason
        assert isinstance(neighbour, ScoreDone)
        assert neighbour.score.reward == 1.0
    # What exits is tried twice; an exception is told by the process, which lives on.
    assert pool.deaths == 2


def test_one_fault_of_many_completions_is_told_once_with_a_count(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    # Each of six is tried twice: 12 attempts end alike.
    for number in range(6):
        _submit(pool, _hostile("exit_at_once", number))
    assert len(collect(pool, 10)) == 6
    told = [message for message in caplog.messages if "attempt" in message]
    assert len(told) == 2 and "exit code 7" in told[0] and told[1].endswith("(10 times so far)")


def test_repetitions_are_told_at_powers_of_ten_and_new_faults_at_once() -> None:
    repetitions = Repetitions()
    told = [repetitions.note("deep") for _ in range(1200)]
    assert [n for n, text in enumerate(told, start=1) if text] == [1, 10, 100, 1000]
    assert told[999] == "deep (1,000 times so far)" and repetitions.note("other") == "other"
    # What is remembered is bounded; what is not counted is told.
    assert all(repetitions.note(f"fault {n}") for n in range(1000))
    assert repetitions.note("fault 999") == "fault 999"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kill_itself", "grading_crash"),
        ("segfault", "grading_crash"),
        ("eat_memory", "grading_memory"),
        ("recurse", "grading_depth"),
    ],
)
def test_poison_counts_as_the_completions_fault_when_it_fails_twice_alike(
    pool: Pool, name: str, reason: str
) -> None:
    _submit(pool, _hostile(name, 100))
    _submit_neighbours(pool, range(0, 4))
    finished = collect(pool, 120)
    poisoned = finished[100]
    assert isinstance(poisoned, ScoreDone)
    assert (poisoned.score.reward, poisoned.score.reason) == (0.1, reason)
    _assert_graded(finished, range(4))


def test_death_that_does_not_repeat_costs_nothing(pool: Pool, tmp_path: Path) -> None:
    _submit(pool, _hostile("die_once", 1, entry=str(tmp_path / "died")))
    reply = collect(pool, 120)[1]
    assert isinstance(reply, ScoreDone)
    assert reply.score.reward == 1.0
    assert pool.deaths == 1


def test_process_killed_from_outside_while_idle_is_replaced(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 2))
    collect(pool, 120)
    os.kill(pool.pids[0], signal.SIGKILL)
    _submit_neighbours(pool, range(2, 8))
    _assert_graded(collect(pool, 120), range(2, 8))


def test_process_killed_from_outside_at_work_loses_no_item(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 60))
    finished: dict[int, Finished] = {}
    while not finished:
        wait([pool], 0.05)
        finished |= {reply.request_id: reply for reply in pool.collect()}
    os.kill(pool.pids[0], signal.SIGKILL)
    finished |= collect(pool, 120)
    assert len(finished) == 60
    _assert_graded(finished, range(60))


def test_broken_or_unknown_plug_in_fails_with_its_name(pool: Pool) -> None:
    _submit(pool, _hostile("return_nothing", 1))
    _submit(pool, _hostile("no_such_task", 2))
    finished = collect(pool, 120)
    assert isinstance(finished[1], ScoreFailed)
    assert "returned None of the type NoneType, expected a bool" in finished[1].reason
    assert isinstance(finished[2], ScoreFailed)
    assert "no_such_task" in finished[2].reason


def test_other_pools_and_processes_work_on_while_one_hangs() -> None:
    with Pool(_limits(workers=2, timeout_s=6.0), RULES) as pool:
        _submit_neighbours(pool, range(0, 2))
        collect(pool, 120)
        _submit(pool, _hostile("hang", 100))
        pool.collect()
        _submit_neighbours(pool, range(2, 4))
        _submit(pool, _hostile("obey", 4))
        done: set[int] = set()
        while len(done) < 3:
            wait([pool], 0.05)
            done |= {reply.request_id for reply in pool.collect()}
        assert done == {2, 3, 4}
        assert pool.pending == 1


def test_slow_answer_leaves_its_worker_and_holds_up_nobody() -> None:
    with Pool(_limits(timeout_s=10.0), RULES) as pool:
        _submit_neighbours(pool, range(0, 2))
        collect(pool, 120)
        # About a second of computing: long, but within its limit.
        box = "\\sum_{n=1}^{3000} \\frac{1}{n^2}"
        _submit(pool, make_request(boxed(box), answer="\\frac{1}{7}+x", request_id=9))
        pool.collect()
        _submit_neighbours(pool, range(10, 30))
        order: list[int] = []
        deadline = time.monotonic() + 60
        while pool.pending:
            assert time.monotonic() < deadline
            wait([pool], 0.01)
            order += [reply.request_id for reply in pool.collect()]
        assert order[-1] == 9 and len(order) == 21
        assert (pool.kills, pool.deaths) == (0, 0)


def test_large_completions_pass_through(pool: Pool) -> None:
    thoughts = "é" * 1_000_000
    for request_id in range(6):
        text = f"<think>{thoughts}</think>\\boxed{{(x+1)(x-1)}}"
        _submit(pool, make_request(text, answer="x^2-1", request_id=request_id))
    finished = collect(pool, 120)
    assert all(isinstance(o, ScoreDone) and o.score.is_correct for o in finished.values())
    assert len(finished) == 6


def test_bombs_are_contained_and_ordinary_items_stay_right(pool: Pool) -> None:
    start = time.monotonic()
    finished: dict[int, Finished] = {}
    for number, bomb in enumerate(BOMBS):
        finished |= _submit(pool, make_request(boxed(bomb), request_id=1000 + number))
    _submit_neighbours(pool, range(0, 40))
    finished |= collect(pool, 100)
    _assert_graded(finished, range(40))
    for number, bomb in enumerate(BOMBS):
        reply = finished[1000 + number]
        assert isinstance(reply, ScoreDone), (bomb, reply)
        assert not reply.score.is_correct, bomb
        assert reply.score.reward <= 0.1
    # Each costs at most two deadlines and two new processes.
    assert time.monotonic() - start < len(BOMBS) * 2 * (TIMEOUT_S + 5)


def test_short_answers_are_graded_fast(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 2))
    collect(pool, 120)
    start = time.monotonic()
    _submit_neighbours(pool, range(0, 256))
    _assert_graded(collect(pool, 120), range(256))
    # Measured: 0.1 to 0.5 s; a process for each answer would need minutes.
    assert time.monotonic() - start < 30


def test_grading_process_inherits_nothing_but_its_socket(pool: Pool, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        _submit(pool, _hostile("list_open_files", 1, entry=str(report)))
        collect(pool, 120)
    opened = report.read_text().split()
    assert opened.count("socket") == 1
    assert "secret" not in report.read_text()
    assert "pipe" not in opened
    assert not [target for target in opened if "eventpoll" in target or "pidfd" in target]


def test_no_process_outlives_the_pool_and_none_is_a_zombie(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    # The test session may have helper processes of its own (resource trackers of other tests).
    before = set(psutil.Process().children(recursive=True))
    with Pool(_limits(workers=2), RULES) as pool:
        _submit(pool, _hostile("leave_grandchild", 1, entry=str(marker)))
        _submit(pool, _hostile("exit_at_once", 2))
        _submit(pool, _hostile("obey", 3))
        collect(pool, 120)
        assert pool.pids
        deadline = time.monotonic() + 60
        # The fork server and its live children: those that were killed are reaped within moments.
        while len(set(psutil.Process().children(recursive=True)) - before) > 1 + len(pool.pids):
            assert time.monotonic() < deadline, "a killed process is left"
            wait([pool], 0.05)
            pool.collect()
    assert set(psutil.Process().children(recursive=True)) <= before
    deadline = time.monotonic() + 60
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
    _assert_graded(collect(pool, 120), range(8))
    first = pool.pids
    _submit_neighbours(pool, range(8, 16))
    _assert_graded(collect(pool, 120), range(8, 16))
    assert pool.pids == first != []
    del ballast


def test_death_of_the_fork_server_loses_no_item_and_blames_none(pool: Pool) -> None:
    _submit_neighbours(pool, range(0, 60))
    finished: dict[int, Finished] = {}
    while not finished:
        wait([pool], 0.05)
        finished |= {reply.request_id: reply for reply in pool.collect()}
    os.kill(psutil.Process(pool.pids[0]).ppid(), signal.SIGKILL)
    finished |= collect(pool, 120)
    assert len(finished) == 60
    _assert_graded(finished, range(60))
    assert pool.deaths == 0


def _fork_server(pool: Pool) -> int:
    """Pid of the fork server, the parent of a worker.

    On a busy machine a worker may take long enough to become a suspect, which ends with its item.
    """
    for number in range(1000, 1030):
        if pool.pids:
            return psutil.Process(pool.pids[0]).ppid()
        _submit(pool, _hostile("obey", number))
        collect(pool, 120)
    raise AssertionError("no worker stayed after 30 items")


def test_a_suspect_gives_way_and_the_fork_server_does_not(pool: Pool, tmp_path: Path) -> None:
    # Where Linux groups processes by session, lowering the suspect's group before it has a session
    # of its own would lower the server's, and with it each later fork.
    for number in range(3):
        _submit(pool, _hostile("die_once", number, entry=str(tmp_path / str(number))))
        collect(pool, 120)
    server = _fork_server(pool)
    assert os.getpriority(os.PRIO_PROCESS, server) == 0
    group = Path(f"/proc/{server}/autogroup")
    assert not group.exists() or group.read_text().split()[-1] == "0"


def test_fork_server_that_keeps_dying_is_given_up(pool: Pool) -> None:
    with pytest.raises(ForkServerDied, match="died 3 times, now with exit code -9"):
        for start in range(0, 40, 10):
            _submit_neighbours(pool, range(start, start + 2))
            collect(pool, 120)
            os.kill(psutil.Process(pool.pids[0]).ppid(), signal.SIGKILL)
            time.sleep(0.2)
