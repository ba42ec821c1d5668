"""A clock that jumps from event to event. Pure.

Used by the simulation. Events of the same time come in the order in which they were set.
"""

import heapq
import itertools
from collections.abc import Callable


class EventClock:
    """What happens when, in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        """Events that have happened."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Let something happen, now at the earliest."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    @property
    def next_at(self) -> float | None:
        """When the next event is; None: there is none."""
        return self._events[0][0] if self._events else None

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, action = heapq.heappop(self._events)
        self.count += 1
        action()
