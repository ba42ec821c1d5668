"""Whom a slot goes to, beside a walk through all groups and all generators."""

import collections
import random

import pytest

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import GeneratorReady, Lease, RolloutFailed, Sampling
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.peers import Peer, Peers
from megatron_rl.rollout_queue.unleased_groups import Eligible, PendingGroup
from tests.rollout_queue.makers import make_prompt, make_rollout

CONFIG = QueueConfig(heartbeat_timeout_s=20, lease_timeout_s=30, max_attempts=50)


class SlowLeases(Leases):
    """Looks at every group and every generator for each lease, and finds what `issue` finds."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.chosen: collections.Counter[str] = collections.Counter()

    def check_choice(self, rules: LeaseRules, may_open: bool) -> tuple[PendingGroup, str] | None:
        """Raises AssertionError where index and walk differ; `issue` opens no group in between."""
        queue = sorted(
            (pending for pending in self._groups.values() if pending.unleased),
            key=lambda pending: pending.position,
        )
        for anywhere in (False, True):
            walked = self._walk(queue, rules, anywhere=anywhere)
            eligible = Eligible(*(self._eligible(rules, is_evaluation=e) for e in (False, True)))
            assert self._waiting.choose(rules, eligible, anywhere=anywhere) == walked
            if walked is not None or may_open:
                return walked
        return None

    def _walk(
        self, queue: list[PendingGroup], rules: LeaseRules, *, anywhere: bool
    ) -> tuple[PendingGroup, str] | None:
        for pending in queue:
            peer = self._find(pending, rules, anywhere=anywhere)
            if peer is not None:
                self.chosen["anywhere" if anywhere else "at home or urgent"] += 1
                self.chosen["avoiding"] += bool(pending.avoided)
                self.chosen["evaluation"] += bool(pending.group.evaluation)
                self.chosen["homeless"] += pending.home not in self._generators
                return pending, peer.name
        return None

    def _find(self, pending: PendingGroup, rules: LeaseRules, *, anywhere: bool) -> Peer | None:
        is_evaluation = bool(pending.group.evaluation)
        # Batches wait for evaluations, and a group of an earlier version nears its deadline.
        anywhere |= is_evaluation or pending.group.opened_version < rules.synced
        eligible = [
            peer
            for peer in self.peers
            if peer.version >= rules.oldest_version(is_evaluation=is_evaluation)
            and (not rules.evaluators or (peer.name in rules.evaluators) == is_evaluation)
        ]
        eligible = [peer for peer in eligible if peer.name not in pending.avoided] or eligible
        home = next((peer for peer in eligible if peer.name == pending.home), None)
        if home is not None and (home.room or not anywhere):
            return home if home.room else None
        return roomiest(eligible)


def roomiest(peers: list[Peer]) -> Peer | None:
    found = max(peers, key=lambda peer: peer.room, default=None)
    return found if found is not None and found.room else None


class Play:
    """Random events of a queue with a few generators, which see every kind of state."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.leases = SlowLeases()
        self.names = [f"g{n}" for n in range(self.chance.randint(1, 6))]
        self.sessions = dict.fromkeys(self.names, 1)
        self.synced = 0
        self.now = 0.0
        self.opened = 0
        self.evaluators: frozenset[str] = frozenset()
        self.is_strict = self.chance.random() < 0.5
        self.out: list[tuple[str, int, int]] = []
        """(generator, lease, index) of what was leased."""

    @property
    def rules(self) -> LeaseRules:
        return LeaseRules(self.synced, 1, self.is_strict, self.evaluators, self.synced - 1)

    def open_group(self, *, is_evaluation: bool = False) -> Group:
        self.opened += 1
        label = "e" if is_evaluation else ""
        size, prompt = self.chance.randint(1, 6), make_prompt(f"p{self.opened}")
        return Group(
            self.opened, prompt, Sampling(8, 1.0), size, self.synced, evaluation=label
        )  # fmt: skip

    def step(self) -> None:
        self.now += self.chance.random() * 2
        events = {
            self.announce: 6, self.return_one: 20, self.fail_one: 2, self.restart: 1,
            self.drop: 1, self.sync: 1, self.evaluate: 1, self.expire: 2, self.lose_group: 1,
        }  # fmt: skip
        self.chance.choices(list(events), list(events.values()))[0]()
        while self.issue():
            continue

    def announce(self) -> None:
        name = self.chance.choice(self.names)
        version = max(0, self.synced - self.chance.choice((0, 0, 0, 1, 2)))
        capacity = self.chance.choice((0, 1, 2, 4))
        ready = GeneratorReady(capacity, version, self.sessions[name])
        self.leases.announce(name, ready, self.now)

    def restart(self) -> None:
        self.sessions[self.chance.choice(self.names)] += 1

    def drop(self) -> None:
        self.leases.drop_generator(self.chance.choice(self.names))

    def sync(self) -> None:
        self.synced += 1

    def evaluate(self) -> None:
        self.evaluators = frozenset(self.chance.sample(self.names, self.chance.randint(0, 1)))
        for _ in range(self.chance.randint(0, 2)):
            self.leases.add(self.open_group(is_evaluation=True))

    def expire(self) -> None:
        self.leases.expire(self.now)

    def lose_group(self) -> None:
        if groups := list(self.leases._groups.values()):
            self.leases.cancel(self.chance.choice(groups).group)

    def return_one(self) -> None:
        if not self.out:
            return
        name, lease_id, index = self.out.pop(self.chance.randrange(len(self.out)))
        rollout = make_rollout(index, lease_id=lease_id, versions=(self.synced,))
        self.leases.take_rollout(name, rollout, self.now)

    def fail_one(self) -> None:
        if not self.out:
            return
        name, lease_id, index = self.out.pop(self.chance.randrange(len(self.out)))
        self.leases.take_failure(name, RolloutFailed(lease_id, index, "no"), self.now)

    def issue(self) -> bool:
        fresh = [self.open_group()] if self.chance.random() < 0.3 else []
        for name, limit in self.leases._breaker.limits(self.now).items():
            self.leases._generators.limit(name, limit)
        expected = self.leases.check_choice(self.rules, bool(fresh))
        open_group = lambda: fresh.pop() if fresh else None  # noqa: E731
        was_fresh = len(fresh)
        issued = self.leases.issue(self.rules, open_group, self.now)
        if expected is not None:
            assert issued is not None
            pending, name = expected
            assert (issued[0], issued[1].prompt.id) == (name, pending.group.prompt.id)
        elif not was_fresh:
            assert issued is None
        if issued is None:
            return False
        self._take(*issued)
        return True

    def _take(self, name: str, lease: Lease) -> None:
        self.out += [(name, lease.lease_id, index) for index in lease.indices]


