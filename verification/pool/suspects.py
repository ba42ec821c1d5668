"""The suspects of a worker pool: slow items in a process of their own, failed ones that wait for
one.

Runs in the verifier; used by `worker_pool.py`, which decides who becomes a suspect and what a fault
means.
"""

import os
from collections.abc import Callable, Iterator

from megatron_rl.config.reward import WorkerPoolConfig
from verification.pool import turns
from verification.pool.grading_process import GradingProcess, Item
from verification.pool.turns import Turn

SLOW_NICENESS, SLOWEST_NICENESS = 3, 7
"""Not lower: next to other busy processes it would never get a core."""
SLOWEST_S = 0.4
"""CPU time after which an item has the lower of the two priorities."""
MEMORY_SHARE = 2
"""Memory that all suspects together may hold, as a number of full ones."""


class Suspects:
    """Processes of one item each, of which a few compute at once."""

    def __init__(
        self, cfg: WorkerPoolConfig, fork: Callable[[Item], GradingProcess], *, may_pause: bool
    ) -> None:
        """may_pause: whether they compute and do nothing else, so that they can be stopped."""
        self._cfg = cfg
        self._fork = fork
        self._may_pause = may_pause
        # Two at least, since one may be taken by an item that is overdue.
        self._slots = cfg.running_slow or max(2, len(os.sched_getaffinity(0)))
        self.processes: list[GradingProcess] = []
        """Each with one item."""
        self.doubtful: list[Item] = []
        """Items without a process: they failed, or lost it to others."""

    def give_turns(self, now: float, *, is_busy: bool) -> Iterator[tuple[GradingProcess, Item]]:
        """Pause and resume processes; new ones, each with the item that it is to be given.

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
        # Only as many as there is room for: a turn given to one that cannot start would be lost.
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
        """Items without a process, in the order in which they should have one."""

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
        """Whether no new item may start while one wants to be alone."""
        if self._may_pause:
            return False  # New items take milliseconds.
        is_alone = any(process.items[0].needs_quiet for process in self.processes)
        return is_alone or any(
            item.needs_quiet and turns.is_overdue(item.since_s, now) for item in self.doubtful
        )

    def surplus(self) -> list[GradingProcess]:
        """Those beyond the number that may be held: they have used most."""
        count = len(self.processes) - self._cfg.held_slow
        if count <= 0:
            return []
        by_use = sorted(self.processes, key=lambda p: p.items[0].burnt_s + p.used_s)
        return by_use[-count:]

    def oversized(self) -> list[GradingProcess]:
        """The largest, if all together hold more memory than they may."""
        # A few are within the limit of their address spaces.
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
    """Have a process give way to others, the more the more its item has used."""
    # One that is alone holds up nobody, and has been denied its time before.
    if not item.needs_quiet:
        process.give_way(SLOW_NICENESS if used_s < SLOWEST_S else SLOWEST_NICENESS)


def _turn(item: Item, used_s: float, *, is_running: bool) -> Turn:
    return Turn(item.burnt_s + used_s, item.since_s, is_running, item.needs_quiet)
