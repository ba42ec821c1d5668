"""The supervisor leaves nothing behind, however its children and it end.

Each test runs a launcher in a process of its own: the Supervisor makes its process a subreaper.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(300)

# Ignores SIGTERM, has a grandchild that ignores it too, and writes both pids.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)'
child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)
import os
pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {child.pid}')
time.sleep(300)
"""
# Its child is an orphan at once: its own parent ends right after starting it.
ORPHAN_MAKER = """
import pathlib, subprocess, sys, time
inner = ('import subprocess, sys; print(subprocess.Popen([sys.executable, "-c", '
         '"import time; time.sleep(300)"], start_new_session=True, stdout=subprocess.DEVNULL).pid)')
pid = subprocess.check_output([sys.executable, '-c', inner], text=True).strip()
pathlib.Path(sys.argv[1]).write_text(pid)
time.sleep(300)
"""
# Its grandchildren end as orphans, as the innermost process of a sandbox does.
LITTERER = """
import pathlib, subprocess, sys, time
inner = 'import os, time; [os.fork() or (time.sleep(0.5), os._exit(0)) for _ in range(20)]'
subprocess.run([sys.executable, '-c', inner], check=True)
pathlib.Path(sys.argv[1]).write_text('')
time.sleep(300)
"""
SLEEPER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(300)
"""
# Starts all scripts of a folder, waits until each wrote its pids, then watches them or leaves.
LAUNCHER = """
import pathlib, sys, time
from megatron_rl.protocol.process import run_main
from megatron_rl.launcher.supervisor import RoleDied, Supervisor
folder = pathlib.Path(sys.argv[1])
def main():
    with Supervisor(folder / 'logs', term_grace_s=float(sys.argv[2])) as supervisor:
        for script in sorted(folder.glob('*.py')):
            pids = script.with_suffix('.pids')
            supervisor.start(script.stem, [sys.executable, str(script), str(pids)])
        deadline = time.monotonic() + 60
        while len(list(folder.glob('*.pids'))) < len(list(folder.glob('*.py'))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (folder / 'ready').touch()
        if len(sys.argv) > 3:
            return
        while time.monotonic() < deadline + 30:
            supervisor.check()
            time.sleep(0.05)
try:
    sys.exit(run_main('launcher', main))
except RoleDied as death:
    print(death)
    sys.exit(1)
"""


def start_launcher(
    folder: Path, scripts: dict[str, str], *arguments: str, term_grace_s: float = 100.0
) -> subprocess.Popen[str]:
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), str(term_grace_s), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until_ready(folder: Path) -> None:
    deadline = time.monotonic() + 100
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline, "the launcher's children did not start"
        time.sleep(0.05)


def started_processes(folder: Path) -> list[psutil.Process]:
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    assert pids
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def alive_after(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run; a zombie that waits for its parent's look does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        left = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not left:
            return []
        time.sleep(0.05)
    return left


def test_stubborn_child_and_grandchild_are_gone_after_the_grace(tmp_path: Path) -> None:
    scripts = {"stubborn": STUBBORN, "orphan_maker": ORPHAN_MAKER}
    launcher = start_launcher(tmp_path, scripts, term_grace_s=2.0)
    wait_until_ready(tmp_path)
    processes = started_processes(tmp_path)
    assert len(processes) == 3
    asked = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    assert 2.0 <= time.monotonic() - asked < 40.0
    assert alive_after(processes, 2.0) == []


def test_second_interrupt_during_the_stop_ends_all_at_once(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, {"stubborn": STUBBORN})
    wait_until_ready(tmp_path)
    processes = started_processes(tmp_path)
    launcher.send_signal(signal.SIGINT)
    time.sleep(2.0)
    asked = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 128 + signal.SIGINT
    # The first one alone gives a process that ignores it 100 s.
    assert time.monotonic() - asked < 40.0
    assert alive_after(processes, 2.0) == []


def test_children_that_obey_end_at_once(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, {"a": SLEEPER, "b": SLEEPER}, "leave")
    wait_until_ready(tmp_path)
    processes = started_processes(tmp_path)
    asked = time.monotonic()
    assert launcher.wait(60) == 0
    assert time.monotonic() - asked < 40.0
    assert alive_after(processes, 2.0) == []


@pytest.mark.parametrize("code", [2, 3])
def test_death_of_one_role_ends_the_others_and_shows_its_log(tmp_path: Path, code: int) -> None:
    dying = SLEEPER.replace(
        "time.sleep(300)", f"time.sleep(1); print('the disk is full'); sys.exit({code})"
    )
    launcher = start_launcher(tmp_path, {"dying": dying, "healthy": SLEEPER})
    wait_until_ready(tmp_path)
    processes = started_processes(tmp_path)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert f"dying ended with exit code {code}" in output
    assert "the disk is full" in output
    assert alive_after(processes, 2.0) == []


def test_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, {"a": SLEEPER, "b": SLEEPER})
    wait_until_ready(tmp_path)
    processes = started_processes(tmp_path)
    launcher.kill()
    launcher.wait(60)
    assert alive_after(processes, 60.0) == []


EARLY_END = """
import pathlib, sys, time
from megatron_rl.launcher.supervisor import RoleDied, Supervisor
with Supervisor(pathlib.Path(sys.argv[1]), early_end_grace_s=0.5) as supervisor:
    supervisor.start('queue', [sys.executable, '-c', 'import time; time.sleep(300)'])
    supervisor.start('generator', [sys.executable, '-c', 'print("bye")'], outlives='queue')
    for _ in range(200):
        try:
            supervisor.check()
        except RoleDied as death:
            print(death)
            break
        time.sleep(0.05)
"""


def test_orphans_that_ended_are_forgotten_while_the_roles_go_on(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, {"litterer": LITTERER})
    wait_until_ready(tmp_path)
    children = psutil.Process(launcher.pid).children
    deadline = time.monotonic() + 60
    # The role itself is left.
    while len(children()) > 1:
        assert time.monotonic() < deadline, children()
        time.sleep(0.05)
    assert launcher.poll() is None and children()[0].status() != psutil.STATUS_ZOMBIE
    launcher.terminate()
    assert launcher.wait(60) == 128 + signal.SIGTERM


def test_role_that_ends_before_it_was_told_counts_as_dead(tmp_path: Path) -> None:
    output = subprocess.check_output(
        [sys.executable, "-c", EARLY_END, str(tmp_path)], text=True, timeout=60
    )
    assert "generator ended with exit code 0" in output
    assert "bye" in output


FAILING_RANK = """
import os, sys, time
if os.environ['RANK'] == '1':
    print('rank 1: parallel.tensor does not fit', file=sys.stderr, flush=True)
    sys.exit(2)
time.sleep(300)
"""
TORCHRUN = """
import pathlib, sys, time
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.config.tree import Config
from megatron_rl.launcher.supervisor import RoleDied, Supervisor
folder = pathlib.Path(sys.argv[1])
port = resolve_ports(Config()).ports.torchrun
with Supervisor(folder / 'logs') as supervisor:
    supervisor.start('trainer', [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node',
        '2', '--master-addr', '127.0.0.1', '--master-port', str(port), str(folder / 'rank.py')])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            supervisor.check()
        except RoleDied as death:
            print(death)
            sys.exit(1)
        time.sleep(0.1)
"""


def test_exit_code_and_words_of_a_failed_rank_come_through_torchrun(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(FAILING_RANK)
    done = subprocess.run(
        [sys.executable, "-c", TORCHRUN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "trainer ended with exit code 2" in done.stdout
    assert "rank 1: parallel.tensor does not fit" in done.stdout
    assert "ChildFailedError" not in done.stdout


# A role that fails and may, and one that ends well.
EXPENDABLE = """
import pathlib, sys, time
from megatron_rl.launcher.supervisor import Supervisor
with Supervisor(pathlib.Path(sys.argv[1])) as supervisor:
    supervisor.start('spare', [sys.executable, '-c', 'raise SystemExit(3)'], is_expendable=True)
    supervisor.start('work', [sys.executable, '-c', 'import time; time.sleep(1)'])
    deadline = time.monotonic() + 60
    while supervisor.is_running('work') or supervisor.is_running('spare'):
        assert time.monotonic() < deadline
        supervisor.check()
        time.sleep(0.05)
    supervisor.check()
"""


def test_the_death_of_an_expendable_role_is_told_and_ends_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPENDABLE, str(tmp_path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "spare" in done.stderr and "the run continues without it" in done.stderr
