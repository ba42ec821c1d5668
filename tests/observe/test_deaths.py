"""Of several processes that fail, the person is shown the error of the one that failed first."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.launcher.supervisor import Supervisor
from megatron_rl.observe.deaths import Ending, RoleDied, explain_death, until_death
from megatron_rl.protocol.failure import FAILURE_VARIABLE, Failure, first_failure
from megatron_rl.protocol.process import Interrupted, failures_noted, run_main

# Rank 0 waits for a byte of rank 1, which does what argv says; then its connection breaks.
RANKS = """
import os, pathlib, signal, socket, sys, time
from megatron_rl.protocol.process import failures_noted, run_main
place = pathlib.Path(__file__).with_name('socket')

def rank_0():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(1)
        peer, _ = listener.accept()
        with failures_noted():
            if not peer.recv(1):
                raise ConnectionError('connection closed by peer')

def rank_1():
    peer = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + 60
    while peer.connect_ex(str(place)) and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        with failures_noted():
            FAIL
    finally:
        peer.close()  # now rank 0 fails, and has ended long before this rank
        time.sleep(1)

sys.exit(run_main('rank', rank_1 if os.environ['RANK'] == '1' else rank_0))
"""
LAUNCHER = """
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


@pytest.mark.parametrize(
    ("fail", "exit_code", "shown", "hidden"),
    [
        (
            "raise FileExistsError('hf/final exists already')",
            1,
            ["trainer ended with exit code 1. trainer, rank 1 failed first",
             "    FileExistsError: hf/final exists already"],
            "connection closed by peer",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            1,
            ["trainer ended with signal 9 of rank 1", "The end of"],
            "failed first",
        ),
    ],
)  # fmt: skip
@pytest.mark.timeout(300)
def test_the_error_of_the_rank_that_failed_first_is_shown(
    tmp_path: Path, fail: str, exit_code: int, shown: list[str], hidden: str
) -> None:
    (tmp_path / "rank.py").write_text(RANKS.replace("FAIL", fail))
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == exit_code, done.stdout + done.stderr
    for text in shown:
        assert text in done.stdout
    assert hidden not in done.stdout
    if "raise" in fail:  # after a kill torchrun ends rank 0, perhaps before it fails by itself
        assert "connection closed by peer" in (tmp_path / "logs" / "trainer.out").read_text()


def test_the_first_note_of_a_process_stays_and_the_earliest_of_a_run_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role, rank in (("trainer", "1"), ("trainer", "0"), ("queue", None)):
        monkeypatch.setenv(FAILURE_VARIABLE, str(tmp_path / role))
        if rank is None:
            monkeypatch.delenv("RANK")
        else:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(RuntimeError), failures_noted():
            try:
                with failures_noted():
                    raise InputError(f"{role} {rank}: lower parallel.tensor")
            finally:
                raise RuntimeError("while closing")
    first = first_failure(tmp_path, 0.0)
    assert first is not None and first.pid == os.getpid()
    assert (first.who, first.exit_code) == ("trainer, rank 1", 2)
    assert first.text == "trainer 1: lower parallel.tensor"
    assert len(list(tmp_path.iterdir())) == 3
    assert first_failure(tmp_path, first.time_s + 3600.0) is None


def test_what_earlier_starts_left_in_the_log_is_not_blamed(tmp_path: Path) -> None:
    log = tmp_path / "trainer.out"
    log.write_text("failed (exitcode: 2) local_rank: 0\n  rank      : 0 (local_rank: 0)\n"
                   "  exitcode  : -9 (pid: 7)\n")  # fmt: skip
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("the port is taken\n")
    death = explain_death(Ending("trainer", 1, log, start), None)
    assert death.exit_code == 1
    assert str(death).endswith(f"The end of {log}:\n    the port is taken")


def test_a_role_may_die_of_what_ended_another(tmp_path: Path) -> None:
    first = Failure(5.0, "queue", 2, "no such task: maths", 7)
    death = explain_death(Ending("trainer", 1, tmp_path / "none", 0), first, "a remark")
    assert death.exit_code == 2
    assert str(death) == (
        "trainer ended with exit code 2; a remark. queue failed first "
        f"(all output: {tmp_path / 'none'}):\n    no such task: maths"
    )


def test_exit_code_2_is_for_what_was_refused_before_anything_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*, is_started: bool) -> None:
        with Supervisor(tmp_path / "logs") as supervisor:
            if is_started:
                supervisor.start("queue", [sys.executable, "-c", "import time; time.sleep(600)"])
            raise InputError("disk full")

    def die() -> None:
        raise RoleDied("trainer", 2, "trainer ended with exit code 2")

    assert run_main("launcher", lambda: refuse(is_started=False)) == 2
    started = partial(refuse, is_started=True)
    for work, command in ((started, "same"), (die, "corrected")):
        assert until_death(work, lambda: "The same command resumes.") == 1
        assert caplog.messages[-1] == f"The {command} command resumes."


@pytest.mark.parametrize(("exit_code", "is_told"), [(2, True), (1, False), (-9, False)])
def test_bad_input_of_a_rank_is_to_be_corrected_first(
    exit_code: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        raise RoleDied("sft", exit_code, "sft ended")

    assert until_death(work, lambda: "The same command resumes.") == 1
    told = ["Correct the input first: it would end the run again."] if is_told else []
    command = "corrected" if is_told else "same"
    assert caplog.messages == ["sft ended", *told, f"The {command} command resumes."]


def test_a_signal_ends_with_the_words_of_what_can_be_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupt() -> None:
        raise Interrupted(128 + 15)

    with pytest.raises(Interrupted):
        until_death(interrupt, lambda: "The same command resumes.")
    assert caplog.messages == ["ended by signal 15. The same command resumes."]
