"""A pool of killable grading processes.

Runs in the verifier's only thread. Several items are in flight to each process, so that a round
trip is not paid per item; the process answers in order, so the first unanswered item is the one
that a hang or a death is due to. The others go to another process.

| event | consequence |
|---|---|
| the first item exceeds timeout_s | its process is killed; Score with reason "grading_timeout" |
| a process reports memory exhausted | Score with reason "grading_memory"; the process is replaced |
| a process dies | its first item is tried once more, then ScoreFailed: never a reward |
| a process retires | it is replaced; nobody is blamed |

Why not pebble 5.2.3: a worker that dies while idle breaks its whole pool, its workers share one
pipe and lock, and it pickles.
"""

import itertools
import logging
import select
import signal
import time
from collections import deque
from types import TracebackType
from typing import Self

from megatron_rl.protocol.config import VerifierConfig
from megatron_rl.protocol.types import ScoreDone, ScoreFailed, ScoreRequest
from verification.frames import FrameError, Graded, GradeFailed, Loaded, Reply, Retiring
from verification.grading_process import GradingProcess, Item
from verification.score import RewardRules, score_unverified

START_TIMEOUT_S = 60.0
"""A grading process that has not loaded a task's libraries by then has failed."""
MAX_IN_FLIGHT = 4
"""Items given to one process at a time; those behind one that hangs wait for its deadline."""
MAX_DEATHS = 2
"""An item on which so many processes died is given up."""

Outcome = ScoreDone | ScoreFailed
log = logging.getLogger(__name__)


class Pool:
    """Grades requests in at most cfg.workers processes, started when first needed.

    Call `collect` whenever `fileno()` is readable and at `next_deadline_s`. Nothing else runs.
    """

    def __init__(self, cfg: VerifierConfig, rules: RewardRules) -> None:
        self._cfg = cfg
        self._rules = rules
        self._waiting: deque[Item] = deque()
        self._processes: dict[int, GradingProcess] = {}
        self._outcomes: list[Outcome] = []
        self._item_ids = itertools.count()
        self.kills = 0
        """Processes killed at a deadline."""
        self.deaths = 0
        """Processes that died by themselves."""

    def __enter__(self) -> Self:
        self._epoll = select.epoll()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in list(self._processes.values()):
            self._remove(process)
        self._epoll.close()

    def fileno(self) -> int:
        """Descriptor that is readable when `collect` has something to do."""
        return self._epoll.fileno()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live grading processes."""
        return [process.pid for process in self._processes.values()]

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        in_flight = sum(len(process.items) for process in self._processes.values())
        return len(self._waiting) + in_flight + len(self._outcomes)

    @property
    def next_deadline_s(self) -> float | None:
        """Monotonic time of the earliest deadline; None when nothing is in flight."""
        deadlines = [p.deadline_s for p in self._processes.values() if p.deadline_s is not None]
        return min(deadlines, default=None)

    def submit(self, request: ScoreRequest) -> None:
        """Add a request; the caller keeps `pending` within its limit."""
        self._waiting.append(Item(next(self._item_ids), request))

    def collect(self) -> list[Outcome]:
        """Move everything on as far as it goes without waiting; finished requests."""
        for descriptor, _ in self._epoll.poll(0):
            process = self._processes[descriptor]
            process.flush()
            self._read(process)
        self._enforce_deadlines()
        self._hand_out()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _read(self, process: GradingProcess) -> None:
        try:
            for reply in process.receive():
                self._take(process, reply)
        except FrameError as error:
            log.error("grading process %d: %s", process.pid, error)
            process.is_closed = True
        if process.is_closed:
            self._bury(process)
        else:
            self._watch(process)

    def _take(self, process: GradingProcess, reply: Reply) -> None:
        if isinstance(reply, Loaded):
            if reply.task in process.loaded:
                raise FrameError(f"it loaded {reply.task!r} twice")
            process.loaded.add(reply.task)
        elif isinstance(reply, Retiring):
            self._requeue(process)
            process.is_closed = True
        else:
            self._finish(process, reply)
        self._set_deadline(process)

    def _finish(self, process: GradingProcess, reply: Graded | GradeFailed) -> None:
        if not process.items or process.items[0].item_id != reply.item_id:
            raise FrameError(f"it answered item {reply.item_id}, which is not its turn")
        request_id = process.items.popleft().request.request_id
        if isinstance(reply, Graded):
            self._outcomes.append(ScoreDone(request_id, reply.score))
        else:
            self._outcomes.append(ScoreFailed(request_id, reply.reason))

    def _set_deadline(self, process: GradingProcess) -> None:
        if not process.items:
            process.deadline_s = None
        elif process.items[0].request.task in process.loaded:
            process.deadline_s = time.monotonic() + self._cfg.timeout_s
        else:
            process.deadline_s = time.monotonic() + START_TIMEOUT_S

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for process in list(self._processes.values()):
            if process.deadline_s is None or now < process.deadline_s:
                continue
            self.kills += 1
            item = process.items.popleft()
            self._requeue(process)
            self._remove(process)
            if item.request.task in process.loaded:
                self._time_out(item)
            else:
                reason = f"loading task {item.request.task!r} took over {START_TIMEOUT_S:.0f} s"
                self._blame(item, reason)

    def _bury(self, process: GradingProcess) -> None:
        """Account for a process that hung up: its first item is to blame, if it has any."""
        if not process.items:
            self._remove(process)
            return
        self.deaths += 1
        process.wait_for_exit()
        last_words = process.last_words()
        item = process.items.popleft()
        self._requeue(process)
        exit_code = self._remove(process)
        if exit_code == -signal.SIGXCPU:
            self._time_out(item)
        else:
            self._blame(item, f"the grading process died (exit code {exit_code}): {last_words}")

    def _time_out(self, item: Item) -> None:
        score = score_unverified(item.request, self._rules, "grading_timeout")
        self._outcomes.append(ScoreDone(item.request.request_id, score))

    def _blame(self, item: Item, reason: str) -> None:
        item.deaths += 1
        log.warning("request %d, attempt %d: %s", item.request.request_id, item.deaths, reason)
        if item.deaths >= MAX_DEATHS:
            self._outcomes.append(ScoreFailed(item.request.request_id, reason))
        else:
            self._waiting.appendleft(item)

    def _requeue(self, process: GradingProcess) -> None:
        self._waiting.extendleft(reversed(process.items))
        process.items.clear()

    def _hand_out(self) -> None:
        while self._waiting:
            process = min(self._processes.values(), key=_load, default=None)
            if process is None or (process.items and len(self._processes) < self._cfg.workers):
                process = self._start()
            if len(process.items) >= MAX_IN_FLIGHT:
                return
            process.give(self._waiting.popleft())
            if len(process.items) == 1:
                self._set_deadline(process)
            self._watch(process)

    def _start(self) -> GradingProcess:
        process = GradingProcess(self._cfg, self._rules)
        descriptor = process.connection.fileno()
        self._processes[descriptor] = process
        self._epoll.register(descriptor, select.EPOLLIN)
        return process

    def _watch(self, process: GradingProcess) -> None:
        events = select.EPOLLIN | (select.EPOLLOUT if process.has_unsent else 0)
        self._epoll.modify(process.connection.fileno(), events)

    def _remove(self, process: GradingProcess) -> int:
        del self._processes[process.connection.fileno()]
        return process.end()


def _load(process: GradingProcess) -> tuple[int, float]:
    """Sorts the process first whose next item will be answered soonest."""
    # Among equals the one nearest to its deadline has been silent longest: it may hang.
    return len(process.items), -(process.deadline_s or 0.0)
