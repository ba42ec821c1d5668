"""The process above a fork server or an episode: logs its output, ends it and all that it started.

Runs in the environment's processes, under any Python from 3.9. No user code runs in a keeper. A
keeper adopts orphans, so nothing that its child started escapes it. One thread waits for:

| event | woken by | does |
|---|---|---|
| output of the child | its pipe | logs it, up to MAX_LOGGED_BYTES |
| the child's end | its pidfd | ends |
| the host closes LIFE, or is gone | the socket; the parent's pid | ends |

To end means: kill all below, report the child's exit status and last output on LIFE, and exit. That
closes LIFE, by which the host knows that all of it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

MAX_LOGGED_BYTES = 1 << 16
"""Output of one episode, or of a fork server, that is logged; more is read slowly and lost."""
TAIL_BYTES = 4000
"""Last output, which goes into the report."""
WHERE = b"?"
"""Request of the host on LIFE: show where the child is before it dies."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """Forks a child, logs its output, and ends it with all that it started."""

    def __init__(self, life: socket.socket, label: str, log_path: str) -> None:
        self._life = life
        self._label = label.encode(errors="replace")
        self._log_path = log_path
        self._parent = os.getppid()
        self._tail = b""
        self._line = b""
        """Begin of a line whose end has not arrived."""
        self._logged_bytes = 0
        self._status: int | None = None

    def keep(self, body: Callable[[], None], theirs: list[socket.socket]) -> NoReturn:
        """Run `body` in the child until either ends. theirs: sockets of the child alone."""
        try:
            become_reaper()
            self._output, output = os.pipe()
            keeper = os.getpid()
            self._child = os.fork()
            if self._child == 0:
                self._life.close()
                os.close(self._output)
                _run_child(body, keeper, output)
            os.close(output)
            self._pidfd = os.pidfd_open(self._child)
            for connection in theirs:
                connection.close()
            try:
                self._watch()
            finally:
                self._end()
        except BaseException:  # noqa: BLE001  The process prints the exception and ends.
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _watch(self) -> None:
        """Log output until the child ends, or the host or the parent is gone."""
        poller = select.poll()
        for descriptor in (self._life.fileno(), self._output, self._pidfd):
            poller.register(descriptor, select.POLLIN)
        # Not every parent that dies closes LIFE: others may hold a copy.
        while self._status is None and os.getppid() == self._parent:
            ready = dict(poller.poll(1000))
            if self._output in ready and not self._log_some():
                poller.unregister(self._output)
            self._reap()
            if self._life.fileno() in ready and self._status is None:
                if self._life.recv(1) == WHERE:
                    self._ask_where()
                return

    def _ask_where(self) -> None:
        """Have the child print where it is."""
        # faulthandler answers the first signal at once, and asyncio the second if the loop is free.
        for number, patience_s in ((signal.SIGUSR1, 1.0), (signal.SIGUSR2, 0.1)):
            os.kill(self._child, number)
            until_s = time.monotonic() + patience_s
            while select.select([self._output], [], [], max(0, until_s - time.monotonic()))[0]:
                self._log_some()
                # The answer comes in pieces.
                until_s = min(until_s, time.monotonic() + 0.05)

    def _end(self) -> None:
        """Kill everything below, and report."""
        if self._status is None:
            os.kill(self._child, signal.SIGKILL)
            select.select([self._pidfd], [], [])
        pause_s = 0.001
        # Without a deadline: what is left must stay somebody's. The host gives up in END_TIMEOUT_S.
        while self._reap():
            for pid, parent in _descendants():
                kill(pid, parent)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        os.set_blocking(self._output, False)
        with contextlib.suppress(BlockingIOError):
            while self._log_some():
                pass
        report = {"status": self._status, "tail": self._tail.decode(errors="replace")}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._life.sendall(json.dumps(report).encode())

    def _reap(self) -> bool:
        """Reap what ended; whether children are left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._child:
                    self._status = status
        except ChildProcessError:
            return False

    def _log_some(self) -> bool:
        """Log arrived output; False at its end."""
        output = os.read(self._output, 1 << 16)
        self._tail = (self._tail + output)[-TAIL_BYTES:]
        room = MAX_LOGGED_BYTES - self._logged_bytes
        if room <= 0:
            time.sleep(0.01)  # A flood slows itself down rather than the node.
            return bool(output)
        self._logged_bytes += len(output)
        *lines, self._line = (self._line + output[:room]).split(b"\n")
        if self._line and (not output or len(output) >= room):
            lines.append(self._line)
        if len(output) >= room:
            lines.append(b"[further output is not logged]")
        # A full disk ends no episode.
        with contextlib.suppress(OSError), open(self._log_path, "ab", buffering=0) as log:
            log.write(b"".join(b"[%s] %s\n" % (self._label, line) for line in lines))
        return bool(output)


def _run_child(body: Callable[[], None], keeper: int, output: int) -> NoReturn:
    try:
        # What a user signals by group or session stays inside.
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)  # The keeper died before the call.
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        body()
    except BaseException:  # noqa: BLE001  The process prints the exception and ends.
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def processes() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of all processes of the machine."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            parent = _parent(int(name))
            if parent is not None:
                yield int(name), parent


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before the state is in brackets, and may hold any character.
            return int(file.read().rpartition(b") ")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _descendants() -> list[tuple[int, int]]:
    """(pid, parent's pid) of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for pid, parent in processes():
        children.setdefault(parent, []).append(pid)
    found: list[tuple[int, int]] = []
    left = [os.getpid()]
    while left:
        parent = left.pop()
        found += ((pid, parent) for pid in children.get(parent, ()))
        left += children.get(parent, ())
    return found


def kill(pid: int, parent: int) -> None:
    """Kill a process if it still is a child of `parent`: its number may be another's by now."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if _parent(pid) == parent:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def become_reaper() -> None:
    """Have orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    # ctypes passes untyped arguments as 32-bit ints; prctl reads 64 bits of each.
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")
