"""Which slow items compute now, and which are paused: a feedback queue.

Pure. The item that computed least goes first. A bomb runs only in time that no other item wants; an
honest item of 200 ms never waits for a bomb that has computed longer.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

FIRST_SLICE_S = 0.05
"""CPU time until an item may have to give way; then again at each doubling."""
OVERDUE_S = 60.0
"""Seconds after which the oldest item computes next, whatever its CPU time."""


class Turn(NamedTuple):
    """A slow item that asks for a core."""

    used_s: float
    """CPU time used, including earlier attempts."""
    since_s: float
    """Monotonic time of the request."""
    is_running: bool = False
    needs_quiet: bool = False
    """The item must run alone: the host was too busy for an earlier attempt."""


def level(used_s: float) -> int:
    """0 in the first slice, one more with each doubling."""
    # 1e-9: sums of clock differences may miss a limit slightly.
    return max(0, 1 + math.floor(math.log2(max(used_s, 1e-6) / FIRST_SLICE_S) + 1e-9))


def slice_left_s(used_s: float) -> float:
    """CPU time left until the level changes."""
    return FIRST_SLICE_S * 2 ** level(used_s) - used_s


def choose(turns: Sequence[Turn], slots: int, now: float) -> list[int]:
    """Indices of at most `slots` items that compute now."""

    def rank(index: int) -> tuple[int, bool, float]:
        turn = turns[index]
        return level(turn.used_s), not turn.is_running, turn.since_s

    alone = [i for i, turn in enumerate(turns) if turn.needs_quiet]
    others = sorted((i for i, turn in enumerate(turns) if not turn.needs_quiet), key=rank)
    # No item may join it: its second attempt must not fail like the first.
    running_alone = [i for i in alone if turns[i].is_running]
    overdue_alone = [i for i in alone if is_overdue(turns[i].since_s, now)]
    for candidates in (running_alone, overdue_alone, [] if others else alone):
        if candidates:
            return [min(candidates, key=lambda i: turns[i].since_s)]
    overdue = [i for i in others if is_overdue(turns[i].since_s, now)]
    first = [min(overdue, key=lambda i: turns[i].since_s)] if overdue else []
    return (first + [i for i in others if i not in first])[:slots]


def is_overdue(since_s: float, now: float) -> bool:
    """Whether an item that waits since `since_s` must compute next."""
    return now - since_s >= OVERDUE_S
