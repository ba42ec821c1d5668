"""All worker pools of grading processes, and their event loop.

Runs in the verifier's only thread. `WorkerPool` gives items to processes; `ForkClient` makes
processes. A draft passes through worker pools, one step in each, until it becomes a score.
"""

import collections
import itertools
import logging
import selectors
import time
from typing import Self

from megatron_rl.config.reward import WORKER_POOLS, VerifierConfig
from megatron_rl.protocol.closing import Closing
from verification.draft import Draft
from verification.pool.fork_client import ForkClient
from verification.pool.frames import FrameError
from verification.pool.grading_process import GradingProcess, Item
from verification.pool.worker_pool import Finished, WorkerPool
from verification.rules import RewardRules

log = logging.getLogger(__name__)


class Pool(Closing):
    """Grades requests in processes that start on first use.

    Call `collect` when `fileno()` is readable and at `next_deadline_s`; nothing runs otherwise.
    """

    def __init__(self, cfg: VerifierConfig, rules: RewardRules) -> None:
        self._fork_client = ForkClient(cfg, rules)
        self.pools = {
            name: WorkerPool(
                name,
                cfg.pool(name),
                rules=rules,
                fork_client=self._fork_client,
                answer_within_s=cfg.answer_within_s,
            )
            for name in WORKER_POOLS
        }
        self.taken: collections.Counter[str] = collections.Counter()
        """Uncollected requests whose steps include a worker pool. The queue counts the same way, so
        that both agree when a pool is full."""
        self._item_ids = itertools.count()

    def __enter__(self) -> Self:
        self._selector = selectors.EpollSelector()
        return self

    def close(self) -> None:
        """End all grading processes, and close the loop's descriptors."""
        # The server and all processes first, so that no process writes to a closed socket.
        self._fork_client.close()
        for pool in self.pools.values():
            for process in pool.processes:
                process.close()
        self._selector.close()

    def fileno(self) -> int:
        """Descriptor that is readable when `collect` has work."""
        return self._selector.fileno()

    @property
    def pids(self) -> list[int]:
        """Process ids of forked grading processes."""
        processes = (process for pool in self.pools.values() for process in pool.processes)
        return [process.pid for process in processes if process.pid is not None]

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        return sum(pool.pending for pool in self.pools.values())

    @property
    def kills(self) -> int:
        """Processes killed for an item that took too long."""
        return sum(pool.kills for pool in self.pools.values())

    @property
    def deaths(self) -> int:
        """Processes that died by themselves."""
        return sum(pool.deaths for pool in self.pools.values())

    @property
    def next_deadline_s(self) -> float | None:
        """Monotonic time of the earliest deadline; None when nothing is in flight."""
        checks = [pool.next_check_s for pool in self.pools.values()]
        return min((check for check in checks if check is not None), default=None)

    def submit(self, draft: Draft) -> None:
        """Start a draft's remaining steps; the caller keeps `taken` within its limits."""
        pools = frozenset(step.pool for step in draft.steps)
        self.taken.update(pools)
        self._route(Item(next(self._item_ids), draft, pools, since_s=time.monotonic()))

    def collect(self) -> list[Finished]:
        """Process all pending events without waiting; return finished requests."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._bury(self._fork_client.receive())
                if self._fork_client.descriptor is None:
                    # A new server has a new descriptor.
                    self._selector.unregister(key.fd)
            # An earlier event of this batch may have detached the process.
            elif key.data[1].connection.fileno() != -1:
                self._read(*key.data)
        # Route all items before any worker pool gives items to processes.
        for pool in self.pools.values():
            passed_on, pool.passed_on = pool.passed_on, []
            for item in passed_on:
                self._route(item)
        now = time.monotonic()
        finished: list[Finished] = []
        for pool in self.pools.values():
            for process in pool.advance(now):
                self._detach(process)
            self._watch(pool)
            finished += self._harvest(pool)
        return finished

    def _route(self, item: Item) -> None:
        self.pools[item.draft.steps[0].pool].submit(item)

    def _harvest(self, pool: WorkerPool) -> list[Finished]:
        finished, pool.finished = pool.finished, []
        for item, _ in finished:
            self.taken.subtract(item.pools)
        return [reply for _, reply in finished]

    def _read(self, pool: WorkerPool, process: GradingProcess) -> None:
        process.flush()
        try:
            for reply in process.receive():
                if pool.take(process, reply):
                    process.kill()
                    self._detach(process)
                    return
        except FrameError as error:
            log.error("grading process %s: %s", process.pid, error)
            process.kill()
            process.is_closed = True
        if process.is_closed:
            # The fork server reports the exit code. A closed socket stays readable and would keep
            # the loop spinning.
            self._unwatch(process)

    def _bury(self, died: list[GradingProcess]) -> None:
        for process in died:
            pool = next((pool for pool in self.pools.values() if process in pool.processes), None)
            if pool is None:
                continue  # The process was given up before.
            # The report of a death may overtake the last answers, which count.
            self._read(pool, process)
            # The last answer of a suspect detaches it.
            if process.connection.fileno() != -1:
                pool.on_death(process)
                self._detach(process)

    def _watch(self, pool: WorkerPool) -> None:
        for process in pool.processes:
            if not process.is_closed:
                write = selectors.EVENT_WRITE if process.has_unsent else 0
                events = selectors.EVENT_READ | write
                self._set_events(process.connection.fileno(), events, (pool, process))
        if self._fork_client.descriptor is not None:
            self._set_events(self._fork_client.descriptor, selectors.EVENT_READ, None)

    def _set_events(
        self, descriptor: int, events: int, owner: tuple[WorkerPool, GradingProcess] | None
    ) -> None:
        """Watch a process's socket, or without an owner the fork server's."""
        known = self._selector.get_map().get(descriptor)
        if known is None:
            self._selector.register(descriptor, events, owner)
        elif known.events != events:
            self._selector.modify(descriptor, events, owner)

    def _unwatch(self, process: GradingProcess) -> None:
        if process.connection.fileno() in self._selector.get_map():
            self._selector.unregister(process.connection.fileno())

    def _detach(self, process: GradingProcess) -> None:
        self._unwatch(process)
        process.close()