def test_what_the_index_chooses_is_what_a_walk_through_everything_chooses() -> None:
    chosen: collections.Counter[str] = collections.Counter()
    for seed in range(60):
        play = Play(seed)
        for _ in range(250):
            play.step()
        chosen.update(play.leases.chosen)
    # Each kind of choice was made, and often.
    kinds = ("anywhere", "at home or urgent", "avoiding", "evaluation", "homeless")
    assert min(chosen[kind] for kind in kinds) > 100, chosen


@pytest.mark.parametrize("seed", range(5))
def test_the_roomiest_peer_is_the_first_of_those_with_most_room(seed: int) -> None:
    chance = random.Random(seed)
    peers = Peers("generator")
    names = [f"g{n}" for n in range(8)]
    for now in range(2000):
        name = chance.choice(names)
        event = chance.choices(["announce", "hand out", "give back", "drop"], [5, 10, 10, 1])[0]
        live = {peer.name: peer for peer in peers.all}
        if event == "announce":
            capacity, session = chance.randint(0, 5), chance.choice((1, 1, 1, 2))
            version = chance.randint(0, 2)
            peers.announce(name, capacity=capacity, session=session, version=version, now=now)
        elif event == "drop":
            peers.drop(name)
        elif event == "hand out" and name in live:
            peers.hand_out(name, now, chance.randint(1, 3))
        elif event == "give back" and name in live and live[name].handed_out:
            peers.give_back(name, chance.choice(list(live[name].handed_out)), chance.randint(1, 4))
        for peer in peers.all:
            assert peer.outstanding == sum(peer.handed_out.values())
        for version in (-1, 1, 2):
            eligible = [peer for peer in peers.all if peer.version >= version]
            first = roomiest(eligible)
            found = peers.select(version).find_roomiest()
            assert found == (first.name if first is not None else None)
            assert len(peers.select(version)) == len(eligible)
