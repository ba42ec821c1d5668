"""Service times and servers that are found again from arrivals and departures alone."""

import random

import pytest

from megatron_rl.simulation.service_times import fit_rounds, servers_seen, service_times


def departures_of(arrivals: list[float], services: list[float], servers: int) -> list[float]:
    """First come, first served, by a clock for each server."""
    free = [0.0] * servers
    found = []
    for arrival, service in zip(arrivals, services, strict=True):
        server = free.index(min(free))
        free[server] = max(free[server], arrival) + service
        found.append(free[server])
    return found


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_service_times_are_those_that_made_the_departures(servers: int) -> None:
    draw = random.Random(servers)
    arrivals = sorted(draw.uniform(0, 100) for _ in range(500))
    # About 90 % busy: most requests wait.
    services = [draw.expovariate(500 / (0.9 * 100 * servers)) for _ in arrivals]
    departures = departures_of(arrivals, services, servers)
    waited = sum(d - a for a, d in zip(arrivals, departures, strict=True))
    assert waited > 1.5 * sum(services)
    assert service_times(arrivals, departures, servers) == pytest.approx(services)


def test_one_server_keeps_the_order() -> None:
    arrivals = [0.0, 0.1, 0.2, 0.3]
    assert servers_seen(arrivals, departures_of(arrivals, [1.0, 0.1, 0.1, 0.1], 1)) == 1


def test_overtaking_shows_the_servers() -> None:
    # The first three take 10 s each; 97 short ones pass them on the fourth server.
    arrivals = [0.01 * i for i in range(100)]
    services = [10.0, 10.0, 10.0] + [0.001] * 97
    assert servers_seen(arrivals, departures_of(arrivals, services, 4)) == 4


def test_a_burst_waits_for_each_other_and_not_for_a_slow_server() -> None:
    # 8 at once at a server of 1 s: they are back after 1 to 8 s, and took 1 s each.
    assert service_times([5.0] * 8, [6.0 + i for i in range(8)], 1) == pytest.approx([1.0] * 8)


def in_rounds(arrivals: list[float], base_s: float, each_s: float) -> list[float]:
    """Departures from a server that takes all that waits, in whole milliseconds."""
    found: list[float] = []
    over = 0.0
    while len(found) < len(arrivals):
        over = max(over, arrivals[len(found)])
        count = sum(arrival <= over for arrival in arrivals) - len(found)
        over += base_s + each_s * count
        found += [round(over, 3)] * count
    return found


def test_rounds_are_found_again() -> None:
    draw = random.Random(1)
    arrivals = []
    for burst in range(60):
        arrivals += sorted(burst + draw.uniform(0, 0.06) for _ in range(draw.randint(20, 200)))
    departures = in_rounds(arrivals, 5e-3, 1e-4)
    base_s, each_s = fit_rounds(arrivals, departures)
    assert base_s == pytest.approx(5e-3, rel=0.1)
    assert each_s == pytest.approx(1e-4, rel=0.1)
    # Half as fast as it could be: half the work.
    assert fit_rounds(arrivals, departures, lambda start, end: 0.5) == pytest.approx(
        (base_s / 2, each_s / 2)
    )


def test_requests_that_leave_one_by_one_are_no_rounds() -> None:
    arrivals = [0.0] * 100
    assert fit_rounds(arrivals, departures_of(arrivals, [0.001] * 100, 1)) is None
