"""Service times and servers that are found again from arrivals and departures alone."""

import random

import pytest

from megatron_rl.simulation.calibration import servers_seen, service_times


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
