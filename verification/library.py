"""Grading outside a run: the same pool as in a run, called like a function.

Used by `megatron-rl verify`, by benchmarks, and from Python:

    with Grading.of(load_config(Path("my_run.toml"), [])) as grading:
        scores = grading.score([Sample(text=..., answer="7")])
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import msgspec

from megatron_rl.config.reward import RewardConfig, VerifierConfig
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.config.tree import Config
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.types import (
    ClassDone,
    ClassRequest,
    Score,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
)
from verification.classes import ClassDesk
from verification.draft import Draft
from verification.pool.pool import Pool
from verification.rules import RewardRules
from verification.sandbox.time_limits import is_readable
from verification.score import screen
from verification.verdict import GradingError

MAX_PENDING = 512
CLASSES_AT_ONCE = 32
"""Concurrent class requests: each has at most one comparison in the pool."""
POLL_S = 0.1


Answer = str | int | float | list[str | int | float]
"""A reference, or several accepted ones."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A completion to grade, with its reference."""

    text: str
    """The completion."""
    answer: Answer = ""
    """The reference, or a list of accepted answers."""
    task: str = "math"
    entry: str = ""
    """JSON that the task needs: a reasoning_gym entry, the tests of a program."""
    problem: str = ""
    """The question: gives the language, and a copy of it is refused as an answer."""
    language: str = ""
    """Language that the response must be in; empty: that of the problem."""
    tokens: int = 0
    """Completion tokens, for the length penalty."""
    is_finished: bool = True
    seed: int = 0
    """The same for all completions of a problem: draws its tests."""
    prompt_tail: str = ""
    """The end of the rendered prompt, which may open the thoughts."""
    other_answers: list[str] = []
    """Further accepted answers."""
    length_rule: LengthRule | None = None
    """None: the limit of the `Grading`, and the margin of its reward section."""


class Grading(Closing):
    """A pool of grading processes for samples from any source."""

    def __init__(
        self,
        reward: RewardConfig | None = None,
        verifier: VerifierConfig | None = None,
        *,
        max_tokens: int = 1 << 20,
        tags: ThinkTags = HOUSE_TAGS,
    ) -> None:
        """max_tokens: limit of a completion, to which the length penalty refers. tags: around
        thoughts.
        """
        self._rules = RewardRules(reward=reward or RewardConfig(), max_tokens=max_tokens, tags=tags)
        verifier = verifier or VerifierConfig()
        self.pool = Pool(verifier, self._rules)
        # One for all calls: its numbers for comparisons are never used twice in a pool.
        self._desk = ClassDesk(self.pool, self._rules, answer_within_s=verifier.answer_within_s)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Grading by the rules and limits of a run."""
        return cls(
            config.reward,
            config.verifier,
            max_tokens=config.sampling.max_new_tokens,
            tags=config.render.tags,
        )

    def __enter__(self) -> Self:
        self.pool.__enter__()
        return self

    def close(self) -> None:
        """End all grading processes."""
        self.pool.close()

    def score(self, samples: Iterable[Sample]) -> list[Score | ScoreFailed]:
        """Scores in the order of the samples; ScoreFailed where grading itself failed."""
        found = dict(self.stream(samples))
        return [found[number] for number in range(len(found))]

    def stream(self, samples: Iterable[Sample]) -> Iterator[tuple[int, Score | ScoreFailed]]:
        """(index of the sample, score) as they finish; takes samples when there is room."""
        for number, sample in enumerate(samples):
            try:
                found = screen(_request(number, sample), self._rules)
            except GradingError as error:
                yield number, ScoreFailed(number, str(error))
                continue
            if isinstance(found, Draft):
                self.pool.submit(found)
            else:
                yield number, found
            yield from self._collect(0.0)
            while self.pool.pending >= MAX_PENDING:
                yield from self._collect(POLL_S)
        while self.pool.pending:
            yield from self._collect(POLL_S)

    def classes(self, requests: Sequence[ClassRequest]) -> list[ClassDone | ScoreFailed]:
        """Which texts of each request give the same answer, in the order of the requests.

        A failed request is retried once, alone; ScoreFailed if that fails too.
        """
        found = dict(self._classify(list(enumerate(requests)), at_once=CLASSES_AT_ONCE))
        failed = [n for n, answer in sorted(found.items()) if isinstance(answer, ScoreFailed)]
        found.update(self._classify([(n, requests[n]) for n in failed], at_once=1))
        return [found[number] for number in range(len(requests))]

    def _classify(
        self, numbered: list[tuple[int, ClassRequest]], *, at_once: int
    ) -> Iterator[tuple[int, ClassDone | ScoreFailed]]:
        waiting = deque(numbered)
        while waiting or self._desk.pending:
            while waiting and self._desk.pending < at_once:
                number, request = waiting.popleft()
                try:
                    self._desk.take(msgspec.structs.replace(request, request_id=number))
                except GradingError as error:
                    yield number, ScoreFailed(number, str(error))
            answered = self._desk.advance(time.monotonic())
            if not answered and not self._desk.has_work:
                self._await_pool(POLL_S)
            for finished in self.pool.collect():
                answered += self._desk.take_verdict(finished)
            for answer in answered:
                yield answer.request_id, answer

    def _collect(self, limit_s: float) -> Iterator[tuple[int, Score | ScoreFailed]]:
        """Finished scores, after a wait of at most limit_s or until an item's deadline."""
        if limit_s:
            self._await_pool(limit_s)
        for finished in self.pool.collect():
            if self._desk.owns(finished):
                continue  # Its class request was given up.
            score = finished.score if isinstance(finished, ScoreDone) else finished
            yield finished.request_id, score

    def _await_pool(self, limit_s: float) -> None:
        """Wait until the pool has results to collect, at most limit_s."""
        deadline_s = self.pool.next_deadline_s
        if deadline_s is not None:
            limit_s = min(limit_s, max(0.0, deadline_s - time.monotonic()))
        is_readable(self.pool.fileno(), limit_s)


def answer_texts(answer: Answer) -> list[str]:
    """The accepted answers as texts."""
    return [str(one) for one in (answer if isinstance(answer, list) else [answer])]


def _request(number: int, sample: Sample) -> ScoreRequest:
    fields = {name: getattr(sample, name) for name in Sample.__struct_fields__}
    first, *others = answer_texts(sample.answer) or [""]
    fields |= {"answer": first, "other_answers": [*others, *sample.other_answers]}
    return ScoreRequest(request_id=number, completion_tokens=fields.pop("tokens"), **fields)
