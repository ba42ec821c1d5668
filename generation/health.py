"""Work of a generator for its heartbeat, and a check that its engine makes progress.

Used by the generator process. A hanging engine keeps its server's sockets open, so only missing
progress shows it.
"""

import asyncio
import time
from typing import Protocol, runtime_checkable

from generation.engine import Engine, EngineError
from generation.weight_client import WeightClient
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
        """Begin to count: the engine can serve from now on."""
        if self._since is None:
            self._since = now

    def change(self, now: float, completions: int, tokens: int = 0) -> None:
        """Change the number of completions in flight, and add finished tokens."""
        self._add_elapsed(now)
        self.running += completions
        self._tokens += tokens

    def report(self, now: float) -> EngineActivity:
        """Return all figures so far."""
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
"""Share of expert.generator.request_timeout_s without a pass, after which an engine hangs."""
UNCOUNTED_SHARE = 1.25
"""The same for an engine without a count of passes: a completion may take the whole time."""
LONGEST_LOOK_S = 10.0
"""A longer time between two looks is a standstill of this process: it counts as this long."""


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that counts its passes."""

    async def count_passes(self) -> float | None:
        """Return a number that changes with each pass over the completions; None: no answer."""


class EngineHealth:
    """Adds up the time in which an engine had work, was not paused, and did nothing."""

    def __init__(self, request_timeout_s: float, *, counts_passes: bool) -> None:
        share = STALL_SHARE if counts_passes else UNCOUNTED_SHARE
        self._limit_s = share * request_timeout_s
        self._counted: float | None = None
        self._stalled_s = 0.0
        self._looked_at: float | None = None

    def note_progress(self) -> None:
        """Note that the engine has finished a completion."""
        self._stalled_s = 0.0

    def note_count(self, count: float | None) -> None:
        """Note the engine's count of passes."""
        if count is not None and count != self._counted:
            self._counted = count
            self.note_progress()

    def look(self, now: float, *, running: int, is_paused: bool) -> str:
        """Return why the engine is given up; "": it is not. Call it every few seconds."""
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


async def watch_work(
    engine: Engine, health: EngineHealth, work: Activity, weights: WeightClient
) -> None:
    """Watch an engine. Raises EngineError when it hangs."""
    while True:
        await asyncio.sleep(LOOK_S)
        if isinstance(engine, CountingEngine) and work.running:
            health.note_count(await engine.count_passes())
        # Without weights new requests wait as well.
        is_paused = weights.is_paused or engine.version < 0
        fault = health.look(time.monotonic(), running=work.running, is_paused=is_paused)
        if fault:
            raise EngineError(fault)
