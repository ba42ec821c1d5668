"""Suspects of a worker pool: slow items in separate processes, and failed items that wait for one.

Runs in the verifier; used by `worker_pool.py`, which decides which process becomes a suspect. A
feedback queue says which compute now: the item that computed least goes first. A bomb runs only in
time that no other item wants; an honest item of 200 ms never waits for a bomb that has computed
longer.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron_rl.config.reward import WorkerPoolConfig
from verification.pool.grading_process import GradingProcess, Item

FIRST_SLICE_S = 0.05
"""CPU time until an item may have to give way; then again at each doubling."""
OVERDUE_S = 60.0
"""Seconds after which the oldest item computes next, whatever its CPU time."""
SLOW_NICENESS, SLOWEST_NICENESS = 3, 7
"""A lower priority would never get a core beside other busy processes."""
SLOWEST_S = 0.4
"""CPU time after which an item gets SLOWEST_NICENESS."""
MEMORY_SHARE = 2
"""Memory limit of all suspects together, as a multiple of one process's limit."""


class Turn(NamedTuple):
    """A slow item that asks for a core."""

    used_s: float
    """CPU time used, including earlier attempts."""
    since_s: float
    """Monotonic time of the request."""
    is_running: bool = False
    needs_quiet: bool = False
    """The item must run alone: the host was too busy for an earlier attempt."""


def level(used_s: float) -> int:
    """0 in the first slice, one more with each doubling."""
    # 1e-9: sums of clock differences may miss a limit slightly.
    return max(0, 1 + math.floor(math.log2(max(used_s, 1e-6) / FIRST_SLICE_S) + 1e-9))


def slice_left_s(used_s: float) -> float:
    """CPU time left until the level changes."""
    return FIRST_SLICE_S * 2 ** level(used_s) - used_s


def choose(turns: Sequence[Turn], slots: int, now: float) -> list[int]:
    """Indices of at most `slots` items that compute now."""

    def rank(index: int) -> tuple[int, bool, float]:
        turn = turns[index]
        return level(turn.used_s), not turn.is_running, turn.since_s

    alone = [i for i, turn in enumerate(turns) if turn.needs_quiet]
    others = sorted((i for i, turn in enumerate(turns) if not turn.needs_quiet), key=rank)
    # No item may join it: its second attempt must not fail like the first.
    running_alone = [i for i in alone if turns[i].is_running]
    overdue_alone = [i for i in alone if is_overdue(turns[i].since_s, now)]
    for candidates in (running_alone, overdue_alone, [] if others else alone):
        if candidates:
            return [min(candidates, key=lambda i: turns[i].since_s)]
    overdue = [i for i in others if is_overdue(turns[i].since_s, now)]
    first = [min(overdue, key=lambda i: turns[i].since_s)] if overdue else []
    return (first + [i for i in others if i not in first])[:slots]


def is_overdue(since_s: float, now: float) -> bool:
    """Whether an item that waits since `since_s` must compute next."""
    return now - since_s >= OVERDUE_S


class Suspects:
    """Processes with one item each; a few compute at once."""

    def __init__(
        self, cfg: WorkerPoolConfig, fork: Callable[[Item], GradingProcess], *, may_pause: bool
    ) -> None:
        """may_pause: whether the processes only compute, so that they can be stopped."""
        self._cfg = cfg
        self._fork = fork
        self._may_pause = may_pause
        # At least two, because an overdue item may take one.
        self._slots = cfg.running_slow or max(2, len(os.sched_getaffinity(0)))
        self.processes: list[GradingProcess] = []
        """Processes with one item each."""
        self.doubtful: list[Item] = []
        """Items without a process: they failed or lost their process."""

    def give_turns(self, now: float, *, is_busy: bool) -> Iterator[tuple[GradingProcess, Item]]:
        """Pause and resume processes; yield new processes, each with its item.

        is_busy: whether a worker has an item.
        """
        if self._may_pause:
            yield from self._choose(now)
            return
        if any(process.items[0].needs_quiet for process in self.processes):
            return
        for item in list(self.doubtful):
            is_alone = not is_busy and not self.processes
            if len(self.processes) < self._cfg.workers and (is_alone or not item.needs_quiet):
                yield self._retry(item)
                if item.needs_quiet:
                    return

    def _choose(self, now: float) -> Iterator[tuple[GradingProcess, Item]]:
        # No more than there is room for: an item that cannot start would waste its turn.
        room = max(0, self._cfg.held_slow - len(self.processes))
        suspects, doubtful = list(self.processes), self._next_doubtful(now)[:room]
        asking = [_turn(p.items[0], p.used_s, is_running=not p.is_paused) for p in suspects]
        asking += [_turn(item, 0.0, is_running=False) for item in doubtful]
        chosen = set(choose(asking, self._slots, now))
        for index, process in enumerate(suspects):
            if index in chosen and process.is_paused:
                process.resume(now)
                process.check_at_s = now
            elif index not in chosen and not process.is_paused:
                process.measure()
                process.pause(now)
                process.check_at_s = None
        for index, item in enumerate(doubtful, len(suspects)):
            if index in chosen:
                yield self._retry(item)

    def _next_doubtful(self, now: float) -> list[Item]:
        """Items without a process, next first."""

        def rank(item: Item) -> tuple[bool, bool, float, float]:
            is_late = is_overdue(item.since_s, now)
            return not is_late, item.needs_quiet, item.burnt_s, item.since_s

        return sorted(self.doubtful, key=rank)

    def _retry(self, item: Item) -> tuple[GradingProcess, Item]:
        self.doubtful.remove(item)
        process = self._fork(item)
        self.processes.append(process)
        lower_priority(process, item, item.burnt_s)
        return process, item

    def keep_quiet(self, now: float) -> bool:
        """Whether an item that must run alone keeps new items from starting."""
        if self._may_pause:
            return False  # New items take milliseconds.
        is_alone = any(process.items[0].needs_quiet for process in self.processes)
        return is_alone or any(
            item.needs_quiet and is_overdue(item.since_s, now) for item in self.doubtful
        )

    def surplus(self) -> list[GradingProcess]:
        """Processes beyond `held_slow`: those that used most CPU time."""
        count = len(self.processes) - self._cfg.held_slow
        if count <= 0:
            return []
        by_use = sorted(self.processes, key=lambda p: p.items[0].burnt_s + p.used_s)
        return by_use[-count:]

    def oversized(self) -> list[GradingProcess]:
        """The largest processes, if all together exceed the memory limit."""
        # A few cannot exceed it: each has its own limit.
        if len(self.processes) <= MEMORY_SHARE:
            return []
        sizes = {process.number: process.resident_bytes for process in self.processes}
        left_bytes = sum(sizes.values())
        found = []
        for process in sorted(self.processes, key=lambda p: sizes[p.number], reverse=True):
            if left_bytes <= MEMORY_SHARE * self._cfg.memory_bytes:
                break
            left_bytes -= sizes[process.number]
            found.append(process)
        return found


def lower_priority(process: GradingProcess, item: Item, used_s: float) -> None:
    """Lower a process's priority by the CPU time of its item."""
    # An item that runs alone delays no other, and lacked time before.
    if not item.needs_quiet:
        process.give_way(SLOW_NICENESS if used_s < SLOWEST_S else SLOWEST_NICENESS)


def _turn(item: Item, used_s: float, *, is_running: bool) -> Turn:
    return Turn(item.burnt_s + used_s, item.since_s, is_running, item.needs_quiet)
