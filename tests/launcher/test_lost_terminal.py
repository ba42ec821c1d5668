"""A launcher whose terminal or pipe goes away stops after a checkpoint, as by any other signal."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

# Prints all the time, and plays a trainer that saves its step when it is asked to.
LAUNCHER = """
import pathlib, sys, time
from rich.console import Console
from megatron_rl.launcher.orderly_stop import OrderlyStop
from megatron_rl.observe.deaths import until_death
from megatron_rl.protocol.process import run_main
from megatron_rl.protocol.stop_request import answer_stop, is_stop_requested
folder, console = pathlib.Path(sys.argv[1]), Console()
def work():
    deadline = time.monotonic() + 60
    with OrderlyStop(folder, 30.0, 10) as stop:
        while not is_stop_requested(folder):
            assert time.monotonic() < deadline
            console.print(stop.check(has_trained=True) or 'step')
            (folder / 'ready').touch()
            time.sleep(0.05)
        console.print('checkpoint')
        answer_stop(folder, 7)
        stop.conclude()
def main():
    code = until_death(work)
    assert not code
sys.exit(run_main('launcher', main))
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_closed_terminal_is_a_first_signal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(theirs)
    wait_for(tmp_path / "ready")
    os.close(ours)
    assert launcher.wait(60) == 128 + signal.SIGHUP
    assert (tmp_path / "stopped").read_text() == "7\n"


def test_a_closed_pipe_ends_no_run(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    wait_for(tmp_path / "ready")
    os.close(ours)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "stopped").exists()
