"""Roles that die are started again, alone and within limits, by a launcher of their own process."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.supervisor import RoleDied, Supervisor
from tests.ports import free_port

pytestmark = pytest.mark.timeout(300)

PAUSE_S = 0.3
# Its server holds a port, has a child, and outlives it: nothing but the launcher would end them.
GENERATOR = """
import os, pathlib, signal, subprocess, sys, time
folder, port, exit_code, is_ready = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
server = '''
import signal, socket, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with socket.create_server(('127.0.0.1', int(sys.argv[1]))):
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'],
                             start_new_session=True, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(300)
'''
print('generator says hello', flush=True)
if is_ready:
    process = subprocess.Popen([sys.executable, '-c', server, str(port)], start_new_session=True,
                               stdout=subprocess.PIPE, text=True)
    grandchild = process.stdout.readline().strip()
    assert grandchild, 'the server could not bind'
    pathlib.Path(os.environ['MEGATRON_RL_READY_FILE']).touch()
    with (folder / 'lives').open('a') as file:
        file.write(f'{os.getpid()} {process.pid} {grandchild}\\n')
if exit_code >= 0:
    sys.exit(exit_code)
time.sleep(300)
"""
UNTIL_TOLD = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""
LAUNCHER = """
import pathlib, sys, time
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.supervisor import RoleDied, Supervisor
folder, limit, pause_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
generator = [sys.executable, str(folder / 'generator.py'), *sys.argv[4:]]
# The generator's server ignores SIGTERM, so every end takes this long.
with Supervisor(folder / 'logs', first_pause_s=pause_s, term_grace_s=1.0) as supervisor:
    for name in ('queue', 'trainer'):
        supervisor.start(name, [sys.executable, str(folder / 'told.py'), str(folder / name)])
    rule = RestartRule('generator-0', limit, 3600.0, 'trainer', folder / 'ready')
    supervisor.start('generator-0', generator, outlives='queue', restarts=rule)
    while supervisor.is_running('queue'):
        try:
            for restart in supervisor.check():
                print(restart, flush=True)
        except RoleDied as death:
            print(death)
            sys.exit(1)
        time.sleep(0.02)
    time.sleep(2 * pause_s)
    assert not supervisor.check()
"""


class Launched:
    """A launcher with a queue, a trainer and a generator."""

    def __init__(
        self, folder: Path, limit: int, *, exit_code: int = -1, is_ready: bool = True
    ) -> None:
        self.folder = folder
        (folder / "generator.py").write_text(GENERATOR)
        (folder / "told.py").write_text(UNTIL_TOLD)
        arguments = [folder, limit, PAUSE_S, folder, free_port(), exit_code, int(is_ready)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def life(self, number: int) -> list[int]:
        """Generator, server and the server's child of one life, once it was ready: their pids."""
        path = self.folder / "lives"
        deadline = time.monotonic() + 100
        while not path.exists() or path.read_text().count("\n") <= number:
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, f"life {number} of the generator did not come"
            time.sleep(0.02)
        return [int(pid) for pid in path.read_text().splitlines()[number].split()]

    def tell_to_end(self, name: str) -> None:
        (self.folder / name).touch()

    def end(self) -> tuple[int, str]:
        """Exit code and output of the launcher."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    @property
    def generator_log(self) -> str:
        return (self.folder / "logs" / "generator-0.out").read_text()


@contextmanager
def launched(folder: Path, limit: int, **generator: int) -> Iterator[Launched]:
    run = Launched(folder, limit, **generator)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.communicate(timeout=60)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_killed_generator_comes_back_and_nothing_of_the_dead_one_is_left(tmp_path: Path) -> None:
    with launched(tmp_path, limit=2) as run:
        for number in range(2):
            generator, *left_behind = run.life(number)
            killed_at = time.monotonic()
            os.kill(generator, signal.SIGKILL)
            new = run.life(number + 1)  # it holds the same port
            assert time.monotonic() - killed_at > PAUSE_S * 2**number
            assert not any(is_alive(pid) for pid in left_behind)
            assert all(is_alive(pid) for pid in new)
        run.tell_to_end("queue")
        code, output = run.end()
    assert code == 0
    assert re.findall(r"exit_code=(-?\d+), count=(\d)", output) == [("-9", "1"), ("-9", "2")]
    assert run.generator_log.count("generator says hello") == 3
    assert "--- ended with signal 9; restart 2 of 2 ---" in run.generator_log
    assert not any(is_alive(pid) for pid in new)


@pytest.mark.exhaustive
def test_the_run_ends_when_the_restarts_are_used_up(tmp_path: Path) -> None:
    with launched(tmp_path, limit=1, exit_code=3) as run:
        lives = run.life(0) + run.life(1)
        code, output = run.end()
    assert code == 1
    assert "generator-0 ended with exit code 3; its restarts are used up" in output
    assert "generator says hello" in output
    assert not any(is_alive(pid) for pid in lives)


def test_without_restarts_a_death_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, limit=0) as run:
        os.kill(run.life(0)[0], signal.SIGKILL)
        code, output = run.end()
    assert code == 1
    assert (
        "generator-0 ended with signal 9; it is not restarted (expert.generator.max_restarts = 0)"
        in (output)
    )


@pytest.mark.parametrize("exit_code", [2, 1])
def test_generator_that_was_never_ready_ends_the_run(tmp_path: Path, exit_code: int) -> None:
    with launched(tmp_path, limit=3, exit_code=exit_code, is_ready=False) as run:
        code, output = run.end()
    assert code == 1
    assert f"ended with exit code {exit_code}; not restarted, because it was never" in output
    assert run.generator_log.count("generator says hello") == 1


@pytest.mark.exhaustive
def test_bad_input_after_it_was_ready_is_restarted(tmp_path: Path) -> None:
    with launched(tmp_path, limit=1, exit_code=2) as run:
        run.life(1)
        assert run.end()[0] == 1


def test_generator_that_dies_while_the_run_ends_is_not_restarted(tmp_path: Path) -> None:
    with launched(tmp_path, limit=3) as run:
        os.kill(run.life(0)[0], signal.SIGKILL)
        run.tell_to_end("queue")  # within the pause
        code, output = run.end()
    assert (code, output) == (0, "")


@pytest.mark.exhaustive
def test_generator_that_dies_after_the_trainer_ended_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, limit=3) as run:
        generator = run.life(0)[0]
        run.tell_to_end("trainer")
        time.sleep(0.5)
        os.kill(generator, signal.SIGKILL)
        code, output = run.end()
    assert code == 1 and "generator-0 ended with signal 9; it is too late for a restart" in output


GIVEN_UP = """
import dataclasses, pathlib, signal, sys, time
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.supervisor import Supervisor
folder = pathlib.Path(sys.argv[1])
good = [sys.executable, '-c', 'import time; time.sleep(300)']
bad = [sys.executable, '-c', 'raise SystemExit(1)']
rule = RestartRule('generator-0', 1, 5.0, 'trainer', folder / 'ready-0', replicas=2)
with Supervisor(folder / 'logs', first_pause_s=0.05) as supervisor:
    for name, command in (('generator-0', good), ('generator-1', bad)):
        own = dataclasses.replace(rule, replica=name, ready_path=folder / f'{name}.ready')
        supervisor.start(name, command, restarts=own)
    started, restarts = time.monotonic(), []
    while len(restarts) < 2 and time.monotonic() < started + 60:
        restarts += [(r.role, time.monotonic() - started) for r in supervisor.check()]
        if len(restarts) == 1 and supervisor.roles['generator-1'].is_given_up:
            print('given up', supervisor.replicas.given_up)
            supervisor.roles['generator-1'].is_given_up = False
        time.sleep(0.02)
    print([role for role, _ in restarts], restarts[1][1] - restarts[0][1] > 4.9)
    assert supervisor.is_running('generator-0')
