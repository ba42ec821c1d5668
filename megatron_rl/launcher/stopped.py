"""Finds processes of roles that a signal has stopped (SIGSTOP), and for how long.

Used by `supervisor.py` and `run_folder.py`, in the launcher's one thread. Linux tells the
state of every process, so this covers all processes of all roles, also those that nobody hears:
torchrun, trainer ranks, engines' children. A process under a debugger has another state and is
left alone.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_rl.protocol.failure import FAILURE_VARIABLE

LOOKS = 6
"""Looks within the limit."""
_STOPPED = "T"

log = logging.getLogger(__name__)


class Stopped(NamedTuple):
    """A process that has been stopped for too long."""

    pid: int
    what: str
    """`rank 1`, or the process's name."""
    seconds: float


class _Process(NamedTuple):
    parent: int
    name: str
    state: str
    born: str
    """In clock ticks since boot; tells apart processes of the same pid."""


class StoppedProcesses:
    """Counts for how long processes have been stopped."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stopped_s: dict[tuple[int, str], float] = {}
        """(pid, birth) -> seconds."""
        self._looked_at: float | None = None

    def find(self, roles: Mapping[int, int | None], now: float) -> dict[int, Stopped]:
        """Per role, the process that has been stopped for longest, beyond the limit; often {}.

        roles: pid of each role's first process -> generations below it that count; None: all. now:
        monotonic seconds. Looks at most LOOKS times within the limit.
        """
        every_s = self._limit_s / LOOKS
        if self._looked_at is not None and now - self._looked_at < every_s:
            return {}
        # A launcher that was stopped with its roles, as by a batch system, does not count that.
        gap_s = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * every_s)
        self._looked_at = now
        processes = _processes()
        members = _members(processes, roles)
        stopped = [pid for pid in members if processes[pid].state == _STOPPED]
        earlier, self._stopped_s = self._stopped_s, {}
        found: dict[int, Stopped] = {}
        for pid in stopped:
            key = pid, processes[pid].born
            seconds = self._stopped_s[key] = earlier[key] + gap_s if key in earlier else 0.0
            longest = found.get(members[pid])
            if seconds >= self._limit_s and (longest is None or seconds > longest.seconds):
                found[members[pid]] = Stopped(pid, _name(pid, processes[pid].name), seconds)
        return found


def kill_left_stopped(failures: Path) -> list[int]:
    """Kill stopped processes that a dead launcher of this run left on this host; returns the pids.

    failures: folder of the failure notes, by which the environment of each process of a run names
    the run. A stopped process takes no SIGTERM: it outlives its launcher, and keeps the lock of the
    run folder and its memory.
    """
    marker = os.fsencode(f"{FAILURE_VARIABLE}={failures}/")
    killed = []
    for pid, process in _processes().items():
        if process.state != _STOPPED or not _find_variable(pid, marker):
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            log.warning(
                "killed %s, pid %d: it was stopped when its launcher died", process.name, pid
            )
    return killed


def _processes() -> dict[int, _Process]:
    """All processes of the host, as far as this process sees them."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (process := _read(entry.name)) is not None:
            found[int(entry.name)] = process
    return found


def _read(pid: str) -> _Process | None:
    """None for a process that has ended, or that another user hides (hidepid of /proc)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        # Not by Path, which interns each number and takes 1.5 times as long.
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
        # proc(5): the name stands in brackets and may contain anything; then the fields from 3 on.
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        return _Process(int(fields[1]), name, fields[0], fields[19])
    return None


def _members(processes: Mapping[int, _Process], roles: Mapping[int, int | None]) -> dict[int, int]:
    """Process -> first process of its role."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    members = {}
    for first, generations in roles.items():
        found = [first] if first in processes else []
        depth = 0
        while found:
            members |= dict.fromkeys(found, first)
            if depth == generations:
                break
            found = [child for pid in found for child in children.get(pid, ())]
            depth += 1
    return members


def _name(pid: int, name: str) -> str:
    rank = _find_variable(pid, b"RANK=")
    return f"rank {rank[5:].decode(errors='replace')}" if rank else name


def _find_variable(pid: int, start: bytes) -> bytes:
    """The first variable of a process's environment that begins so; empty: none is seen."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((one for one in variables if one.startswith(start)), b"")
    return b""
