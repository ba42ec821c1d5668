"""Time of a process on a core, and time for which the host kept it from one.

Used by the verifier about its grading processes, and by a grading process about what runs in its
sandbox. Everything is read from outside, so that the watched programs need no /proc and can forge
nothing. Linux counts for each thread the time that it was ready to run and was not let
(/proc/PID/task/TID/schedstat, the second number), throttling of a control group included.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path


def thread_times_s(pid: int, tid: int) -> tuple[float, float] | None:
    """(time on a core, time kept from one) of a thread since its birth; None where not counted."""
    try:
        fields = Path(f"/proc/{pid}/task/{tid}/schedstat").read_bytes().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def process_cpu_s(pid: int) -> float:
    """CPU time of a process, its ended threads included; 0 when it is gone."""
    # clock_getcpuclockid(3): the complement of the pid, and 2 for the scheduler's precise clock.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def descendants(pid: int) -> list[int]:
    """Living descendants of a process."""
    found: list[int] = []
    left = [pid]
    while left:
        children = _children(left.pop())
        found += children
        left += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for tid in _threads(pid):
        try:
            children += map(int, Path(f"/proc/{pid}/task/{tid}/children").read_bytes().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_ready(pid: int, tid: int) -> bool:
    """Whether a thread runs, or waits involuntarily, for a core or a disk."""
    try:
        text = Path(f"/proc/{pid}/task/{tid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The name before the state is in brackets, and may hold any character.
    return text.rpartition(b") ")[2][:1] in (b"R", b"D")


def host_stall_s(interval_s: float) -> float:
    """Rough time for which a process was kept from a core, where threads are not counted."""
    crowd = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return interval_s * (1 - 1 / crowd) if crowd > 1 else 0.0


class Watch:
    """CPU time and time kept from a core, of some processes since the watch began."""

    def __init__(
        self, root: int, now: float, *, ignored: Collection[int] = (), with_root: bool = False
    ) -> None:
        """root: its descendants are watched, but for `ignored`, none of which lives yet.

        with_root: it is watched as well, and those that live already from now on.
        """
        self._root = root
        self._ignored = frozenset(ignored)
        self._with_root = with_root
        self._last_s = now
        self._threads: dict[tuple[int, int], tuple[float, float]] = {}
        self._used_before_s: dict[int, float] = {}
        if with_root:
            for pid in self._pids():
                self._denied_s(pid, 0.0)
                self._used_before_s[pid] = process_cpu_s(pid)
        self.cpu_s = 0.0
        """Most CPU time that one process has used."""
        self._used_s: dict[int, float] = {}
        self.waited_s = 0.0
        """Time for which all were kept from a core, or not yet born."""

    def look(self, now: float) -> None:
        """Add the times since the last look."""
        interval_s, self._last_s = now - self._last_s, now
        pids = self._pids()
        self._used_s |= {pid: max(process_cpu_s(pid), self._used_s.get(pid, 0.0)) for pid in pids}
        self.cpu_s = max(self._used_s.values(), default=0.0)
        # Processes that work in turns are denied their time in turns, hence the sum; the threads of
        # one compete with each other, hence the largest. Before the birth and after the end of a
        # program the host is at work.
        denied_s = sum(self._denied_s(pid, interval_s) for pid in pids) if pids else interval_s
        self.waited_s += min(interval_s, denied_s)

    @property
    def total_cpu_s(self) -> float:
        """CPU time of all processes, ended ones included as far as they were seen."""
        return sum(self._used_s.values())

    @property
    def descendants_cpu_s(self) -> float:
        """CPU time of the root's descendants since the watch began."""
        return sum(
            used_s - self._used_before_s.get(pid, 0.0)
            for pid, used_s in self._used_s.items()
            if pid != self._root
        )

    @property
    def is_ready(self) -> bool:
        """Whether any of them runs now, or waits for a core or a disk."""
        return any(_is_ready(pid, tid) for pid in self._pids() for tid in _threads(pid))

    def _pids(self) -> list[int]:
        own = [self._root] if self._with_root else []
        return own + [pid for pid in descendants(self._root) if pid not in self._ignored]

    def _denied_s(self, pid: int, interval_s: float) -> float:
        longest_s = 0.0
        for tid in _threads(pid):
            times = thread_times_s(pid, tid)
            if times is None:
                denied_s = host_stall_s(interval_s)
            else:
                ran_s, waited_s = self._threads.get((pid, tid), (0.0, 0.0))
                denied_s = times[1] - waited_s
                # Linux counts a wait at its end: until then only the thread's state shows it.
                if times == (ran_s, waited_s) and _is_ready(pid, tid):
                    denied_s = interval_s
                self._threads[pid, tid] = times
            longest_s = max(longest_s, denied_s)
        return longest_s


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory, as far as it counts them here."""
    with open("/proc/vmstat") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)


def available_bytes() -> int:
    """Memory that the host could give to a new process."""
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10
