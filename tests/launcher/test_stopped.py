"""A role with a process that SIGSTOP stopped is found and killed, and its death is answered."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.launcher.stopped import StoppedProcesses

pytestmark = pytest.mark.timeout(300)

# A role, its child, and the child of that, each in a session of its own.
FAMILY = """
import os, subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    environment = os.environ | {'RANK': str(depth)}
    child = subprocess.Popen([sys.executable, '-c', sys.argv[2], str(depth - 1), sys.argv[2]],
                             start_new_session=True, env=environment)
print(os.getpid(), flush=True)
time.sleep(300)
"""
LIMIT_S = 30.0


@pytest.fixture
def family() -> Iterator[list[int]]:
    """Pids of a process, its child and the child of that."""
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY, "2", FAMILY], stdout=subprocess.PIPE, text=True
    )
    pids = [int(process.stdout.readline()) for _ in range(3)]
    first = process.pid
    [second] = children(first)
    [third] = children(second)
    assert sorted(pids) == sorted([first, second, third])
    yield [first, second, third]
    for pid in (third, second, first):
        os.kill(pid, signal.SIGKILL)
    process.wait(60)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_any_process_of_a_role_is_found_once_it_was_stopped_for_the_limit(
    family: list[int],
) -> None:
    role = family[0]
    found = StoppedProcesses(LIMIT_S)
    assert found.find({role: None}, 0.0) == {}
    stop(family[2])
    for now in (5.0, 10.0, 15.0, 20.0, 25.0, 30.0):
        assert found.find({role: None}, now) == {}
    # Between looks, every 5 s, nothing is looked up.
    assert found.find({role: None}, 34.9) == {}
    [(pid, (stopped, what, seconds))] = found.find({role: None}, 35.0).items()
    # Seen as stopped first at 5 s. The innermost was given RANK=1 by its parent.
    assert (pid, stopped, what, seconds) == (role, family[2], "rank 1", 30.0)
    os.kill(family[2], signal.SIGCONT)
    wait_until_runs(family[2])
    assert found.find({role: None}, 40.0) == {}
    stop(family[2])
    assert [found.find({role: None}, now) for now in (45.0, 50.0, 70.0)] == [{}] * 3


def wait_until_runs(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_generations_that_a_role_stops_itself_do_not_count(family: list[int]) -> None:
    found = StoppedProcesses(LIMIT_S)
    stop(family[2])
    for now in range(0, 100, 5):
        assert found.find({family[0]: 1}, float(now)) == {}
    stop(family[1])
    results = [found.find({family[0]: 1}, float(now)) for now in range(100, 140, 5)]
    assert results[-1][family[0]].pid == family[1]


def test_time_in_which_the_launcher_itself_stood_still_does_not_count(family: list[int]) -> None:
    found = StoppedProcesses(LIMIT_S)
    stop(family[0])
    found.find({family[0]: None}, 0.0)
    # An hour, as when a batch system suspends the whole job: at most two intervals count.
    assert found.find({family[0]: None}, 3600.0) == {}
    assert found.find({family[0]: None}, 3605.0) == {}
    assert found.find({family[0]: None}, 3620.0) == {}
    assert found.find({family[0]: None}, 3625.0)[family[0]].seconds == 10.0 + 5.0 + 10.0 + 5.0


ROLES = """
import pathlib, signal, subprocess, sys, time
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.supervisor import RoleDied, Supervisor
folder = pathlib.Path(sys.argv[1])
family = [sys.executable, '-c', sys.argv[2], '1', sys.argv[2]]
rule = RestartRule('generator-0', 3, 3600.0, 'trainer', folder / 'ready')
def pids(name, count):
    path, deadline = folder / 'logs' / f'{name}.out', time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [int(line) for line in path.read_text().split() if line.isdecimal()]
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(name)
def stop_last(supervisor, name):
    # The child: the process that the supervisor has not started.
    own = supervisor.roles[name].process.pid
    [child] = [pid for pid in pids(name, 2)[-2:] if pid != own]
    import os
    os.kill(child, signal.SIGSTOP)
    deadline, restarts = time.monotonic() + 60, []
    while not restarts and time.monotonic() < deadline:
        restarts = supervisor.check()
        time.sleep(0.02)
    return restarts
with Supervisor(folder / 'logs', first_pause_s=0.05, stopped_s=0.6, term_grace_s=0.5) as supervisor:
    supervisor.start('generator-0', family, restarts=rule)
    supervisor.start('trainer', family)
    pids('trainer', 2)
    [restart] = stop_last(supervisor, 'generator-0')
    print(restart.role, restart.exit_code, restart.why)
    try:
        stop_last(supervisor, 'trainer')
    except RoleDied as death:
        print(death)
"""


def test_a_stopped_child_restarts_its_role_and_a_stopped_rank_ends_the_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROLES, str(tmp_path), FAMILY],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    restarted, died = done.stdout.splitlines()[:2]
    text = r"rank 1 \(pid \d+\) was stopped by SIGSTOP for 1 s"
    assert re.fullmatch(f"generator-0 -9 {text}", restarted)
    assert re.match(f"trainer ended with signal 9; {text}", died)
