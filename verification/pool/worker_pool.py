"""One worker pool: gives items to grading processes and handles faults of processes.

Runs in the verifier; used by `pool.py`. An item is one step of one score. Three kinds of process:

- A *worker* takes new items, one after another. Where a user's function waits, such as for a judge,
  further workers take the next items: up to held_slow workers may wait beside `workers` others.
- A *suspect* has a low priority and one item, and ends with it. In pools limited by CPU time, a
  worker whose item takes longer than BRISK_S becomes a suspect, so that no item waits behind it. A
  new suspect retries a failed item. The suspects with the youngest items compute; the others are
  paused and keep their work (`suspects.py`).
- A *spare* is forked and idle. It replaces a worker that became a suspect.

| event | first time | second time |
|---|---|---|
| the item uses up timeout_s | retry | Score with reason "grading_timeout" |
| a user's function waits until timeout_s | retry | ScoreFailed: not graded |
| memory or stack runs out | retry | Score with "grading_memory", "grading_depth" |
| a signal ends the process | retry | Score with reason "grading_crash" |
| max_elapsed_s pass first, or the host lacks memory | retry alone | ScoreFailed: not graded |
| the process exits by itself | retry | ScoreFailed: our own failure, never a reward |
| it retires, or dies idle or with the fork server | no fault | no fault |
| more suspects than held_slow, or their memory | the one that used most restarts | the same |
| answer_within_s pass | ScoreFailed, not graded; if timeout_s was used up once, the Score | |

Why not pebble 5.2.3: a worker that dies idle breaks the whole pool, workers share one pipe and
lock, it pickles, and a hanging worker delays the items behind it.
"""

import logging
import os
import signal
import time
from collections import deque

from megatron_rl.config.reward import ANSWERS, CODE, CUSTOM, LANGUAGE, WorkerPoolConfig
from megatron_rl.protocol.types import NOT_GRADED, UNGRADABLE, Score, ScoreDone, ScoreFailed
from verification.draft import Finding
from verification.pool.faults import (
    HOST,
    MODEL_FAULTS,
    TIMEOUT,
    WAITED,
    Outcome,
    Repetitions,
    judge,
    judge_unfinished,
)
from verification.pool.fork_client import LOST, ForkClient
from verification.pool.frames import (
    Aborted,
    FrameError,
    Graded,
    GradeFailed,
    Loaded,
    Reply,
    Retiring,
)
from verification.pool.grading_process import GradingProcess, Item
from verification.pool.suspects import Suspects, lower_priority, slice_left_s
from verification.rules import RewardRules
from verification.run_time import oom_kills
from verification.score import unverified

START_TIMEOUT_S = 60.0
"""Limit for loading a task's libraries."""
BRISK_S = 0.025
"""CPU time after which a worker becomes a suspect."""
SWEEP_S = 1.0
"""Interval of checks for items that wait too long."""
LOOK_S = 0.2
"""Interval of limit checks in worker pools limited by elapsed time."""
COMPUTING = 0.8
"""Share of its limit from which a user's function computes, and waits for nothing else."""
# Items that one process holds, so that it need not wait for a round trip. Behind a slow item others
# would wait too long, while here any process can take them.
_DEPTH = {ANSWERS: 2, LANGUAGE: 8, CODE: 1, CUSTOM: 1}
# Code and custom rewards wait for other processes, so their own CPU time says little.
_ELAPSED = frozenset({CODE, CUSTOM})

Finished = ScoreDone | ScoreFailed
"""Answer to the queue's request."""
log = logging.getLogger(__name__)


