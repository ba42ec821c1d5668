"""When a program in a sandbox has had its time, judged from outside while it runs.

Used by a grading process about the sandbox that it started. Elapsed time alone says nothing: on a
crowded host a right program waits for a core, and on an idle one a wrong one sleeps.
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
"""All processes of a program together have the CPU time of two: tests and solution, or the
passes of a compiler. Beyond, they keep each other from a core, and not the host."""


class Limits(msgspec.Struct, frozen=True):
    """What one program may use."""

    memory_bytes: int
    """Address space of each of its processes; a test has one."""
    cpu_s: float
    """CPU time of each of its processes."""
    wall_s: float
    """Elapsed time, less that for which the host kept it from a core."""
    max_elapsed_s: float
    """Elapsed time after which the host is too crowded to tell anything."""
    file_bytes: int
    """Largest file, standard output included."""
    processes: int
    """Threads of a test, processes of a compiler."""
    disk_bytes: int
    """All temporary files of a test together."""


def find_end(
    limits: Limits, *, elapsed_s: float, cpu_s: float, total_cpu_s: float, waited_s: float
) -> str:
    """Why a program must end now: its own CPU or WALL, or the HOST; empty when it may continue.

    cpu_s: of the busiest process; total_cpu_s: of all.
    """
    if cpu_s >= limits.cpu_s or total_cpu_s >= BUSY_PROCESSES * limits.cpu_s:
        return CPU
    if elapsed_s - waited_s >= limits.wall_s:
        return WALL
    return HOST if elapsed_s >= limits.max_elapsed_s else ""


def await_reply(
    connection: socket.socket, limits: Limits, *, root: int, ignored: Collection[int]
) -> str:
    """Wait until the sandbox replies or the program has had its time: then the reason.

    root: first process of the sandbox; ignored: those of its descendants that are not programs.
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
