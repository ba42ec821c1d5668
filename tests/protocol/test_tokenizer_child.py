"""The child process that has a tokenizer."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(300)

PARENT = """
import os, sys, time
from pathlib import Path
from megatron_rl.protocol.tokenizer_child import call_in_child

def begin(path):
    Path(path + ".new").write_text(str(os.getpid()))
    Path(path + ".new").rename(path)
    time.sleep(600)

if __name__ == "__main__":
    call_in_child(begin, sys.argv[1], what="a sleep", limit_s=600.0)
"""


def test_the_child_ends_with_the_launcher_that_is_killed(tmp_path: Path) -> None:
    program, begun = tmp_path / "parent.py", tmp_path / "begun"
    program.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(program), str(begun)]) as run:
        deadline = time.monotonic() + 60
        while not begun.exists():
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        child = psutil.Process(int(begun.read_text()))
        run.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
