"""Equivalence classes of the answers of one prompt: the class requests of a verifier.

Runs in the verifier's only thread. Answers are taken in order. Each is compared with the first
answer of each class, oldest first, and joins the first class with an equal founder, or founds one.

Plain text decides quick comparisons here. The grading processes of the task's worker pool compare
the rest, like an answer with its reference: under the same limits and retries. `ClassDesk.advance`
makes a bounded number of quick comparisons, so that a request of many answers delays no other;
`has_work` tells that it must be called again.

A comparison that exceeds a limit of grading does not say which answer is to blame: the two count as
different. After MAX_FAULTS of these an answer is compared no more and becomes a class.
A founder without a finished comparison is compared no more. So at most MAX_FAULTS * n comparisons
exceed a limit, and far fewer if answers hang in every comparison.
"""

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.config.reward import Step
from megatron_rl.protocol.types import (
    NO_ANSWER,
    NOT_GRADED,
    ClassDone,
    ClassRequest,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
)
from verification.comparisons import Equivalence, find_comparison
from verification.draft import Draft
from verification.format import FORMAT_CHECKS, FormatResult
from verification.pool.faults import MODEL_FAULTS
from verification.pool.pool import Pool
from verification.rules import RewardRules

MAX_FAULTS = 2
"""Comparisons of an answer that may exceed a limit: one may be the other answer's fault."""
PAIRS_A_TURN = 64
"""Quick comparisons in one call of `advance`."""
Answered = ClassDone | ScoreFailed
"""The answer to a class request."""


class Pair(NamedTuple):
    """Two answers to compare."""

    answer: int
    """Its index."""
    founder: int
    """Index of the answer that represents its class."""


class Clustering:
    """The classes of answers, as far as known; requests one comparison at a time."""

    def __init__(self, answers: Sequence[str | None], *, compares: bool = True) -> None:
        """None: no answer. compares: answers of different text may be the same."""
        self._answers = answers
        self._compares = compares
        self.classes: list[int] = []
        """Class of each of the first answers; of all answers when `advance` returns None."""
        self._founders: list[int] = []
        """By class, the index of its first answer."""
        self._class_of: dict[str, int] = {}
        """Class of each text seen so far."""
        self._compared = 0
        """Number of founders that the current answer has been compared with."""
        self._faults: Counter[int] = Counter()
        """By index of an answer, its comparisons that exceeded a limit."""
        self._sound: set[int] = set()
        """Indices of answers that finished a comparison."""

    def advance(self) -> Pair | None:
        """The pair to compare next; None when all classes are known."""
        while (place := len(self.classes)) < len(self._answers):
            answer = self._answers[place]
            if answer is None:
                self._settle(NO_ANSWER)
            elif answer in self._class_of:
                self._settle(self._class_of[answer])
            elif (founder := self._next_founder(place)) is not None:
                return Pair(place, founder)
            else:
                self._founders.append(place)
                self._settle(len(self._founders) - 1)
        return None

    def note(self, *, is_same: bool) -> None:
        """Record the verdict on the pair that `advance` has returned."""
        self._sound.update(self._pair())
        if is_same:
            self._settle(self._compared)
        else:
            self._compared += 1

    def note_fault(self) -> None:
        """Record that comparing the pair exceeded a limit."""
        self._faults.update(self._pair())
        self._compared += 1

    def _pair(self) -> Pair:
        pair = self.advance()
        assert pair is not None
        return pair

    def _next_founder(self, place: int) -> int | None:
        if not self._compares or self._faults[place] >= MAX_FAULTS:
            return None
        while self._compared < len(self._founders):
            founder = self._founders[self._compared]
            if founder in self._sound or self._faults[founder] < MAX_FAULTS:
                return founder
            self._compared += 1
        return None

    def _settle(self, found: int) -> None:
        answer = self._answers[len(self.classes)]
        if answer is not None:
            self._class_of[answer] = found
        self.classes.append(found)
        self._compared = 0


@dataclass
class _Open:
    """An open class request."""

    request: ClassRequest
    answers: list[str | None]
    clustering: Clustering
    equivalence: Equivalence
    step: Step
    since_s: float
    """Monotonic time of its arrival."""