class WorkerPool:
    """Items and processes of one kind of grading."""

    def __init__(
        self,
        name: str,
        cfg: WorkerPoolConfig,
        *,
        rules: RewardRules,
        fork_client: ForkClient,
        answer_within_s: float,
    ) -> None:
        self._name = name
        self._cfg = cfg = cfg.with_workers(name, len(os.sched_getaffinity(0)))
        self._rules = rules
        self._fork_client = fork_client
        self._answer_within_s = answer_within_s
        self._is_timed_by_cpu = name not in _ELAPSED
        self._waiting: deque[Item] = deque()
        self._next_sweep_s = 0.0
        self._oom_kills = oom_kills()
        self._repetitions = Repetitions()
        self.workers: list[GradingProcess] = []
        self.suspects = Suspects(cfg, self._fork, may_pause=self._is_timed_by_cpu)
        self.spares: list[GradingProcess] = []
        """Idle processes that replace workers; one in pools limited by CPU time."""
        self.passed_on: list[Item] = []
        """Items whose next step is due, in any worker pool."""
        self.finished: list[tuple[Item, Finished]] = []
        self.kills = 0
        """Processes killed for an item that took too long."""
        self.deaths = 0
        """Processes that died without our kill."""

    @property
    def processes(self) -> list[GradingProcess]:
        """All live processes."""
        return self.workers + self.suspects.processes + self.spares

    @property
    def pending(self) -> int:
        """Uncollected items of this pool."""
        given = sum(len(process.items) for process in self.processes)
        done = len(self.passed_on) + len(self.finished)
        return len(self._waiting) + len(self.suspects.doubtful) + given + done

    @property
    def next_check_s(self) -> float | None:
        """Monotonic time of the next limit check; None without items."""
        checks = [p.check_at_s for p in self.processes if p.check_at_s is not None]
        if self.pending:
            checks.append(self._next_sweep_s)
        return min(checks, default=None)

    def submit(self, item: Item) -> None:
        """Add an item; the caller respects the pool's room."""
        self._waiting.append(item)

    def advance(self, now: float) -> list[GradingProcess]:
        """Check limits and give items to processes; return abandoned processes."""
        # Limits first: they free processes and make suspects.
        given_up = [process for process in self.processes if self._exceeds(process, now)]
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_S
            given_up += self._sweep(now)
        given_up += self._start_anew(self.suspects.surplus())
        is_busy = any(process.items for process in self.workers)
        for process, item in self.suspects.give_turns(now, is_busy=is_busy):
            self._give(process, item, now)
        while self._waiting and not self.suspects.keep_quiet(now):
            process = min(self.workers, key=_load, default=None)
            if process is None or (process.items and self._may_add_worker):
                process = self._new_worker(self._waiting[0])
            if len(process.items) >= _DEPTH[self._name]:
                break
            self._give(process, self._waiting.popleft(), now)
        return given_up

    @property
    def _may_add_worker(self) -> bool:
        waiting = sum(process.is_waiting for process in self.workers)
        return len(self.workers) - min(waiting, self._cfg.held_slow) < self._cfg.workers

    def _new_worker(self, item: Item) -> GradingProcess:
        """The spare or a new process; also fork the next spare."""
        process = self.spares.pop() if self.spares else self._fork(item)
        self.workers.append(process)
        if self._is_timed_by_cpu:
            # Early, because a fork takes milliseconds.
            self.spares.append(self._fork(item))
        return process

    def _fork(self, item: Item) -> GradingProcess:
        return self._fork_client.fork(self._name, item.needs)

    # --- replies --------------------------------------------------------------------------------

    def take(self, process: GradingProcess, reply: Reply) -> bool:
        """Handle a reply; return whether the process is no longer needed. Raises FrameError."""
        now = time.monotonic()
        if isinstance(reply, Loaded):
            # A hostile process must not gain time by repeated loading.
            if (reply.kind, reply.task) in process.loaded:
                raise FrameError(f"it loaded {reply.task!r} twice")
            process.loaded.add((reply.kind, reply.task))
            # Loading does not count as the item's time.
            process.note_first(now)
        elif isinstance(reply, Retiring):
            process.is_retiring = True
        else:
            self._finish(process, reply)
            process.note_first(now)
            self._note_forks(process)
        self._set_check(process)
        if process in self.suspects.processes and not process.items:
            # Only root may raise a priority again, so the process takes no other item.
            self._remove(process)
            return True
        return False

    def _finish(self, process: GradingProcess, reply: Graded | GradeFailed | Aborted) -> None:
        # A process answers in order: any other answer is forged.
        if not process.items or process.items[0].item_id != reply.item_id:
            raise FrameError(f"it answered item {reply.item_id}, which is not its turn")
        item = process.items.popleft()
        if isinstance(reply, Graded):
            self._advance_draft(item, reply.finding)
        elif isinstance(reply, GradeFailed):
            self._fail(item, reply.reason)
        else:
            self._blame(item, reply.fault, reply.detail or reply.fault)

    def _advance_draft(self, item: Item, finding: Finding) -> None:
        found = item.draft.add(finding)
        if isinstance(found, Score):
            self._score(item, found)
        else:
            # A new item, because faults count per step.
            self.passed_on.append(Item(item.item_id, found, item.pools, since_s=item.since_s))

    def _score(self, item: Item, score: Score) -> None:
        self.finished.append((item, ScoreDone(item.request.request_id, score)))

    def _fail(self, item: Item, reason: str, kind: str = UNGRADABLE) -> None:
        self.finished.append((item, ScoreFailed(item.request.request_id, reason, kind)))

    # --- limits ---------------------------------------------------------------------------------

    def _exceeds(self, process: GradingProcess, now: float) -> bool:
        """Check a process that is due; return whether it was abandoned."""
        if process.check_at_s is None or now < process.check_at_s:
            return False
        item, elapsed_s = process.items[0], now - process.first_since_s
        if item.needs not in process.loaded:
            reason = f"loading task {item.request.task!r} took over {START_TIMEOUT_S:.0f} s"
            return self._give_up(process, "start", reason)
        process.measure()
        fault = self._find_fault(process, now)
        if fault:
            detail = f"it computed for {process.used_s:.1f} s in {elapsed_s:.0f} s"
            if fault == WAITED:
                limit_s = self._cfg.timeout_s
                detail += f" and waited else (expert.verifier.{self._name}.timeout_s={limit_s:g})"
            return self._give_up(process, fault, detail)
        if self._is_timed_by_cpu:
            self._look_again(process, now)
        else:
            if self._name == CUSTOM:
                process.note_wait()
            process.check_at_s = now + LOOK_S
        return False

    def _find_fault(self, process: GradingProcess, now: float) -> str:
        """The limit that a process exceeded with its first item; empty for none."""
        if self._is_timed_by_cpu:
            is_spent = process.used_s >= self._cfg.timeout_s
        else:
            is_spent = process.own_elapsed_s(now) >= self._cfg.timeout_s
        if is_spent and self._name == CUSTOM:
            return TIMEOUT if process.computed_s >= COMPUTING * self._cfg.timeout_s else WAITED
        # A sandbox enforces the program's limits itself: beyond them the host is slow.
        if is_spent and self._name != CODE:
            return TIMEOUT
        is_host_slow = now - process.first_since_s >= self._cfg.max_elapsed_s
        return HOST if is_spent or is_host_slow else ""

    def _look_again(self, process: GradingProcess, now: float) -> None:
        if process in self.workers and process.used_s >= BRISK_S:
            self._make_suspect(process)
        limit_s = BRISK_S - process.used_s
        if process in self.suspects.processes:
            used_s = process.items[0].burnt_s + process.used_s
            lower_priority(process, process.items[0], used_s)
            limit_s = slice_left_s(used_s)
        limit_s = min(limit_s, self._cfg.timeout_s - process.used_s)
        # CPU time of one thread never outruns the clock, so no limit is reached before this check.
        # If CPU time lags behind, the next check follows soon.
        process.check_at_s = now + max(limit_s, BRISK_S / 4)

    def _make_suspect(self, process: GradingProcess) -> None:
        self.workers.remove(process)
        self.suspects.processes.append(process)
        first = process.items.popleft()
        # The process also read the later items, but `take` removes it after its first answer.
        self._requeue(process)
        process.items.append(first)

    def _give_up(self, process: GradingProcess, fault: str, reason: str) -> bool:
        self._blame(self._kill(process), fault, reason)
        return True

    def _kill(self, process: GradingProcess) -> Item:
        """Kill a process and return its first item; its others wait again."""
        item = process.items.popleft()
        item.burnt_s += process.used_s
        self._requeue(process)
        self.kills += 1
        self._remove(process)
        process.kill()
        return item

    def _sweep(self, now: float) -> list[GradingProcess]:
        """Abandon suspects with too much memory, and expire items that are open too long."""
        given_up = self._start_anew(self.suspects.oversized())
        last_s = now - self._answer_within_s
        for process in [*self.workers, *self.suspects.processes]:
            if process.items and process.items[0].since_s < last_s:
                given_up.append(process)
                self._expire(self._kill(process))
        for queue in (self._waiting, self.suspects.doubtful):
            for item in [item for item in queue if item.since_s < last_s]:
                queue.remove(item)
                self._expire(item)
        return given_up

    def _start_anew(self, processes: list[GradingProcess]) -> list[GradingProcess]:
        self.suspects.doubtful += [self._kill(process) for process in processes]
        return processes

    # --- faults ---------------------------------------------------------------------------------

    def on_death(self, process: GradingProcess) -> None:
        """Handle a dead process; its first item, if any, caused the death."""
        self._remove(process)
        # A process works on its first item only, so later items are innocent.
        if process.items and not process.is_retiring and process.exit_code != LOST:
            self.deaths += 1
            item = process.items.popleft()
            code = process.exit_code or 0
            detail = f"the grading process died (exit code {code}): {process.last_words()}"
            fault = "grading_crash" if code < 0 else "exit"
            self._blame(item, HOST if self._is_of_host(code) else fault, detail)
        self._requeue(process)

    def _is_of_host(self, exit_code: int) -> bool:
        """Whether the kernel ran out of memory and may have killed the process."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        return exit_code == -signal.SIGKILL and self._oom_kills > before

    def _blame(self, item: Item, fault: str, detail: str) -> None:
        request_id = item.request.request_id
        item.faults = [*item.faults, fault]
        if told := self._repetitions.note(detail):
            log.warning("request %d, attempt %d: %s", request_id, len(item.faults), told)
        self._settle(item, judge(item.faults), detail)

    def _expire(self, item: Item) -> None:
        detail = f"open for over {self._answer_within_s:.0f} s (expert.verifier.answer_within_s)"
        self._settle(item, judge_unfinished(item.faults), detail)

    def _settle(self, item: Item, outcome: Outcome, detail: str) -> None:
        if outcome is Outcome.RETRY:
            self.suspects.doubtful.append(item)
        elif outcome is Outcome.SCORE:
            reason = next(fault for fault in reversed(item.faults) if fault in MODEL_FAULTS)
            self._score(item, unverified(item.draft, self._rules, reason))
        else:
            kind = NOT_GRADED if outcome is Outcome.NOT_GRADED else UNGRADABLE
            self._fail(item, detail, kind)

    def _note_forks(self, process: GradingProcess) -> None:
        for line in process.find_forks() if self._name == CUSTOM else ():
            if told := self._repetitions.note(line):
                log.warning("%s", told)

    def _requeue(self, process: GradingProcess) -> None:
        # In front, in their old order: these items waited longest.
        self._waiting.extendleft(reversed(process.items))
        process.items.clear()

    def _remove(self, process: GradingProcess) -> None:
        process.check_at_s = None
        for group in (self.workers, self.suspects.processes, self.spares):
            if process in group:
                group.remove(process)

    def _give(self, process: GradingProcess, item: Item, now: float) -> None:
        process.give(item, now)
        if len(process.items) == 1:
            self._set_check(process)

    def _set_check(self, process: GradingProcess) -> None:
        if not process.items or process.is_paused:
            process.check_at_s = None
            return
        limit_s = min(BRISK_S if self._is_timed_by_cpu else LOOK_S, self._cfg.timeout_s)
        if process.items[0].needs not in process.loaded:
            limit_s = START_TIMEOUT_S
        process.check_at_s = process.first_since_s + limit_s


def _load(process: GradingProcess) -> tuple[int, float]:
    """Sort key: the process that will answer its next item soonest comes first."""
    # Among equals the process silent longest comes last: it may hang.
    return len(process.items), -process.first_since_s
