"""A server child that cannot outlive the process that started it, with its log in a file.

Used by engines that are servers of their own. Run as a script it is the child's launcher: it asks
Linux to kill the process when its parent dies, then becomes the server.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_END_S = 30.0
"""Of a killed process: one that holds a GPU gives its memory back first, which takes seconds."""


class ServerChild:
    """One server process and all its descendants, which share its process group."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(
        self, command: list[str], environment: dict[str, str], *, nice: int = 0
    ) -> None:
        """Start the command in a session of its own; its output is appended to the log."""
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
        """Wait until the server ends; says how, with the end of its log."""
        assert self._process is not None
        code = await self._process.wait()
        return f"the server ended with exit code {code}; {self.log_tail()}"

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


def give_way(nice: int) -> None:
    """Lower this session's CPU priority, by as much as `nice` does for a process."""
    os.nice(nice)
    # Where Linux groups processes by session, niceness counts inside the session only.
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
