import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import signal, sys, time
# Who starts the tests under nohup ignores it, and so do its children.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from megatron_rl.config.files import ConfigError
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from pathlib import Path
set_up_logging("tester", Path(sys.argv[1]))
class Resource:
    def __enter__(self): return self
    def __exit__(self, *error): print("closed", flush=True)
def main():
    with Resource():
        {body}
sys.exit(run_main("tester", main))
"""


def start(folder: Path, body: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{body}", body), str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0), (r"raise InputError('\x1b]0;mend me\x07')", 2),
        ("raise ConfigError('mend me')", 2),
        ("raise WireError('mend me')", 2), ("raise DeadlineExceeded('mend me')", 1),
    ],
)  # fmt: skip
def test_errors_that_a_person_can_mend_are_one_line_and_an_exit_code(
    tmp_path: Path, body: str, code: int
) -> None:
    process = start(tmp_path, body)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (code, "closed\n")
    assert "Traceback" not in errors and errors.replace("\n", "").isprintable()
    assert ("mend me" in (tmp_path / "tester.log").read_text()) == (code != 0)


def test_our_own_fault_keeps_its_traceback_and_exits_1(tmp_path: Path) -> None:
    process = start(tmp_path, "raise KeyError('bug')")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" in errors and output == "closed\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_closes_resources_and_gives_its_exit_code(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "print('open', flush=True); time.sleep(600)")
    assert process.stdout.readline() == "open\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (128 + number, "closed\n")


def test_a_process_tells_its_stacks_when_asked_and_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "print('open', flush=True); time.sleep(0.5)")
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGUSR1)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "closed\n")
    assert "most recent call first" in errors and "in main" in errors


PARENT = """
import os, subprocess, sys, time
child = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
subprocess.Popen(child, env={**os.environ, "MEGATRON_RL_LAUNCHED": "1"})
time.sleep(600)
"""
HANGS_AT_ITS_END = """
        from megatron_rl.protocol import process
        process.ORPHAN_END_S = 1.0
        try:
            print("open", flush=True)
            time.sleep(600)
        finally:
            time.sleep(600)
"""
WAITS_FOR_A_THREAD = """
        import asyncio
        from generation.tasks import end_with_first, interrupted
        from megatron_rl.protocol import process
        process.ORPHAN_END_S = 1.0
        async def work():
            print("open", flush=True)
            # As a weight sync whose peers died: the interpreter waits for such threads at its end.
            await asyncio.to_thread(time.sleep, 600)
        asyncio.run(end_with_first(interrupted(), work()))
"""


@pytest.mark.parametrize("body", [HANGS_AT_ITS_END, WAITS_FOR_A_THREAD])
def test_a_process_that_hangs_without_its_launcher_says_where_and_ends(
    tmp_path: Path, body: str
) -> None:
    script = SCRIPT.replace("        {body}", body)
    launcher = subprocess.Popen(
        [sys.executable, "-c", PARENT, script, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout.readline() == "open\n"
    launcher.kill()
    # Both pipes are the child's too, and end with it.
    _, errors = launcher.communicate(timeout=60)
    assert "Timeout (0:00:01)!" in errors and "in main" in errors


LIMITED = """
import resource, sys
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.process import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
raise_file_limit(256, "the test")
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    raise_file_limit(257, "a rank of this trainer")
except InputError as error:
    print(error)
"""


def test_the_limit_of_open_files_is_raised_and_named_where_it_is_too_low() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=True
    )
    limits, message = done.stdout.splitlines()
    assert limits == "(256, 256)"
    assert "may open 256 files and sockets, and a rank of this trainer needs 257" in message
    assert "ulimit -Hn" in message
