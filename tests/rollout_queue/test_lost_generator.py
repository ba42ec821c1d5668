"""Generators that die with leases in hand: no completion is lost, none is counted twice."""

import collections
import random
from pathlib import Path

import pytest

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import GeneratorReady, Sampling
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from tests.rollout_queue.makers import make_prompt, make_rollout
from tests.rollout_queue.scripted_peers import ScriptedPeers, start_queue, write_config
from tests.rollout_queue.test_server import TRAIN, check_batches

GROUPS, SIZE = 40, 4
HEARTBEAT_S = 10.0
RULES = LeaseRules(synced=0, max_staleness=0, is_strict=False)


class Fleet:
    """Two generators that return completions, or die in one of the three ways."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        limits = QueueConfig(
            heartbeat_timeout_s=HEARTBEAT_S, lease_timeout_s=1000, max_attempts=10_000
        )
        self.leases = Leases(limits)
        self.sessions = dict.fromkeys("ab", 1)
        self.versions = dict.fromkeys("ab", 0)
        self.held: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
        self.returned: collections.Counter[tuple[int, int]] = collections.Counter()

    def beat(self, names: str = "ab") -> None:
        for name in names:
            ready = GeneratorReady(8, self.versions[name], self.sessions[name])
            self.leases.announce(name, ready, self.now)

    def lease(self, waiting: list[Group]) -> None:
        def open_group() -> Group | None:
            return (
                waiting.pop()
                if waiting and self.leases.can_take(RULES, is_evaluation=False)
                else None
            )

        issued = self.leases.issue(RULES, open_group, self.now)
        if issued is not None:
            name, lease = issued
            assert self.versions[name] >= 0, "a lease before the first weight sync"
            self.held[name] += [(lease.lease_id, index) for index in lease.indices]

    def give_back(self) -> None:
        name = self.chance.choice("ab")
        if self.held[name]:
            self._send(name, self.held[name].pop(self.chance.randrange(len(self.held[name]))))

    def die(self) -> None:
        name, other = self.chance.choice(["ab", "ba"])
        late = self.held[name].pop() if self.held[name] else None
        self.held[name].clear()
        self.sessions[name] += 1
        self.versions[name] = -1
        match self.chance.choice(["restarts", "falls silent", "cannot be reached"]):
            case "falls silent":
                self.now += HEARTBEAT_S - 1
                self.beat(other)
                self.now += 2
                self.leases.expire(self.now)
            case "cannot be reached":
                self.leases.drop_generator(name)
        self.beat(name)
        if late is not None:  # was still on its way when the successor announced itself
            self._send(name, late)

    def sync(self) -> None:
        self.versions = dict.fromkeys("ab", 0)
        self.beat()

    def _send(self, name: str, item: tuple[int, int]) -> None:
        lease_id, index = item
        group = self.leases.take_rollout(name, make_rollout(index, lease_id=lease_id), self.now)
        if group is not None:
            self.returned[group.number, index] += 1


@pytest.mark.parametrize("seed", range(20))
def test_each_completion_is_returned_once_however_generators_die(seed: int) -> None:
    fleet = Fleet(seed)
    fleet.beat()
    waiting = [Group(n, make_prompt(), Sampling(8, 1.0), SIZE, 0) for n in range(GROUPS)]
    deaths = 0
    while len(fleet.returned) < GROUPS * SIZE:
        fleet.now += 0.01
        draw = fleet.chance.random()
        if draw < 0.05 and deaths < 30:
            fleet.die()
            deaths += 1
        elif draw < 0.2:
            fleet.sync()
        elif draw < 0.5:
            fleet.lease(waiting)
        else:
            fleet.give_back()
    assert deaths > 5
    assert set(fleet.returned.values()) == {1}
    assert fleet.leases.outstanding == 0


@pytest.mark.parametrize(
    "dead_s", [pytest.param(0.0, id="back-at-once"), pytest.param(2.5, id="silent-first")]
)
def test_a_run_whose_generator_dies_trains_on_each_completion_once(
    tmp_path: Path, dead_s: float
) -> None:
    config = write_config(
        tmp_path, 40, 0, train=TRAIN, eval={"prompts": 0}, generator={"max_running": 64},
        queue={"max_staleness": 1, "strict_staleness": True, "heartbeat_timeout_s": 1.0},
    )  # fmt: skip
    queue = start_queue(config)

    def kill_at(step: int) -> None:
        if step in (1, 3):
            peers.kill_generator(dead_s=dead_s, joins_s=0.7)

    peers = ScriptedPeers(config, dp_size=2, hold=9, on_step=kill_at)
    peers.play(queue)
    assert peers.session == 3 and len(peers.lost) >= 8
    check_batches(peers, max_staleness=1)
    trained: collections.Counter = collections.Counter()
    for step in range(TRAIN["steps"]):
        records = read_jsonl(tmp_path / "rollouts" / f"step_{step:06d}.jsonl")
        trained.update((record["group"], record["index"]) for record in records)
    assert len(trained) == 96 and set(trained.values()) == {1}
    assert "again: " in (tmp_path / "logs" / "queue.log").read_text()
