"""Engines that fail: whom a completion shuns, and when a generator gets one at a time."""

import heapq
import itertools

import pytest

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import GeneratorReady, RolloutFailed
from megatron_rl.rollout_queue.drop_reasons import TooManyFailures
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from tests.rollout_queue.makers import make_rollout
from tests.rollout_queue.test_leases import issue_group, new_group, rules

RULES = rules()


def fail(leases: Leases, name: str, lease_id: int, index: int, now: float) -> None:
    leases.take_failure(name, RolloutFailed(lease_id, index, "HTTP 500"), now)


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_engines_that_fail_at_once_cost_no_group(broken: int) -> None:
    """44 engines of 64 slots, 300 s a completion; the broken ones fail within 10 ms."""
    leases = Leases(QueueConfig())
    names = [f"g{number}" for number in range(44)]
    bad = set(names[:broken])
    opened, returned, now = 0, 0, 0.0
    due: list[tuple[float, str, int, int]] = []

    def open_group() -> Group | None:
        nonlocal opened
        if opened >= 200 + returned // 16:
            return None
        opened += 1
        return new_group(16, number=opened)

    beats_at = 0.0
    while now < 700.0:
        if now >= beats_at:
            beats_at += 2.0
            for name in names:
                leases.announce(name, GeneratorReady(64, 0, session=1), now)
            leases.expire(now)
        while (issued := leases.issue(RULES, open_group, now)) is not None:
            name, lease = issued
            took = 0.01 if name in bad else 300.0
            for index in lease.indices:
                heapq.heappush(due, (now + took, name, lease.lease_id, index))
        now = min(beats_at, due[0][0]) if due else beats_at
        while due and due[0][0] <= now:
            _, name, lease_id, index = heapq.heappop(due)
            if name in bad:
                fail(leases, name, lease_id, index, now)
            elif leases.take_rollout(name, make_rollout(index, lease_id=lease_id), now):
                returned += 1
    assert leases.pop_failures() == []
    # Two rounds of the good ones, which take everything.
    assert returned >= 2 * min(64 * (44 - broken), 16 * 200)


def test_a_dying_engine_costs_no_attempts_and_is_probed_ever_more_rarely() -> None:
    leases = Leases(QueueConfig(max_attempts=2))
    leases.announce("g", GeneratorReady(4, 0, session=1), 0.0)
    _, lease_id, indices = issue_group(leases, new_group(4))
    for index in indices:
        fail(leases, "g", lease_id, index, 1.0)
    probed = []
    now = 1.0
    while len(probed) < 5:
        now += 0.5
        while (issued := leases.issue(RULES, lambda: None, now)) is not None:
            probed.append((now, len(issued[1].indices)))
            fail(leases, "g", issued[1].lease_id, issued[1].indices[0], now)
    assert leases.pop_failures() == []
    assert [count for _, count in probed] == [1] * 5
    times = [at for at, _ in probed]
    assert [b - a for a, b in itertools.pairwise(times)] == [2.0, 4.0, 8.0, 16.0]
    # One success, and it gets all that it has room for.
    leases.announce("g", GeneratorReady(4, 0, session=1), now)
    now += 32.0
    _, lease = leases.issue(RULES, lambda: None, now)
    assert leases.issue(RULES, lambda: None, now) is None
    assert leases.take_rollout("g", make_rollout(lease.indices[0], lease_id=lease.lease_id), now)
    _, lease = leases.issue(RULES, lambda: None, now)
    assert len(lease.indices) == 3


@pytest.mark.parametrize("goes", ["at once", "unreachable", "silent", "with its launcher"])
@pytest.mark.parametrize(("session", "slots"), [(1, 0), (2, 4)])
def test_a_restarted_generator_is_trusted_again(goes: str, session: int, slots: int) -> None:
    """The same process keeps its pause."""
    leases = Leases(QueueConfig(heartbeat_timeout_s=0.5))
    leases.announce("g", GeneratorReady(4, 0, session=1), 0.0)
    _, lease_id, indices = issue_group(leases, new_group(4))
    for index in indices:
        fail(leases, "g", lease_id, index, 1.0)
    assert leases.issue(RULES, lambda: None, 1.0) is None
    if goes == "unreachable":
        leases.drop_generator("g")
    elif goes == "silent":
        leases.expire(1.6)
    elif goes == "with its launcher":
        leases.hand_back("g", ())
    assert leases.generators == (["g"] if goes == "at once" else [])
    leases.announce("g", GeneratorReady(4, 0, session=session), 1.7)
    issued = leases.issue(RULES, lambda: None, 1.7)
    assert (0 if issued is None else len(issued[1].indices)) == slots


def test_the_run_ends_when_no_engine_can_generate() -> None:
    leases = Leases(QueueConfig(heartbeat_timeout_s=1e9))
    leases.announce("g", GeneratorReady(4, 0, session=1), 0.0)
    leases.add(new_group(4))
    now = 0.0
    with pytest.raises(TooManyFailures, match="no generator can .*g failed: HTTP 500"):
        while now < 1000.0:
            now += 0.25
            while (issued := leases.issue(RULES, lambda: None, now)) is not None:
                for index in issued[1].indices:
                    fail(leases, "g", issued[1].lease_id, index, now)
            leases.expire(now)
    # 1 + 2 + 4 + 8 + 16 + 32 s of pauses.
    assert 60.0 < now < 70.0


def test_a_completion_shuns_all_that_failed_it() -> None:
    leases = Leases(QueueConfig(max_attempts=3))
    for name in ("a", "b", "c"):
        leases.announce(name, GeneratorReady(8, 0, session=1), 0.0)
    leases.add(new_group(1))
    asked = []
    for now in (1.0, 2.0):
        name, lease = leases.issue(RULES, lambda: None, now)
        asked.append(name)
        fail(leases, name, lease.lease_id, 0, now)
    name, _ = leases.issue(RULES, lambda: None, 3.0)
    assert sorted([*asked, name]) == ["a", "b", "c"]
