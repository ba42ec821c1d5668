"""One lane of grading: which process gets which item, and what a fault of a process means.

Runs in the verifier; used by `pool.py`. An item is one step of one score. Three kinds of process:

- A *worker* takes new items. It stays for the next one when it has answered.
- A *suspect* is at the lowest priority, has one item, and ends with it. A worker becomes one when
  its item takes longer than BRISK_S (in lanes limited by CPU time), so that nothing waits behind
  the item; an item that failed is tried again by a new one.
- A *spare* is forked and idle. It takes the place of a worker that became a suspect, at once.

| event | first time | second time |
|---|---|---|
| the item exceeds timeout_s | tried again | Score with reason "grading_timeout" |
| memory or stack runs out | tried again | Score with "grading_memory", "grading_depth" |
| a signal ends the process | tried again | Score with reason "grading_crash" |
| the process exits by itself | tried again | ScoreFailed: our own failure, never a reward |
| it retires, or dies idle or with the fork server | nobody is blamed | nobody is blamed |

Why not pebble 5.2.3: a worker that dies while idle breaks its whole pool, its workers share one
pipe and lock, it pickles, and a worker that hangs holds up what waits behind it.
"""

import logging
import time
from collections import deque

from megatron_rl.config.reward import ANSWERS, CODE, CUSTOM, LANGUAGE, LaneConfig
from megatron_rl.protocol.types import Score, ScoreDone, ScoreFailed
from verification.draft import Finding
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
from verification.rules import RewardRules
from verification.score import unverified

START_TIMEOUT_S = 60.0
"""A grading process that has not loaded a task's libraries by then has failed."""
BRISK_S = 0.025
"""CPU time after which an item no longer holds up others."""
PATIENCE = 10
"""Elapsed time may be so many times the limit of CPU time: the machine may be crowded."""
MAX_ATTEMPTS = 3
# What hostile text can do to a process. That it exits by itself is not among them: only our code
# and the user's call exit(), so that a bug there is never taken for a wrong answer.
MODEL_FAULTS = frozenset({"grading_timeout", "grading_memory", "grading_depth", "grading_crash"})
# Items given to one process at a time, so that it need not wait for a round trip between two. Where
# an item may take long, others had better wait here, where any process can take them.
_DEPTH = {ANSWERS: 2, LANGUAGE: 8, CODE: 1, CUSTOM: 1}
# Code and custom rewards wait for other processes; CPU time of their own says little.
_ELAPSED = frozenset({CODE, CUSTOM})

Finished = ScoreDone | ScoreFailed
"""What the queue is told about a request."""
log = logging.getLogger(__name__)


