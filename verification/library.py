"""Grading outside a run: the same pool as in a run, called like a function.

Used by `megatron-rl verify`, by benchmarks, and from Python:

    with Grading(RewardConfig()) as grading:
        scores = grading.score([Sample(text=..., answer="7")])
"""

import select
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import msgspec

from megatron_rl.config.reward import RewardConfig, VerifierConfig
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.types import Score, ScoreDone, ScoreFailed, ScoreRequest
from verification.draft import Draft
from verification.pool.pool import Pool
from verification.rules import RewardRules
from verification.score import screen
from verification.verdict import GradingError

MAX_PENDING = 512
POLL_S = 0.1


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A completion to grade, and what it is graded against."""

    text: str
    """The completion."""
    answer: str = ""
    """The reference."""
    task: str = "math"
    entry: str = ""
    """JSON that the task needs: a reasoning_gym entry, the tests of a program."""
    problem: str = ""
    """The question, for its language, and because copying it is no answer."""
    language: str = ""
    """Language that the response must be in; empty: that of the problem."""
    tokens: int = 0
    """Completion tokens, for the length penalty."""
    is_finished: bool = True
    seed: int = 0
    """The same for all completions of a problem: draws its tests."""
    prompt_tail: str = ""
    """The end of the rendered prompt, which may open <think>."""
    length_rule: LengthRule | None = None
    """None: the limit of the `Grading`, and the margin of its reward section."""


class Grading:
    """A pool of grading processes for samples from anywhere."""

    def __init__(
        self,
        reward: RewardConfig | None = None,
        verifier: VerifierConfig | None = None,
        *,
        max_tokens: int = 1 << 20,
    ) -> None:
        """max_tokens: limit of a completion, to which the length penalty refers."""
        self._rules = RewardRules(reward=reward or RewardConfig(), max_tokens=max_tokens)
        self.pool = Pool(verifier or VerifierConfig(), self._rules)

    def __enter__(self) -> Self:
        self.pool.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.__exit__(kind, error, trace)

    def score(self, samples: Iterable[Sample]) -> list[Score | ScoreFailed]:
        """Scores in the order of the samples; ScoreFailed where grading itself failed."""
        found = dict(self.stream(samples))
        return [found[number] for number in range(len(found))]

    def stream(self, samples: Iterable[Sample]) -> Iterator[tuple[int, Score | ScoreFailed]]:
        """(number of the sample, score) as they are finished; takes samples as there is room."""
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

    def _collect(self, limit_s: float) -> Iterator[tuple[int, Score | ScoreFailed]]:
        """What is finished, after waiting for at most limit_s; items have their own deadlines."""
        if limit_s:
            deadline_s = self.pool.next_deadline_s
            if deadline_s is not None:
                limit_s = min(limit_s, max(0.0, deadline_s - time.monotonic()))
            select.select([self.pool], [], [], limit_s)
        for finished in self.pool.collect():
            score = finished.score if isinstance(finished, ScoreDone) else finished
            yield finished.request_id, score


def _request(number: int, sample: Sample) -> ScoreRequest:
    return ScoreRequest(
        request_id=number,
        task=sample.task,
        answer=sample.answer,
        entry=sample.entry,
        text=sample.text,
        completion_tokens=sample.tokens,
        is_finished=sample.is_finished,
        problem=sample.problem,
        language=sample.language,
        seed=sample.seed,
        prompt_tail=sample.prompt_tail,
        length_rule=sample.length_rule,
    )