class ClassDesk:
    """Finds the classes of requests, each with at most one comparison in the pool."""

    def __init__(self, pool: Pool, rules: RewardRules, *, answer_within_s: float) -> None:
        self._pool = pool
        self._rules = rules
        self._answer_within_s = answer_within_s
        self._ready: deque[_Open] = deque()
        """Requests ready for their next comparison."""
        self._in_pool: dict[int, _Open] = {}
        """By the id of a comparison in the pool, the request that waits for it."""
        # Below 0: the queue's ids, which the pool also knows, begin at 0.
        self._pair_ids = itertools.count(-1, -1)

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._ready) + len(self._in_pool)

    @property
    def has_work(self) -> bool:
        """Whether `advance` can work at once."""
        return bool(self._ready)

    def take(self, request: ClassRequest) -> None:
        """Start a request. GradingError for an unknown task."""
        task = self._rules.task(request.task)
        equivalence = find_comparison(task.compare).equivalence
        check, tags = FORMAT_CHECKS[task.format_check], self._rules.tags
        pairs = zip(request.texts, request.prompt_tails, strict=False)
        checked = [check(text, tail, tags) for text, tail in pairs]
        answers = [None if g.refusal else equivalence.form(g.answer) for g in checked]
        clustering = Clustering(answers, compares=equivalence.judge is not None)
        step = self._rules.reward.class_step(request.task)
        self._ready.append(
            _Open(request, answers, clustering, equivalence, step, since_s=time.monotonic())
        )

    def owns(self, finished: ScoreDone | ScoreFailed) -> bool:
        """Whether this desk asked the pool for this comparison."""
        return finished.request_id < 0

    def take_verdict(self, finished: ScoreDone | ScoreFailed) -> list[Answered]:
        """Record a comparison of the pool; if grading failed, its request fails."""
        waiting = self._in_pool.pop(finished.request_id, None)
        if waiting is None:
            return []  # Its request was given up.
        if isinstance(finished, ScoreFailed):
            request_id = waiting.request.request_id
            return [ScoreFailed(request_id, finished.reason, finished.kind)]
        if finished.score.reason in MODEL_FAULTS:
            waiting.clustering.note_fault()
        else:
            waiting.clustering.note(is_same=finished.score.is_correct)
        self._ready.append(waiting)
        return []

    def advance(self, now: float) -> list[Answered]:
        """Work on the ready requests; return the finished answers."""
        answered: list[Answered] = self._expire(now)
        for _ in range(PAIRS_A_TURN):
            if not self._ready:
                break
            found = self._ready.popleft()
            pair = found.clustering.advance()
            if pair is None:
                classes = found.clustering.classes
                answered.append(ClassDone(found.request.request_id, classes))
            elif self._compare_quickly(found, pair):
                self._ready.append(found)
        return answered

    def _compare_quickly(self, found: _Open, pair: Pair) -> bool:
        """Whether plain text has decided a pair; else ask the pool."""
        checked, request = self._question(found, pair)
        verdict = found.equivalence.quick(checked, request, self._rules)
        if verdict is not None:
            found.clustering.note(is_same=verdict.is_correct)
            return True
        self._in_pool[request.request_id] = found
        self._pool.submit(Draft(request, checked, (found.step,)))
        return False

    def _question(self, found: _Open, pair: Pair) -> tuple[FormatResult, ScoreRequest]:
        """A question with one answer, and the other as its reference."""
        asked, answer, founder = found.request, *(found.answers[place] for place in pair)
        assert answer is not None and founder is not None
        request = ScoreRequest(
            request_id=next(self._pair_ids),
            task=asked.task,
            answer=founder,
            entry=asked.entry,
            text=asked.texts[pair.answer],
            completion_tokens=0,
            is_finished=True,
            problem=asked.problem,
            prompt_tail=asked.prompt_tails[pair.answer],
        )
        return FormatResult(answer=answer), request

    def _expire(self, now: float) -> list[Answered]:
        """Give up requests that are open too long; the pool ends their comparisons."""
        last_s = now - self._answer_within_s
        late = [found for found in self._ready if found.since_s < last_s]
        for found in late:
            self._ready.remove(found)
        for pair_id in [n for n, found in self._in_pool.items() if found.since_s < last_s]:
            late.append(self._in_pool.pop(pair_id))
        detail = f"open for over {self._answer_within_s:.0f} s (expert.verifier.answer_within_s)"
        return [ScoreFailed(found.request.request_id, detail, NOT_GRADED) for found in late]
