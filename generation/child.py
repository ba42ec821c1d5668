"""A server child that cannot outlive the process that started it; a child that answers a question.

Used by engines that start a server, whose log is in a file. Run as a script it is that child's
launcher: it asks Linux to kill the process when its parent dies, then becomes the server.
"""

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_END_S = 30.0
"""Seconds for the end of a killed process: releasing the memory of a GPU takes seconds."""


class ServerChild:
    """One server process and all its descendants, which share its process group."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(
        self, command: list[str], environment: dict[str, str], *, nice: int = 0
    ) -> None:
        """Start the command in a new session; its output is appended to the log."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, str(os.getpid()), str(nice), *command),
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def has_exited(self) -> bool:
        """Whether the server ended."""
        return self._process is None or self._process.returncode is not None

    async def exited(self) -> str:
        """Wait until the server ends; return how, with the end of its log."""
        assert self._process is not None
        code = await self._process.wait()
        return f"the server ended with exit code {code}; {self.log_tail()}"

    async def lost(self, title: str) -> str:
        """Wait until the server, or its process with a title of this prefix, ends; return how.

        A server may outlive its worker process by seconds, and answers until then.
        """
        assert self._process is not None
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with ExitStack() as stack:
            names = {}
            for part in _descendants(self._process.pid):
                if not part.name.startswith(title):
                    continue
                try:
                    descriptor = os.pidfd_open(part.pid)
                except ProcessLookupError:
                    return f"its process {part.name} ended; {self.log_tail()}"
                stack.callback(os.close, descriptor)
                loop.add_reader(descriptor, ended.set)
                stack.callback(loop.remove_reader, descriptor)
                names[descriptor] = part.name
            ends = [asyncio.ensure_future(self.exited()), asyncio.ensure_future(ended.wait())]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if ends[0].done():
                    return ends[0].result()
                poll = select.poll()  # unlike select(), for descriptors of any number
                for descriptor in names:
                    poll.register(descriptor, select.POLLIN)
                gone = [names[descriptor] for descriptor, _ in poll.poll(0)]
                return f"its process {', '.join(gone)} ended; {self.log_tail()}"
            finally:
                for end in ends:
                    end.cancel()

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log, introduced by its path."""
        with self._log_path.open(errors="replace") as log:
            tail = "".join(deque(log, maxlen=lines))
        return f"the end of {self._log_path}:\n{tail}"

    async def close(self) -> None:
        """Kill the server and its descendants, and wait for it."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await asyncio.wait_for(self._process.wait(), _END_S)


class ChildFailed(RuntimeError):
    """A child gave no answer; the text says why."""


def ask(module: str, question: bytes, environment: Mapping[str, str], limit_s: float) -> bytes:
    """What `python -m module` answers to a question on its stdin. Raises ChildFailed.

    environment: all variables of the child. It ends with this call, with all that it forked.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            answer, errors = process.communicate(question, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"no answer in {limit_s:.0f} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise ChildFailed(errors.decode(errors="replace").strip().rpartition("\n")[2])
    return answer


class _Part(NamedTuple):
    pid: int
    name: str


def _descendants(pid: int) -> list[_Part]:
    """Live processes below one, with their titles."""
    found = []
    try:
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found.append(_Part(process.pid, " ".join(process.cmdline()).strip()))
    except psutil.NoSuchProcess:
        pass
    return found


def give_way(nice: int) -> None:
    """Lower this session's CPU priority, by as much as `nice` does for a process."""
    os.nice(nice)
    # If Linux groups processes by session, niceness counts inside the session only.
    autogroup = Path("/proc/self/autogroup")
    if nice and autogroup.exists():
        autogroup.write_text(str(nice))


def launch(arguments: list[str]) -> NoReturn:
    """Become the command `arguments[2:]`, to be killed when process `arguments[0]` dies.

    arguments[1] is added to its niceness.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(arguments[0]):
        raise SystemExit("the parent died before its server started")
    give_way(int(arguments[1]))
    os.execv(arguments[2], arguments[2:])


if __name__ == "__main__":
    launch(sys.argv[1:])
