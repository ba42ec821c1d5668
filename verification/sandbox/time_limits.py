"""Time limits of a program in a sandbox, measured from outside while it runs.

Used by the grading process that started the sandbox. Elapsed time alone does not decide: on a busy
host a correct program waits for a core, and a wrong one may sleep.
"""

import select
import socket
import time
from collections.abc import Collection

import msgspec

from verification.run_time import Watch

LOOK_S = 0.1
"""Time between two looks at a program."""
CPU, WALL, HOST = "cpu", "wall", "host"
BUSY_PROCESSES = 2
"""All processes of a program together get the CPU time of two (tests and solution, or the passes of
a compiler). Beyond that they delay each other; the host does not delay them."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of one program."""

    memory_bytes: int
    """Address space of each of its processes; a test has one."""
    cpu_s: float
    """CPU time of each of its processes."""
    wall_s: float
    """Elapsed time, without waits for a core."""
    max_elapsed_s: float
    """Elapsed time after which the host counts as too busy to grade."""
    file_bytes: int
    """Largest file, including standard output."""
    processes: int
    """Threads of a test, processes of a compiler."""
    disk_bytes: int
    """All temporary files of a test together."""


def find_end(
    limits: Limits, *, elapsed_s: float, cpu_s: float, total_cpu_s: float, waited_s: float
) -> str:
    """The limit that a program exceeded: CPU, WALL or HOST; empty for none.

    cpu_s: of the busiest process; total_cpu_s: of all processes.
    """
    if cpu_s >= limits.cpu_s or total_cpu_s >= BUSY_PROCESSES * limits.cpu_s:
        return CPU
    if elapsed_s - waited_s >= limits.wall_s:
        return WALL
    return HOST if elapsed_s >= limits.max_elapsed_s else ""


def await_reply(
    connection: socket.socket, limits: Limits, *, root: int, ignored: Collection[int]
) -> str:
    """Wait until the sandbox replies (returns "") or the program exceeds a limit (the limit).

    root: first process of the sandbox; ignored: its descendants that are not programs.
    """
    started_s = time.monotonic()
    watch = Watch(root, started_s, ignored=ignored)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    end = ""
    while not end:
        if poll.poll(LOOK_S * 1000):
            return ""
        now = time.monotonic()
        watch.look(now)
        end = find_end(
            limits,
            elapsed_s=now - started_s,
            cpu_s=watch.cpu_s,
            total_cpu_s=watch.total_cpu_s,
            waited_s=watch.waited_s,
        )
    return end


def is_readable(descriptor: int, limit_s: float) -> bool:
    """Whether a descriptor of any number can be read or has ended within limit_s seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, limit_s)))
