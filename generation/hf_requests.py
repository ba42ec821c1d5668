"""One completion in flight in the hf engine: weight syncs, stop strings, first token.

Used by `hf_engine.py`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from megatron_rl.protocol.types import Sampling

Decode = Callable[[list[int]], str]
_SPECIAL_TOKENS = 4
"""Tokens without text that may be among the tokens of a stop string."""


@dataclass(slots=True)
class Request:
    """One completion in flight."""

    index: int
    results: asyncio.Queue[Any]
    stop: tuple[str, ...] = ()
    """Strings that end it."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(version replaced, tokens sampled by then) of each weight sync since it began."""
    is_stale: bool = False
    """A weight sync came between the beginning and the end of its prompt."""
    generator: torch.Generator | None = None
    """Draws its tokens; None: the process's stream."""

    def ends_at_text(self, token_ids: list[int], decode: Decode | None) -> bool:
        """Whether the last token completes a stop string."""
        if not self.stop or not token_ids:
            return False
        assert decode is not None, "generate() has refused the request"
        # A token with text has at least one byte.
        tail = max(len(text.encode()) for text in self.stop) + _SPECIAL_TOKENS
        text = decode(token_ids[-tail:])
        return any(stop in text for stop in self.stop)


def first_token_at(timestamps: list[float] | None, tokens: int) -> float:
    """Time of the first token by time.monotonic(); -1 when transformers forgot it.

    timestamps: of the tokens by time.perf_counter(). An evicted and restarted request has only
    those of its later tokens.
    """
    if timestamps is None or len(timestamps) != tokens:
        return -1.0
    return time.monotonic() - (time.perf_counter() - timestamps[0])


def one_by_one(sampling: Sampling, indices: list[int]) -> list[tuple[Sampling, list[int]]]:
    """A request for each completion, with its seed if there are seeds."""
    seeds = sampling.draw_seeds or (None,) * len(indices)
    return [
        (msgspec.structs.replace(sampling, draw_seeds=() if seed is None else (seed,)), [index])
        for index, seed in zip(indices, seeds, strict=True)
    ]
