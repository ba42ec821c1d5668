"""Busy slots of engines, by simulation: the real leases, a clock, lengths with a long tail.

Admission always lets a group be opened here: what idles, idles because of how completions are
handed out.
"""

import collections
import heapq
import random

import pytest

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import GeneratorReady, Sampling
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from tests.rollout_queue.makers import make_prompt, make_rollout

SIZE = 16
LIMITS = QueueConfig(lease_timeout_s=1e9, heartbeat_timeout_s=1e9)
WARM_UP_S, END_S = 100.0, 1500.0
MEDIAN_S, LONGEST_S = 8.0, 80.0


def length_s(chance: random.Random) -> float:
    """Seconds of a completion: the mean is 1.4 medians, one in 100 takes six."""
    return min(chance.lognormvariate(0.0, 0.8) * MEDIAN_S, LONGEST_S)


ANY_VERSION = LeaseRules(synced=0, max_staleness=0, is_strict=False)


class Fleet:
    """Generators that return each completion after its time."""

    def __init__(self, generators: int, slots: int) -> None:
        self.chance = random.Random(1)
        self.names = [f"g{n}" for n in range(generators)]
        self.slots = slots
        self.leases = Leases(LIMITS)
        self.synced = 0
        self.ends: list[tuple[float, str, int, int]] = []
        self.opened = 0
        self.engines: dict[int, set[str]] = collections.defaultdict(set)
        """By group: the generators that got some of it."""
        self.now = 0.0
        self.opened_at: dict[int, float] = {}
        self.leased_at: dict[int, float] = {}
        """When the last completion of a group was leased."""
        self.unleased: collections.Counter[int] = collections.Counter()
        for name in self.names:
            self.leases.announce(name, GeneratorReady(slots, 0, session=1), 0.0)

    def open_group(self) -> Group | None:
        if not self.leases.can_take(ANY_VERSION, is_evaluation=False):
            return None
        self.opened += 1
        prompt = make_prompt(str(self.opened))
        self.opened_at[self.opened] = self.now
        self.unleased[self.opened] = SIZE
        return Group(self.opened, prompt, Sampling(8, 1.0), SIZE, self.synced)

    def hand_out(self) -> None:
        rules = LeaseRules(self.synced, max_staleness=2, is_strict=False)
        while (issued := self.leases.issue(rules, self.open_group, self.now)) is not None:
            name, lease = issued
            number = int(lease.prompt.id)
            self.engines[number].add(name)
            self.unleased[number] -= len(lease.indices)
            if not self.unleased[number]:
                self.leased_at[number] = self.now
            for index in lease.indices:
                end = self.now + length_s(self.chance)
                heapq.heappush(self.ends, (end, name, lease.lease_id, index))

    def step(self) -> float:
        """The next completion ends, and its slot is leased again; the time."""
        self.now, name, lease_id, index = heapq.heappop(self.ends)
        rollout = make_rollout(index, lease_id=lease_id)
        assert self.leases.take_rollout(name, rollout, self.now) is not None
        self.hand_out()
        return self.now

    def run(self, until_s: float) -> float:
        """Share of slots busy after the warm-up."""
        self.hand_out()
        busy_s = 0.0
        while self.ends[0][0] < until_s:
            in_flight, then = len(self.ends), max(self.now, WARM_UP_S)
            busy_s += in_flight * max(0.0, self.step() - then)
        return busy_s / (len(self.names) * self.slots * (self.now - WARM_UP_S))


@pytest.mark.parametrize("slots", [64, 32, 16])
def test_slots_are_busy_however_few_they_are_for_a_group(slots: int) -> None:
    assert Fleet(1, slots).run(END_S) >= 0.95


def test_a_group_larger_than_a_generator_keeps_it_busy_too() -> None:
    assert Fleet(1, 6).run(END_S) >= 0.95


def test_a_group_stays_with_one_generator_of_several() -> None:
    fleet = Fleet(4, 24)
    assert fleet.run(END_S) >= 0.95
    spread = [len(names) for names in fleet.engines.values()]
    assert sum(count == 1 for count in spread) / len(spread) >= 0.95


def test_no_group_waits_for_its_home_longer_than_one_completion_takes() -> None:
    fleet = Fleet(4, 24)
    fleet.run(END_S)
    waits = [fleet.leased_at[n] - fleet.opened_at[n] for n in range(1, fleet.opened // 2)]
    assert max(waits) <= LONGEST_S


def test_after_a_weight_sync_what_remains_of_older_groups_goes_to_any_free_slot() -> None:
    fleet = Fleet(4, 24)
    fleet.run(END_S)
    fleet.synced = 1
    opened, waiting = fleet.opened, fleet.leases.waiting
    assert waiting > 0
    for _ in range(waiting):
        fleet.step()
    assert fleet.leases.waiting == 0 and fleet.opened == opened
    fleet.step()
    assert fleet.opened == opened + 1
