"""Suspects of a worker pool: slow items in separate processes, and failed items that wait for one.

Runs in the verifier; used by `worker_pool.py`, which decides which process becomes a suspect.
"""

import os
from collections.abc import Callable, Iterator

from megatron_rl.config.reward import WorkerPoolConfig
from verification.pool import turns
from verification.pool.grading_process import GradingProcess, Item
from verification.pool.turns import Turn

SLOW_NICENESS, SLOWEST_NICENESS = 3, 7
"""A lower priority would never get a core beside other busy processes."""
SLOWEST_S = 0.4
"""CPU time after which an item gets SLOWEST_NICENESS."""
MEMORY_SHARE = 2
"""Memory limit of all suspects together, as a multiple of one process's limit."""


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

    def _choose(self, now: float) -> Iterator[tuple[GradingProcess, Item]]:
        # No more than there is room for: an item that cannot start would waste its turn.
        room = max(0, self._cfg.held_slow - len(self.processes))
        suspects, doubtful = list(self.processes), self._next_doubtful(now)[:room]
        asking = [_turn(p.items[0], p.used_s, is_running=not p.is_paused) for p in suspects]
        asking += [_turn(item, 0.0, is_running=False) for item in doubtful]
        chosen = set(turns.choose(asking, self._slots, now))
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
            is_overdue = turns.is_overdue(item.since_s, now)
            return not is_overdue, item.needs_quiet, item.burnt_s, item.since_s

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
            item.needs_quiet and turns.is_overdue(item.since_s, now) for item in self.doubtful
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
