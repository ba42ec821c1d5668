"""The class requests of a verifier: from texts to classes, a comparison at a time.

Runs in the verifier's only thread; used by `worker.py`. What plain text leaves open is compared in
the grading processes of the task's worker pool, like an answer with its reference: under the same
limits, and tried again like it.

Format checks and quick comparisons run here. `advance` makes a bounded number of them, so that a
request of many answers holds up no other; `has_work` tells that it is to be called again.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass

from megatron_rl.config.reward import Step
from megatron_rl.protocol.class_messages import ClassDone, ClassRequest
from megatron_rl.protocol.types import NOT_GRADED, Score, ScoreDone, ScoreFailed, ScoreRequest
from verification.classes import Clustering, Pair
from verification.comparisons import Equivalence, find_comparison
from verification.draft import Draft
from verification.format_checks import FORMAT_CHECKS, FormatResult
from verification.pool.faults import MODEL_FAULTS
from verification.pool.pool import Pool
from verification.rules import RewardRules

PAIRS_A_TURN = 64
"""Quick comparisons before others get their turn."""
Answered = ClassDone | ScoreFailed
"""What the queue is told about a class request."""


@dataclass
class _Open:
    """A class request under way."""

    request: ClassRequest
    answers: list[str | None]
    clustering: Clustering
    equivalence: Equivalence
    step: Step
    since_s: float
    """Monotonic time at which it came."""


class ClassDesk:
    """Finds the classes of requests, each with at most one comparison in the pool."""

    def __init__(self, pool: Pool, rules: RewardRules, *, answer_within_s: float) -> None:
        self._pool = pool
        self._rules = rules
        self._answer_within_s = answer_within_s
        self._ready: deque[_Open] = deque()
        """Requests whose next comparison may be made."""
        self._in_pool: dict[int, _Open] = {}
        """By the id of a comparison that the pool makes, whose request waits for it."""
        # Below 0: the queue's ids, which the pool also knows, begin at 0.
        self._pair_ids = itertools.count(-1, -1)

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._ready) + len(self._in_pool)

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do at once."""
        return bool(self._ready)

    def take(self, request: ClassRequest) -> None:
        """Begin with a request. GradingError for an unknown task."""
        task = self._rules.task(request.task)
        equivalence = find_comparison(task.compare).equivalence
        checked = map(FORMAT_CHECKS[task.format_check], request.texts, request.prompt_tails)
        answers = [None if g.refusal else equivalence.form(g.answer) for g in checked]
        clustering = Clustering(answers, compares=equivalence.judge is not None)
        step = self._rules.reward.class_step(request.task)
        self._ready.append(
            _Open(request, answers, clustering, equivalence, step, since_s=time.monotonic())
        )

    def owns(self, finished: ScoreDone | ScoreFailed) -> bool:
        """Whether the pool has made a comparison for this desk."""
        return finished.request_id < 0

    def take_verdict(self, finished: ScoreDone | ScoreFailed) -> list[Answered]:
        """Take in a comparison of the pool; a failure of our own fails its request."""
        waiting = self._in_pool.pop(finished.request_id, None)
        if waiting is None:
            return []  # Its request was given up.
        if isinstance(finished, ScoreFailed):
            request_id = waiting.request.request_id
            return [ScoreFailed(request_id, finished.reason, finished.kind)]
        _note(waiting.clustering, finished.score)
        self._ready.append(waiting)
        return []

    def advance(self, now: float) -> list[Answered]:
        """Go on with the requests that can; those that are answered."""
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
        """Whether plain text has decided about a pair; else the pool is asked."""
        checked, request = self._question(found, pair)
        verdict = found.equivalence.quick(checked, request, self._rules)
        if verdict is not None:
            found.clustering.note(is_same=verdict.is_correct)
            return True
        self._in_pool[request.request_id] = found
        self._pool.submit(Draft(request, checked, {}, "", (found.step,)))
        return False

    def _question(self, found: _Open, pair: Pair) -> tuple[FormatResult, ScoreRequest]:
        """The one answer, and the other in the place of a reference."""
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
        """Give up what is open for too long; a comparison in the pool ends by limits of its own."""
        last_s = now - self._answer_within_s
        late = [found for found in self._ready if found.since_s < last_s]
        for found in late:
            self._ready.remove(found)
        for pair_id in [n for n, found in self._in_pool.items() if found.since_s < last_s]:
            late.append(self._in_pool.pop(pair_id))
        detail = f"open for over {self._answer_within_s:.0f} s (expert.verifier.answer_within_s)"
        return [ScoreFailed(found.request.request_id, detail, NOT_GRADED) for found in late]


def _note(clustering: Clustering, score: Score) -> None:
    """What the pool says about a pair."""
    if score.reason in MODEL_FAULTS:
        clustering.note_fault()
    else:
        clustering.note(is_same=score.is_correct)
