"""How many servers a first-come-first-served station had, and how long each request took. Pure.

Used by calibration: a run records when a completion arrived and when its score came. The time
between holds waiting for those before it, which depends on how they come; the time at a server
does not. With the departures known, the start of each service is known too: the arrival, or the
moment at which a server became free (Lindley's recursion, solved for the service times).
"""

import bisect
import heapq
import math
from collections.abc import Sequence

_CERTAIN = 0.99
"""Share of the requests that speaks for the number of servers: others may have been tried twice."""


def servers_seen(arrivals: Sequence[float], departures: Sequence[float]) -> int:
    """The fewest servers with which requests can have left in this order.

    Requests begin in the order of their arrival. When one leaves before others that came earlier,
    these had begun before it and were at servers of their own.
    """
    found: list[int] = []
    left: list[float] = []
    """Departures of all that came earlier, sorted."""
    for _, departure in sorted(zip(arrivals, departures, strict=True)):
        found.append(1 + len(left) - bisect.bisect_right(left, departure))
        bisect.insort(left, departure)
    found.sort()
    return found[math.ceil(_CERTAIN * len(found)) - 1] if found else 1


def service_times(
    arrivals: Sequence[float], departures: Sequence[float], servers: int
) -> list[float]:
    """Seconds that each request was at a server, in the order of arrival; none below 0."""
    free = [-math.inf] * servers
    found: list[float] = []
    for arrival, departure in sorted(zip(arrivals, departures, strict=True)):
        begins = max(arrival, heapq.heappop(free))
        found.append(max(0.0, departure - begins))
        heapq.heappush(free, max(begins, departure))
    return found
