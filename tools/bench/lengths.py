"""Lengths of sequences like those that Magistral trains on. Pure.

Used by tools.bench.packing and tools.bench.train. The paper (arXiv 2506.10910) gives no histogram.
It says that completions reach 32k tokens, that the longest take up to five times the shortest, and
that training grew them from a few thousand on. Here: completions are log-normal with a median of
7,000 tokens and sigma 0.7, cut at 32,768 as max_new_tokens cuts them (the middle nine tenths span a
factor of 10); prompts with their system prompt are uniform from 80 to 600.
"""

import random
from typing import NamedTuple

MEDIAN_TOKENS = 7_000
SIGMA = 0.7
MAX_COMPLETION = 32_768
PROMPT_TOKENS = (80, 600)
LONGEST = MAX_COMPLETION + PROMPT_TOKENS[1]


class Lengths(NamedTuple):
    """Tokens of one sequence."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        """Both."""
        return self.prompt + self.completion


def magistral_like(count: int, *, seed: int, scale: float = 1.0) -> list[Lengths]:
    """`count` sequences; scale: all lengths are multiplied by it, for small machines."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        completion = min(MEDIAN_TOKENS * chance.lognormvariate(0, SIGMA), MAX_COMPLETION)
        prompt = chance.randint(*PROMPT_TOKENS)
        found.append(Lengths(max(1, round(prompt * scale)), max(1, round(completion * scale))))
    return found