"""


def test_the_run_continues_without_a_replica_whose_restarts_are_used_up(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_UP, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    # The second restart comes when the first one, 5 s ago, counts no more.
    assert done.stdout.splitlines() == [
        "given up {'generator': 1}", "['generator-1', 'generator-1'] True"
    ]  # fmt: skip
    assert "the run continues with 1 of 2 generators" in done.stderr


HANGING = """
import pathlib, signal, sys, time
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.supervisor import Supervisor
folder = pathlib.Path(sys.argv[1])
ready = folder / 'ready'
rule = RestartRule('verifier', 3, 3600.0, 'trainer', ready, kind='verifier')
with Supervisor(folder / 'logs', first_pause_s=0.05, silence_s=1.5) as supervisor:
    role = supervisor.start('verifier', ['sleep', '300'], restarts=rule)
    role.process.send_signal(signal.SIGSTOP)
    def look(seconds, missing):
        ends_at, restarts = time.monotonic() + seconds, []
        while time.monotonic() < ends_at and not restarts:
            restarts = supervisor.check()
            supervisor.end_silent(missing)
            time.sleep(0.02)
        return [restart.exit_code for restart in restarts]
    print(look(2.0, ['verifier']), 'not ready yet')
    ready.touch()
    print(look(0.5, ['verifier']), look(0.5, []), look(0.5, ['verifier']), 'heard in between')
    print(look(60.0, ['verifier']), 'hangs')
"""


def test_a_role_that_the_queue_misses_for_long_is_killed_and_restarted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[] not ready yet", "[] [] [] heard in between", "[-9] hangs"
    ]  # fmt: skip
    assert "killing verifier: it hangs: the queue has not heard it" in done.stderr


@pytest.mark.parametrize("is_done", [True, False])
def test_a_trainer_killed_after_the_queue_ended_ends_the_run_unless_all_is_saved(
    tmp_path: Path, is_done: bool
) -> None:
    work = (
        f"import os; from megatron_rl.protocol.process import note_done; {is_done} and note_done()"
    )
    rule = RestartRule(
        "trainer", 10, 3600.0, "queue", tmp_path / "ready", "trainer", only_killed=True
    )
    with Supervisor(tmp_path / "logs", first_pause_s=0.1) as supervisor:
        supervisor.start("queue", [sys.executable, "-c", ""])
        while supervisor.is_running("queue"):
            supervisor.check()
        trainer = supervisor.start(
            "trainer", [sys.executable, "-c", f"{work}; os.kill(os.getpid(), 9)"], restarts=rule
        )
        trainer.process.wait()
        if is_done:
            assert supervisor.check() == [] and not supervisor.is_running("trainer")
        else:
            with pytest.raises(RoleDied, match="too late for a restart"):
                supervisor.check()
