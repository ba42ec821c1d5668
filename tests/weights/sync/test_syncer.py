"""Who takes part in a weight sync, and what is counted; with a scripted method over real sockets.

What a whole weight sync does to generators is in test_exchange.py.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.types import Hello
from megatron_rl.protocol.wire import DeadlineExceeded, Dealer, Router
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import GeneratorLink, Outcome
from megatron_rl.weights.sync.syncer import WeightSyncer
from megatron_rl.weights.sync.turns import MemoryTurns
from tests.distributed import run_ranks
from tests.ports import free_port

WAIT_S = 60.0


class Scripted:
    """Moves nothing; notes what it is asked."""

    def __init__(self, failing: Callable[[str], bool]) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._failing = failing

    def sync(self, members: Mapping[str, Hello], version: int) -> Outcome:
        self.calls.append(("sync", [version, *members]))
        failed = {name: f"{name} is broken" for name in members if self._failing(name)}
        good = len(members) - len(failed)
        return Outcome(failed, [0.1 * good], 10**6 * good, 10**6, damaged=len(failed))

    def forget(self, name: str) -> None:
        self.calls.append(("forget", name))

    def close(self) -> None:
        self.calls.append(("close", None))


class Scene:
    """A syncer of one rank, and generators that say hello."""

    def __init__(
        self, *, replicas: int, join_timeout_s: float = WAIT_S, takes_turns: bool = False,
        min_replicas: int | None = None, fault: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        port = free_port()
        dist.init_process_group("gloo")
        self.address = f"127.0.0.1:{port}"
        self.failing: set[str] = set()
        self.method = Scripted(lambda name: name in self.failing)
        self.link = GeneratorLink(Router("127.0.0.1", port))
        control = Control(dist.new_group(backend="gloo"))
        turns = MemoryTurns(
            control, self.link, deadline_s=WAIT_S, start_timeout_s=WAIT_S, free_cache=lambda: None
        )
        self.syncer = WeightSyncer(
            self.method, control, self.link, replicas=replicas, join_timeout_s=join_timeout_s,
            turns=turns if takes_turns else None, min_replicas=min_replicas, fault=fault,
        )  # fmt: skip
        self._dealers: dict[str, Dealer] = {}

    def say_leaving(self, name: str) -> None:
        """Returns when it has arrived."""
        self._dealers[name].send(Hello(1, "scripted", "1", session=1, is_leaving=True))
        ends_at = time.monotonic() + WAIT_S
        while name not in self.link.peers or not self.link.peers[name].is_leaving:
            assert time.monotonic() < ends_at
            self.link.listen(0.1)

    def hello(
        self, name: str, session: int = 1, *, is_held: bool = False, version: int = -1,
        is_paused: bool = False,
    ) -> None:  # fmt: skip
        """Returns when it has arrived."""
        if name not in self._dealers:
            self._dealers[name] = Dealer(self.address, name)
        said = Hello(
            1, "scripted", "1", session=session, is_held=is_held, version=version,
            is_paused=is_paused,
        )  # fmt: skip
        self._dealers[name].send(said)
        ends_at = time.monotonic() + WAIT_S
        while self.link.peers.get(name) != said:
            assert time.monotonic() < ends_at
            self.link.listen(0.1)

    def heard(self, name: str) -> list[str]:
        """Kinds of the messages that a generator has got."""
        dealer, found = self._dealers[name], []
        # The first may still be on its way; none is in flight after the others.
        while (message := dealer.receive(0.5)) is not None:
            found.append(type(message).__name__)
        return found

    def metrics(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self.syncer.metrics}


def held_and_let_go() -> list[tuple[str, Any]]:
    scene = Scene(replicas=2)
    scene.hello("a")
    scene.hello("b")
    scene.syncer.sync(0)
    scene.hello("b", is_held=True)
    scene.syncer.sync(1)
    scene.syncer.admit()
    scene.syncer.sync(2)
    scene.hello("b", is_held=False)
    scene.syncer.admit()
    scene.syncer.sync(3)
    return scene.method.calls


def test_a_generator_that_holds_its_version_is_passed_by_until_it_lets_go() -> None:
    [calls] = run_ranks(held_and_let_go, 1)
    assert calls == [
        ("sync", [0, "a", "b"]),
        ("sync", [1, "a"]),
        ("sync", [2, "a"]),
        ("sync", [2, "b"]),
        ("sync", [3, "a", "b"]),
    ]


def one_leaves() -> list[tuple[str, Any]]:
    scene = Scene(replicas=2)
    scene.hello("a")
    scene.hello("b")
    scene.syncer.sync(0)
    scene.say_leaving("b")
    scene.syncer.sync(1)
    # It repeats what it said, as long as it finishes its leases.
    scene.say_leaving("b")
    scene.syncer.admit()
    scene.hello("b", session=2)
    scene.syncer.sync(2)
    return scene.method.calls


def test_no_weight_sync_includes_a_generator_that_leaves_until_another_has_its_name() -> None:
    [calls] = run_ranks(one_leaves, 1)
    assert calls == [
        ("sync", [0, "a", "b"]),
        ("forget", "b"),
        ("sync", [1, "a"]),
        ("forget", "b"),
        ("forget", "b"),
        ("sync", [2, "a", "b"]),
    ]


def first_and_late() -> tuple[list[tuple[str, Any]], dict[str, float], dict[str, float]]:
    scene = Scene(replicas=2)
    scene.hello("a")
    scene.hello("b")
    scene.syncer.await_generators()
    scene.failing = {"b"}
    scene.syncer.sync(0)
    first = scene.metrics()
    scene.syncer.admit()  # b has not come back
    scene.failing = set()
    scene.hello("b")
    scene.hello("c")
    scene.syncer.admit()
    scene.syncer.admit()
    scene.hello("a", session=2)
    scene.syncer.admit()
    scene.syncer.sync(1)
    second = scene.metrics()
    scene.syncer.close()
    return scene.method.calls, first, second


def test_who_failed_is_late_or_restarted_gets_the_version_and_nobody_else() -> None:
    [(calls, first, second)] = run_ranks(first_and_late, 1)
    assert calls == [
        ("sync", [0, "a", "b"]),
        ("forget", "b"),
        ("sync", [0, "b", "c"]),
        ("forget", "a"),
        ("sync", [0, "a"]),
        ("sync", [1, "a", "b", "c"]),
        ("close", None),
    ]
    assert (first["weight_sync/generators"], first["weight_sync/dropped_generators"]) == (1, 1)
    assert (first["weight_sync/wire_mb"], first["weight_sync/damaged_parcels"]) == (1, 1)
    assert (second["weight_sync/generators"], second["weight_sync/dropped_generators"]) == (3, 1)
    # Three late transfers and three of version 1.
    assert (second["weight_sync/wire_mb"], second["weight_sync/damaged_parcels"]) == (6, 0)
    assert second["weight_sync/pause_s"] == pytest.approx(0.3)


def restarted() -> list[tuple[str, Any]]:
    scene = Scene(replicas=2)
    scene.hello("a", version=7)
    scene.hello("b", version=6)
    scene.syncer.await_generators()
    scene.syncer.wait_until_level(6)
    for version in range(4, 9):
        scene.syncer.sync(version)
        if version == 5:
            # A generator that comes meanwhile waits, too.
            scene.hello("c")
            scene.syncer.admit()
    return scene.method.calls


def test_a_restarted_trainer_takes_no_version_back() -> None:
    [calls] = run_ranks(restarted, 1)
    assert calls == [("sync", [7, "a", "b", "c"]), ("sync", [8, "a", "b", "c"])]


def restarted_amid_a_sync() -> tuple[list[tuple[str, Any]], list[list[str]]]:
    """Version 6 was on its way to a and c; Hello of c, which starts late, comes last."""
    scene = Scene(replicas=2)
    scene.hello("a", version=5, is_paused=True)
    scene.hello("b", version=5)
    scene.syncer.await_generators()
    scene.syncer.wait_until_level(6)
    scene.syncer.sync(4)
    # Its answer to Fence.
    scene.hello("a", is_paused=True)
    scene.hello("c", version=5, is_paused=True)
    for version in (5, 6):
        scene.syncer.sync(version)
    return scene.method.calls, [scene.heard(name) for name in "abc"]


def test_a_generator_that_a_dead_trainer_paused_is_fenced_until_the_next_weight_sync() -> None:
    [(calls, heard)] = run_ranks(restarted_amid_a_sync, 1)
    assert calls == [("sync", [6, "a", "b", "c"])]
    assert heard == [["Fence"], [], ["Fence"]]


def nobody_left() -> tuple[str, float, list[tuple[str, Any]]]:
    scene = Scene(replicas=1, join_timeout_s=1.0)
    scene.hello("a")
    scene.failing = {"a"}
    started = time.monotonic()
    try:
        scene.syncer.sync(4)
    except DeadlineExceeded as error:
        return str(error), time.monotonic() - started, scene.method.calls
    return "", 0.0, []


def test_a_weight_sync_without_a_generator_ends_with_the_last_reason() -> None:
    [(error, seconds, calls)] = run_ranks(nobody_left, 1)
    assert error.startswith(
        "no generator took version 4 in 1 s (expert.weights.join_timeout_s): a is broken; see logs/"
    )
    assert 1 <= seconds < 20 and calls == [("sync", [4, "a"]), ("forget", "a")]


def always_failing() -> list[tuple[str, Any]]:
    scene = Scene(replicas=2)
    scene.failing = {"b"}
    for version in range(12):
        scene.hello("a")
        scene.hello("b")
        scene.syncer.sync(version)
    scene.failing = set()
    scene.hello("b")
    scene.syncer.sync(12)
    scene.hello("b", session=2)
    scene.syncer.sync(13)
    return scene.method.calls


def test_a_generator_that_fails_again_and_again_is_passed_by_for_longer_each_time() -> None:
    [calls] = run_ranks(always_failing, 1)
    served = [what[0] for kind, what in calls if kind == "sync" and "b" in what]
    # 0 and 1 fail, then 2 weight syncs pass it by, then 4, then 8; a restarted one is served at
    # once.
    assert served == [0, 1, 4, 9, 13]
    assert [what[0] for kind, what in calls if kind == "sync" and "a" in what] == [*range(14)]


def alone_and_failing() -> list[int]:
    scene = Scene(replicas=1, join_timeout_s=60.0)
    scene.hello("a")
    scene.failing = {"a"}
    thread = threading.Thread(target=let_it_succeed, args=(scene,))
    thread.start()
    scene.syncer.sync(0)
    thread.join()
    return [what[0] for kind, what in scene.method.calls if kind == "sync"]


def let_it_succeed(scene: Scene) -> None:
    """Say Hello again after each failure; the fourth weight sync succeeds."""
    dealer = Dealer(scene.address, "a")
    for tries in range(1, 4):
        while len([None for kind, _ in scene.method.calls if kind == "forget"]) < tries:
            time.sleep(0.01)
        if tries == 3:
            scene.failing = set()
        dealer.send(Hello(1, "scripted", "1", session=1))


def test_the_only_generator_is_never_passed_by() -> None:
    [versions] = run_ranks(alone_and_failing, 1)
    assert versions == [0] * 4


def first_is_missing(min_replicas: int | None = None) -> str:
    scene = Scene(replicas=2, join_timeout_s=0.3, min_replicas=min_replicas)
    scene.hello("a")
    try:
        scene.syncer.await_generators()
    except DeadlineExceeded as error:
        return str(error)
    return ""


def test_a_missing_generator_is_a_deadline_that_says_where_to_look() -> None:
    [error] = run_ranks(first_is_missing, 1)
    assert "1 of 2 generators said hello" in error and "logs/generator-*.log" in error


def test_training_begins_with_as_many_generators_as_it_needs() -> None:
    assert run_ranks(first_is_missing, 1, 1) == [""]


def sync_faulty() -> list[Any]:
    scene = Scene(replicas=1, fault=lambda: "model.norm.weight on trainer rank 0")
    scene.hello("a")
    with pytest.raises(TrainingStopped) as stop:
        scene.syncer.sync(3)
    return [scene.method.calls, str(stop.value)]


def test_faulty_weights_go_to_no_generator() -> None:
    [[calls, text]] = run_ranks(sync_faulty, 1)
    assert calls == []
    assert text.startswith("version 3 has NaN or Inf in model.norm.weight on trainer rank 0, and ")
