"""A server child: its log, its end, and that it does not outlive its parent."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from generation.child import ChildFailed, ServerChild, ask

PARENT = """
import asyncio, os, sys
from pathlib import Path
from generation.child import ServerChild
async def main():
    child = ServerChild(Path(sys.argv[1]))
    await child.start([sys.executable, "-c", "import time; time.sleep(600)"], {})
    print(child._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_how_it_ended_comes_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def run() -> str:
        child = ServerChild(tmp_path / "logs" / "server.log")
        code = "import os; [print('line', i) for i in range(99)]; exit(int(os.environ['X']))"
        await child.start([sys.executable, "-c", code], {"X": "7"})
        reason = await asyncio.wait_for(child.exited(), 60)
        await child.close()
        return reason

    reason = asyncio.run(run())
    assert "exit code 7" in reason and "server.log" in reason
    assert "line 98" in reason and "line 99" not in reason and "line 3\n" not in reason


def test_it_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)


ANSWERING = """
import os, sys, time
asked = sys.stdin.read()
if asked == "sleep":
    os.fork()
    time.sleep(600)
sys.exit("first" + os.linesep + "last") if asked == "fail" else print(asked[::-1], end="")
"""


def test_a_child_answers_fails_or_ends_at_the_limit_with_all_that_it_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answering.py").write_text(ANSWERING)
    monkeypatch.chdir(tmp_path)
    assert ask("answering", b"abc", os.environ, 60) == b"cba"
    with pytest.raises(ChildFailed, match="^last$"):
        ask("answering", b"fail", os.environ, 60)
    with pytest.raises(ChildFailed, match="^no answer in 2 s$"):
        ask("answering", b"sleep", os.environ, 2)
    while any(map(is_answering, psutil.process_iter())):
        time.sleep(0.05)


def is_answering(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1:] == ["answering"]
    except psutil.Error:
        return False
