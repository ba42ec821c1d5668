"""A circuit breaker per generator: an engine that only fails gets one completion at a time.

Used by the rollout queue's leases. A generator whose engine dies fails its leases at once, has most
room therefore, and would use up the attempts of every completion within milliseconds.
"""

import dataclasses
import logging
from collections.abc import Iterable
from typing import NamedTuple

from megatron_rl.rollout_queue.unleased_groups import LeasedGroup

log = logging.getLogger(__name__)

FAILURES = 3
"""So many completions that failed in a row, without a success, trip the breaker. A single one that
fails again and again does not: it may be at fault itself."""
PAUSE_S = 1.0
"""A tripped generator gets nothing for this long, then one completion: a probe."""
MAX_PAUSE_S = 60.0
"""Each failed probe doubles the pause, up to this."""
HOPELESS_PROBES = 6
"""The run ends when every generator has failed so many probes, which takes a minute at least."""


class Failed(NamedTuple):
    """A completion that an engine failed."""

    holder: LeasedGroup
    index: int


@dataclasses.dataclass
class _Streak:
    """Failures of a generator since its last success."""

    failures: list[Failed] = dataclasses.field(default_factory=list)
    """Those before the breaker tripped."""
    tripped_at: float | None = None
    pause_s: float = PAUSE_S
    probes: int = 0
    """That failed."""
    resumes_at: float = 0.0
    """When the next probe may go out."""


class EngineBreaker:
    """The generators that failed last, by name."""

    def __init__(self) -> None:
        self._streaks: dict[str, _Streak] = {}

    def note_success(self, name: str) -> bool:
        """A completion came back; whether that ends a pause."""
        streak = self._streaks.pop(name, None)
        if streak is None or streak.tripped_at is None:
            return False
        log.warning("generator %s generates again", name)
        return True

    def note_failure(self, name: str, failed: Failed, leased_at: float, now: float) -> list[Failed]:
        """The engine failed a completion; returns the failures that are the engine's own fault."""
        streak = self._streaks.setdefault(name, _Streak())
        if streak.tripped_at is None:
            streak.failures.append(failed)
            if (
                len({(failed.holder.group.number, failed.index) for failed in streak.failures})
                < FAILURES
            ):
                return []
            streak.tripped_at, streak.resumes_at = now, now + streak.pause_s
            log.warning(
                "generator %s failed %d completions in a row: it gets one at a time", name, FAILURES
            )
            return streak.failures
        # What was leased before the breaker tripped fails in one burst: only probes tell more.
        if leased_at > streak.tripped_at:
            streak.probes += 1
            streak.pause_s = min(2 * streak.pause_s, MAX_PAUSE_S)
            streak.resumes_at = now + streak.pause_s
        return [failed]

    def forget(self, name: str) -> None:
        """The generator is gone, or another one has its name."""
        self._streaks.pop(name, None)

    def are_hopeless(self, names: Iterable[str]) -> bool:
        """Whether each of these generators fails whatever it gets."""
        streaks = [self._streaks.get(name) for name in names]
        return bool(streaks) and all(
            streak is not None and streak.probes >= HOPELESS_PROBES for streak in streaks
        )

    def limits(self, now: float) -> dict[str, int]:
        """Completions that each tripped generator may hold now."""
        return {
            name: int(now >= streak.resumes_at)
            for name, streak in self._streaks.items()
            if streak.tripped_at is not None
        }
