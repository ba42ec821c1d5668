"""How long a generator had work, for its heartbeat, and whether its engine makes progress with it.

Used by the generator process. An engine that hangs keeps its server's sockets open, so only its
work shows it.
"""

import asyncio
import time
from typing import Protocol, Self, runtime_checkable

from generation.engine import Engine, EngineError
from megatron_rl.protocol.generator_messages import EngineActivity


class Activity:
    """Counts completions in flight, seconds idle and busy, and tokens, since the start."""

    def __init__(self) -> None:
        self.running = 0
        """Completions in flight."""
        self._since: float | None = None
        self._idle_s = 0.0
        self._busy_s = 0.0
        self._tokens = 0

    def start(self, now: float) -> None:
        """Begin to count: from here on the engine could serve."""
        if self._since is None:
            self._since = now

    def change(self, now: float, completions: int, tokens: int = 0) -> None:
        """Note that `completions` more (or fewer) are in flight, and tokens that were finished."""
        self._add_elapsed(now)
        self.running += completions
        self._tokens += tokens

    def report(self, now: float) -> EngineActivity:
        """All figures until now."""
        self._add_elapsed(now)
        return EngineActivity(self._idle_s, self._busy_s, self._tokens, self.running)

    def _add_elapsed(self, now: float) -> None:
        if self._since is None:
            return
        if self.running:
            self._busy_s += now - self._since
        else:
            self._idle_s += now - self._since
        self._since = now


LOOK_S = 2.0
STALL_SHARE = 0.25
"""Of expert.generator.request_timeout_s: an engine whose passes are counted and that makes none
hangs."""
UNCOUNTED_SHARE = 1.25
"""The same for an engine that tells only completions: each may take the whole time."""
LONGEST_LOOK_S = 10.0
"""A longer time between two looks is this process's own standstill: it counts as so long."""


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that can say whether it computes."""

    async def count_passes(self) -> float | None:
        """A number that changes with each pass over the completions; None: it did not answer."""


class EngineHealth:
    """Adds up the time in which an engine had work, was not paused, and did nothing."""

    def __init__(self, request_timeout_s: float, *, counts_passes: bool) -> None:
        share = STALL_SHARE if counts_passes else UNCOUNTED_SHARE
        self._limit_s = share * request_timeout_s
        self._counted: float | None = None
        self._stalled_s = 0.0
        self._looked_at: float | None = None

    @classmethod
    def of(cls, engine: Engine, request_timeout_s: float) -> Self:
        """For an engine, by whether it counts its passes."""
        return cls(request_timeout_s, counts_passes=isinstance(engine, CountingEngine))

    def note_progress(self) -> None:
        """The engine has finished a completion."""
        self._stalled_s = 0.0

    def note_count(self, count: float | None) -> None:
        """What the engine answered."""
        if count is not None and count != self._counted:
            self._counted = count
            self.note_progress()

    def look(self, now: float, *, running: int, is_paused: bool) -> str:
        """Why the engine is given up; "" while it is not. Call it every few seconds."""
        elapsed_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if not running or is_paused:
            return ""
        self._stalled_s += min(elapsed_s, LONGEST_LOOK_S)
        if self._stalled_s <= self._limit_s:
            return ""
        return (
            f"the engine hangs: {running} completions, none of which has moved for "
            f"{self._stalled_s:.0f} s (a part of expert.generator.request_timeout_s)"
        )


class MayPause(Protocol):
    """Says whether the engine is paused."""

    is_paused: bool


async def watch_work(
    engine: Engine, health: EngineHealth, work: Activity, weights: MayPause
) -> None:
    """Look at an engine for ever. Raises EngineError when it hangs."""
    while True:
        await asyncio.sleep(LOOK_S)
        if isinstance(engine, CountingEngine) and work.running:
            health.note_count(await engine.count_passes())
        fault = health.look(time.monotonic(), running=work.running, is_paused=weights.is_paused)
        if fault:
            raise EngineError(fault)