class Lane:
    """Items and processes of one kind of grading."""

    def __init__(
        self, name: str, cfg: LaneConfig, *, rules: RewardRules, fork_client: ForkClient
    ) -> None:
        self._name = name
        self._cfg = cfg
        self._rules = rules
        self._fork_client = fork_client
        self._waiting: deque[Item] = deque()
        self._doubtful: deque[Item] = deque()
        """Items that failed or must not hold up others; only suspects take them."""
        self.workers: list[GradingProcess] = []
        self.suspects: list[GradingProcess] = []
        self.spares: list[GradingProcess] = []
        """Idle and ready to replace a worker that is held up; one in lanes limited by CPU time."""
        self.passed_on: list[Item] = []
        """Items whose next step is due in another lane, or here once more."""
        self.finished: list[tuple[Item, Finished]] = []
        self.kills = 0
        """Processes killed for an item that took too long."""
        self.deaths = 0
        """Processes that died by themselves."""

    @property
    def processes(self) -> list[GradingProcess]:
        """All live processes."""
        return self.workers + self.suspects + self.spares

    @property
    def pending(self) -> int:
        """Items that are here and not collected yet."""
        given = sum(len(process.items) for process in self.processes)
        done = len(self.passed_on) + len(self.finished)
        return len(self._waiting) + len(self._doubtful) + given + done

    @property
    def next_check_s(self) -> float | None:
        """Monotonic time of the next check of a limit; None when nothing is in flight."""
        checks = [p.check_at_s for p in self.processes if p.check_at_s is not None]
        return min(checks, default=None)

    def submit(self, item: Item) -> None:
        """Add an item; the caller keeps to the room of the lane."""
        self._waiting.append(item)

    def advance(self, now: float) -> list[GradingProcess]:
        """Check limits, hand items out; the processes that were given up."""
        # First the limits, since they free processes and change who is a suspect.
        given_up = [process for process in self.processes if self._exceeds(process, now)]
        while self._doubtful and len(self.suspects) < self._cfg.workers:
            item = self._doubtful.popleft()
            process = self._fork(item)
            process.give_way()
            self.suspects.append(process)
            self._give(process, item, now)
        while self._waiting:
            process = min(self.workers, key=_load, default=None)
            if process is None or (process.items and len(self.workers) < self._cfg.workers):
                process = self._new_worker(self._waiting[0])
            if len(process.items) >= _DEPTH[self._name]:
                break
            self._give(process, self._waiting.popleft(), now)
        return given_up

    def _new_worker(self, item: Item) -> GradingProcess:
        """The spare, or a new process where there is none; the next spare is on its way then."""
        process = self.spares.pop() if self.spares else self._fork(item)
        self.workers.append(process)
        if self._name not in _ELAPSED:
            # Already now: the fork takes milliseconds in which the item to be overtaken runs on.
            self.spares.append(self._fork(item))
        return process

    def _fork(self, item: Item) -> GradingProcess:
        return self._fork_client.fork(self._name, item.needs)

    # --- replies --------------------------------------------------------------------------------

    def take(self, process: GradingProcess, reply: Reply) -> bool:
        """Take in a reply; whether the process is done with. Raises FrameError for nonsense."""
        now = time.monotonic()
        if isinstance(reply, Loaded):
            # A process in the hands of hostile text must not win time by loading again and again.
            if (reply.kind, reply.task) in process.loaded:
                raise FrameError(f"it loaded {reply.task!r} twice")
            process.loaded.add((reply.kind, reply.task))
            # The time of loading is not the item's.
            process.note_first(now)
        elif isinstance(reply, Retiring):
            process.is_retiring = True
        else:
            self._finish(process, reply)
            process.note_first(now)
        self._set_check(process)
        if process in self.suspects and not process.items:
            # Only root may raise a priority again, so it is of no use for the next item.
            self._remove(process)
            return True
        return False

    def _finish(self, process: GradingProcess, reply: Graded | GradeFailed | Aborted) -> None:
        # A process answers in the order in which it was asked: any other answer is forged.
        if not process.items or process.items[0].item_id != reply.item_id:
            raise FrameError(f"it answered item {reply.item_id}, which is not its turn")
        item = process.items.popleft()
        if isinstance(reply, Graded):
            self._advance_draft(item, reply.finding)
        elif isinstance(reply, GradeFailed):
            self._fail(item, reply.reason)
        else:
            self._blame(item, reply.fault, reply.fault)

    def _advance_draft(self, item: Item, finding: Finding) -> None:
        found = item.draft.add(finding)
        if isinstance(found, Score):
            self._score(item, found)
        else:
            # A new item: faults count for each step by itself.
            self.passed_on.append(Item(item.item_id, found, item.lanes))

    def _score(self, item: Item, score: Score) -> None:
        self.finished.append((item, ScoreDone(item.request.request_id, score)))

    def _fail(self, item: Item, reason: str) -> None:
        self.finished.append((item, ScoreFailed(item.request.request_id, reason)))

    # --- limits ---------------------------------------------------------------------------------

    def _exceeds(self, process: GradingProcess, now: float) -> bool:
        """Look at a process whose check is due; whether it was given up."""
        if process.check_at_s is None or now < process.check_at_s:
            return False
        item, elapsed_s = process.items[0], now - process.first_since_s
        if item.needs not in process.loaded:
            reason = f"loading task {item.request.task!r} took over {START_TIMEOUT_S:.0f} s"
            return self._give_up(process, "start", reason)
        if self._name in _ELAPSED:
            return self._give_up(process, "grading_timeout", "it took too long")
        used_s = process.cpu_on_first_s
        if used_s >= self._cfg.timeout_s or elapsed_s >= PATIENCE * self._cfg.timeout_s:
            return self._give_up(process, "grading_timeout", "it took too long")
        if process in self.workers and used_s >= BRISK_S:
            if len(self.suspects) >= self._cfg.workers:
                # Too many at once would crowd the machine. It starts anew when its turn comes.
                self._doubtful.append(process.items.popleft())
                return self._give_up(process, "", "")
            self._make_suspect(process)
        elif process in self.suspects and not process.has_given_way:
            # The kernel refused it before (see give_way).
            process.give_way()
        is_at_rest = process in self.suspects and process.has_given_way
        limit_s = self._cfg.timeout_s if is_at_rest else BRISK_S
        # The CPU time of one thread never outruns the clock, so no limit is reached before this. It
        # may lag behind: then little is missing at the check, and the next follows soon.
        process.check_at_s = now + max(limit_s - used_s, BRISK_S / 4)
        return False

    def _make_suspect(self, process: GradingProcess) -> None:
        self.workers.remove(process)
        self.suspects.append(process)
        first = process.items.popleft()
        # It has read those behind the first as well and would answer them; that answer never comes
        # in, because `take` removes a suspect with the answer to its first.
        self._requeue(process)
        process.items.append(first)
        process.give_way()

    def _give_up(self, process: GradingProcess, fault: str, reason: str) -> bool:
        self.kills += 1
        if fault:
            self._blame(process.items.popleft(), fault, reason)
        self._requeue(process)
        self._remove(process)
        process.kill()
        return True

    # --- deaths ---------------------------------------------------------------------------------

    def on_death(self, process: GradingProcess) -> None:
        """Account for a process that is gone: its first item is to blame, if it has any."""
        self._remove(process)
        # Processes work on one item at a time, in order: those behind the first are innocent.
        if process.items and not process.is_retiring and process.exit_code != LOST:
            self.deaths += 1
            item = process.items.popleft()
            code = process.exit_code or 0
            detail = f"the grading process died (exit code {code}): {process.last_words()}"
            self._blame(item, "grading_crash" if code < 0 else "exit", detail)
        self._requeue(process)

    def _blame(self, item: Item, fault: str, detail: str) -> None:
        request_id = item.request.request_id
        item.faults = [*item.faults, fault]
        log.warning("request %d, attempt %d: %s", request_id, len(item.faults), detail)
        # The same fault twice, in two processes, is the item's and not the machine's.
        if item.faults.count(fault) > 1 and fault in MODEL_FAULTS:
            self._score(item, unverified(item.draft, self._rules, fault))
        elif item.faults.count(fault) > 1 or len(item.faults) >= MAX_ATTEMPTS:
            self._fail(item, detail)
        else:
            self._doubtful.append(item)

    def _requeue(self, process: GradingProcess) -> None:
        # In front and in their old order: they have waited longest.
        self._waiting.extendleft(reversed(process.items))
        process.items.clear()

    def _remove(self, process: GradingProcess) -> None:
        process.check_at_s = None
        for group in (self.workers, self.suspects, self.spares):
            if process in group:
                group.remove(process)

    def _give(self, process: GradingProcess, item: Item, now: float) -> None:
        process.give(item, now)
        if len(process.items) == 1:
            self._set_check(process)

    def _set_check(self, process: GradingProcess) -> None:
        if not process.items:
            process.check_at_s = None
            return
        limit_s = self._cfg.timeout_s
        if process.items[0].needs not in process.loaded:
            limit_s = START_TIMEOUT_S
        elif process in self.workers and self._name not in _ELAPSED:
            limit_s = min(BRISK_S, limit_s)
        process.check_at_s = process.first_since_s + limit_s


def _load(process: GradingProcess) -> tuple[int, float]:
    """Sorts the process first whose next item will be answered soonest."""
    # Among equals the one silent longest comes last: it may hang.
    return len(process.items), -process.first_since_s
