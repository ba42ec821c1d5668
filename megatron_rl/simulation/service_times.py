"""How many servers a first-come-first-served station had, and how long each request took. Pure.

Used by calibration: a run records when a completion arrived and when its score came. The time
between holds waiting for those before it, which depends on how they come; the time at a server
does not. With the departures known, the start of each service is known too: the arrival, or the
moment at which a server became free (Lindley's recursion, solved for the service times).
"""

import bisect
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.simulation.load_curve import fit_not_negative

Speed = Callable[[float, float], float]
_CERTAIN = 0.99
"""Share of the requests that speaks for the number of servers: others may have been tried twice."""
_SAME_ROUND_S = 0.0015
"""Departures this near to each other are of one round: moments are recorded in milliseconds."""
_LEAST_ROUND = 4.0
"""Requests of a round, on average, from which on a server is taken to serve in rounds."""


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


def fit_rounds(
    arrivals: Sequence[float], departures: Sequence[float], speed: Speed = lambda start, end: 1.0
) -> tuple[float, float] | None:
    """Seconds of work of a round and of each request in it, of a server that takes all that waits.

    A round begins with the first arrival of those that leave with it, or when the one before is
    over. None: requests leave one by one. speed: of the server between two moments.
    """
    rounds: list[list[tuple[float, float]]] = []
    """(departure, arrival) of those that left together."""
    for left in sorted(zip(departures, arrivals, strict=True)):
        if not rounds or left[0] > rounds[-1][0][0] + _SAME_ROUND_S:
            rounds.append([])
        rounds[-1].append(left)
    if not rounds or len(departures) / len(rounds) < _LEAST_ROUND:
        return None
    work = []
    over = -math.inf
    for served in rounds:
        began_at = max(over, min(arrival for _, arrival in served))
        over = served[-1][0]
        work.append((over - began_at) * speed(began_at, over))
    columns = np.array([(1.0, len(served)) for served in rounds])
    base, each = fit_not_negative(columns, np.array(work))
    return float(base), float(each)
