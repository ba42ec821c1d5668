"""Lengths and verdicts of simulated completions, drawn independently. Pure.

A completion's length and verdict depend only on the seed, its group and its index, never on time or
engine. A lost completion returns with the same length, and settings are compared on the same
completions.
"""

import math
import random
from dataclasses import dataclass
from typing import Protocol

_MOST = 1e6
_LEAST = 1e-3


class Lengths(Protocol):
    """A distribution of completion tokens."""

    def draw(self, group: random.Random, completion: random.Random, cap: int) -> int:
        """Tokens of one completion; `group` is the same for all completions of a prompt."""


@dataclass(frozen=True)
class LogNormalLengths:
    """exp(N(log median, sigma^2)).

    correlation: share of the variance of log length that completions of a prompt share.
    """

    median_tokens: float
    sigma: float
    correlation: float = 0.5

    def draw(self, group: random.Random, completion: random.Random, cap: int) -> int:
        """Completion tokens, from 1 to the cap."""
        common = math.sqrt(self.correlation) * group.gauss(0.0, 1.0)
        own = math.sqrt(1.0 - self.correlation) * completion.gauss(0.0, 1.0)
        return max(1, min(cap, round(self.median_tokens * math.exp(self.sigma * (common + own)))))


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths of a run's completions, prompt by prompt."""

    groups: tuple[tuple[int, ...], ...]
    """Completion tokens of each group."""

    def draw(self, group: random.Random, completion: random.Random, cap: int) -> int:
        """Length of a random completion of the prompt's random recorded group."""
        lengths = self.groups[int(group.random() * len(self.groups))]
        return max(1, min(cap, lengths[int(completion.random() * len(lengths))]))


@dataclass(frozen=True)
class PassRates:
    """Beta-distributed pass rates of prompts."""

    alpha: float
    beta: float

    def zero_variance_share(self, size: int) -> float:
        """Share of groups of `size` whose completions are all right or all wrong.

        E[p^n] + E[(1-p)^n] under Beta(alpha, beta).
        """
        a, b, n = self.alpha, self.beta, size
        whole = math.lgamma(a + b) - math.lgamma(a + b + n)
        right = math.exp(math.lgamma(a + n) - math.lgamma(a) + whole)
        wrong = math.exp(math.lgamma(b + n) - math.lgamma(b) + whole)
        return right + wrong

    @classmethod
    def of(cls, mean: float, zero_variance_share: float, size: int) -> "PassRates":
        """Pass rates with this mean and (nearly) this share of zero-variance groups of `size`."""
        low, high = math.log(_LEAST), math.log(_MOST)
        for _ in range(80):
            middle = (low + high) / 2
            total = math.exp(middle)
            if (
                cls(mean * total, (1 - mean) * total).zero_variance_share(size)
                > zero_variance_share
            ):
                low = middle
            else:
                high = middle
        total = math.exp(low)
        return cls(mean * total, (1 - mean) * total)


@dataclass(frozen=True)
class Conversation:
    """How completions are spoken with an environment: in replies of about one length."""

    replies: int = 1
    given_share: float = 0.0
    """Share of a completion's tokens that the environment gives between its replies."""
    environment_s: float = 0.0
    """Mean time of the environment before each further reply; exponentially distributed."""


@dataclass(frozen=True)
class Reply:
    """A reply: completion tokens [start, end) after a wait for the environment."""

    start: int
    end: int
    wait_s: float


@dataclass(frozen=True)
class Workload:
    """Completions of a run and their verdicts."""

    lengths: Lengths
    prompt_tokens: int
    pass_rates: PassRates
    seed: int = 0
    conversation: Conversation = Conversation()

    def tokens(self, group: int, index: int, cap: int) -> int:
        """Length of a completion."""
        own = random.Random(f"{self.seed}/{group}/{index}/length")
        return self.lengths.draw(random.Random(f"{self.seed}/{group}/length"), own, cap)

    def replies(self, group: int, index: int, tokens: int) -> list[Reply]:
        """Replies of a completion of so many tokens, in order."""
        spoken = self.conversation
        count = max(1, min(spoken.replies, tokens))
        given = min(round(spoken.given_share * tokens), tokens - count) if count > 1 else 0
        draw = random.Random(f"{self.seed}/{group}/{index}/turns")
        found = []
        for turn in range(count):
            # What is given stands before each reply but the first.
            before = given * turn // max(1, count - 1)
            sampled = tokens - given
            start, end = (before + sampled * (turn + n) // count for n in (0, 1))
            wait_s = draw.expovariate(1.0) * spoken.environment_s if turn else 0.0
            found.append(Reply(start, end, wait_s))
        return found

    def is_correct(self, group: int, index: int) -> bool:
        rates = self.pass_rates
        rate = random.Random(f"{self.seed}/{group}/rate").betavariate(rates.alpha, rates.beta)
        return random.Random(f"{self.seed}/{group}/{index}/verdict").random() < rate


def mean_tokens(lengths: Lengths, cap: int, *, draws: int) -> float:
    """Mean completion tokens of some draws under a cap."""
    found = [
        lengths.draw(random.Random(f"0/{i}"), random.Random(f"0/{i}/own"), cap)
        for i in range(draws)
    ]
    return sum(found) / len(found)
