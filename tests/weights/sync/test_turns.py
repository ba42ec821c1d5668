"""Engines that give their memory back between weight syncs, and lose their weights; see `peers.py`.

`sync` of `plays.py` compares every element that a generator serves with the version's, and a
scripted engine refuses weights as long as it has no memory for them.
"""

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from generation.async_sockets import AsyncDealer
from generation.weight_client import WeightClient
from megatron_rl.protocol.types import Ack, MayStart, Pause, StartRequest
from megatron_rl.protocol.wire import Dealer, Router
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import GeneratorLink
from megatron_rl.weights.sync.turns import MemoryTurns, end_turn_of_dead_trainer
from tests.distributed import run_ranks
from tests.ports import free_port
from tests.weights.plays import SLACK_S, sync, versions
from tests.weights.scripted_generators import Generator, PipedEngine
from tests.weights.sync.test_link import WAIT_S, Peers, ask, peers, soon  # noqa: F401 - a fixture
from tests.weights.sync.test_syncer import Scene

TURNS = "sync 0, release 0, sync 1, release 0, sync 2"
METHODS = ["folder", "ipc"]


def events(lines: list[dict[str, Any]], *names: str) -> list[str]:
    return [line["event"] for line in lines if line["event"] in names]


@pytest.mark.parametrize("method", METHODS)
def test_each_weight_sync_follows_the_memory_and_no_version_is_lost(
    tmp_path: Path, method: str
) -> None:
    # Engines that share a GPU are on one node: ipc has one rank, folder any number.
    size = {"tensor": 2} if method == "folder" else {}
    generators = [Generator("a", 1), Generator("b", 1)]
    steps, notes = sync(tmp_path, generators, TURNS, method=method, takes_turns=True, **size)
    for name in "ab":
        found = events(notes[name], "version", "releases", "reclaims")
        turn = ["releases", "reclaims", "version"]
        assert found == ["version", *turn, *turn]
        assert versions(notes[name]) == [0, 1, 2]
    # Each weight sync begins with what the ranks freed, and the wait for generators before it.
    trainers = size.get("tensor", 1)
    reclaims = [line for line in notes["a"] if line["event"] == "reclaims"]
    assert [line["freed"] for line in reclaims] == [3 * trainers, 4 * trainers]
    # Weights that were given back are nobody's version.
    assert [step.held for step in steps] == [
        {"a": 0, "b": 0}, {}, {"a": 1, "b": 1}, {}, {"a": 2, "b": 2},
    ]  # fmt: skip
    for number, step in enumerate(steps):
        metrics = step.metrics
        assert (metrics["weight_sync/reclaim_s"] > 0) and step.failed == {}
        # A row is written after a weight sync: with the release before it, of which the first has
        # none.
        assert (metrics["weight_sync/release_s"] > 0) == (number > 1)


FAULTS = {
    "fail": "scripted failure of",
    "die": "restarted|is gone|did not answer",
    "hang": "did not answer",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("occasion", ["release", "reclaim"])
def test_one_that_fails_its_turn_is_dropped_alone_and_comes_back(
    tmp_path: Path, fault: str, occasion: str
) -> None:
    number = 1 if occasion == "release" else 2
    what = f"dawdle {occasion} {number}" if fault == "hang" else f"{fault} {occasion}"
    generators = [Generator("a", 1, ({0: what}, {})), Generator("b", 1)]
    script = "sync 0, release 0, sync 1, admit 2, release 0, sync 2"
    options = {"method": "ipc", "takes_turns": True, "deadline_s": 4 if fault == "hang" else 60}
    steps, notes = sync(tmp_path, generators, script, **options)
    step = steps[number]
    assert list(step.dropped) == ["a"] and re.search(FAULTS[fault], step.dropped["a"])
    assert step.seconds < SLACK_S
    assert versions(notes["b"]) == [0, 1, 2]
    # It is late for version 1, at most; what it serves is always whole.
    assert [version for version in versions(notes["a"]) if version >= 0] == [0, 1, 2]
    assert steps[3].held == {"a": 1, "b": 1} and steps[-1].held == {"a": 2, "b": 2}
    assert steps[-1].metrics["weight_sync/dropped_generators"] >= 1


def test_the_trainer_goes_on_though_no_engine_gave_its_memory_back(tmp_path: Path) -> None:
    generators = [Generator("a", 1, ({0: "die release"}, {}))]
    script = "sync 0, release 0, rest 0.2, sync 1"
    steps, notes = sync(tmp_path, generators, script, method="ipc", takes_turns=True)
    assert steps[1].held == {} and steps[-1].held == {"a": 1}
    assert [version for version in versions(notes["a"]) if version >= 0] == [0, 1]


def test_an_engine_starts_only_while_the_trainer_needs_no_memory(tmp_path: Path) -> None:
    """The late one asks from the release on, and again and again; so does one that died."""
    late = Generator("late", 1, starts_after=1, start_s=0.1)
    again = Generator("again", 1, ({0: "die release"}, {}), start_s=0.1)
    script = "sync 0, release 0, rest 2.5, sync 1, admit 3, release 0, sync 2"
    steps, notes = sync(
        tmp_path, [Generator("a", 1), again, late], script, method="ipc", takes_turns=True
    )
    # Its new life tells of the death.
    assert list(steps[1].dropped) == ["again"] and steps[1].seconds < SLACK_S
    for name, earlier in (("again", 1), ("late", 0)):
        starts = [line["step"] for line in notes[name] if line["event"] == "starts"]
        # Once more than three steps are done only the weight sync of version 1 lets it start.
        assert len(starts) == earlier + 1 and starts[-1] >= 3
    assert steps[4].held == dict.fromkeys(("a", "again", "late"), 1)
    assert steps[-1].held == dict.fromkeys(("a", "again", "late"), 2)


def test_a_turn_of_the_trainer_begins_when_engines_that_start_are_ready(tmp_path: Path) -> None:
    """Then they give back what they took."""
    late = Generator("late", 1, starts_after=0, start_s=1.5)
    script = "sync 0, await 1, release 0, sync 1"
    steps, notes = sync(tmp_path, [Generator("a", 1), late], script, method="ipc", takes_turns=True)
    found = events(notes["late"], "starts", "is ready", "releases", "reclaims", "version")
    assert found == ["starts", "is ready", "releases", "reclaims", "version"]
    assert steps[-1].held == {"a": 1, "late": 1}


@pytest.mark.parametrize("lives", [1, 2])
def test_a_turn_does_not_wait_for_an_engine_that_died_at_its_start(
    tmp_path: Path, lives: int
) -> None:
    """Neither where it is gone nor where its next life waits for its turn."""
    faults = ({-1: "die start"}, {})[:lives]
    late = Generator("late", 1, faults, starts_after=0, start_s=0.1)
    script = f"sync 0, await 1, release 0, sync 1, admit {lives}"
    steps, _ = sync(tmp_path, [Generator("a", 1), late], script, method="ipc", takes_turns=True)
    assert steps[2].seconds < SLACK_S
    assert steps[-1].held == ({"a": 1} if lives == 1 else {"a": 1, "late": 1})


def make_room() -> float:
    """Seconds until a rank has gone on to the engines' turn."""
    dist.init_process_group("gloo")
    control = Control(dist.new_group(backend="gloo"))
    turns = MemoryTurns(
        control,
        None,
        deadline_s=60,
        start_timeout_s=60,
        free_cache=lambda: time.sleep(0.6 * control.rank),
    )
    started = time.monotonic()
    control.all(True)
    turns.begin_engines_turn()
    return time.monotonic() - started


def test_the_engines_turn_begins_when_every_rank_has_given_back_what_it_freed() -> None:
    first, _ = run_ranks(make_room, 2)
    assert first >= 0.6


def late_comers() -> list[str]:
    """What admitting generators before and after a release leads to."""
    scene = Scene(replicas=1, takes_turns=True)
    found = []
    for act in (scene.syncer.admit, scene.syncer.release, scene.syncer.admit):
        try:
            act()
        except AssertionError:
            found.append("refused")
        else:
            found.append("done")
    return found


def test_nobody_is_admitted_between_a_release_and_the_next_weight_sync() -> None:
    assert run_ranks(late_comers, 1) == [["done", "done", "refused"]]


def test_who_is_starting_is_waited_for_as_long_as_it_lives_and_no_longer_than_its_time(
    peers: Peers,  # noqa: F811
) -> None:
    dealer, link = peers.join("a"), peers.link

    def ask(session: int) -> None:
        dealer.send(StartRequest(session))
        link.listen(WAIT_S)

    ask(1)
    assert isinstance(dealer.receive(WAIT_S), MayStart)
    started = time.monotonic()
    link.await_starts(started + 0.5)
    assert 0.5 <= time.monotonic() - started < WAIT_S
    ask(2)
    link.may_start = False
    started = time.monotonic()
    # Of its next life, which must wait.
    dealer.send(StartRequest(session=3))
    link.await_starts(started + 3 * WAIT_S)
    assert time.monotonic() - started < WAIT_S


def test_a_restarted_trainer_takes_the_memory_back_and_lets_no_engine_start(
    peers: Peers,  # noqa: F811
) -> None:
    dealers, told = [peers.join(name) for name in "ab"], []

    def obey(dealer: Dealer) -> None:
        told.append(type(dealer.receive(WAIT_S)).__name__)
        dealer.send(Ack("Release"))

    threads = [threading.Thread(target=obey, args=[dealer]) for dealer in dealers]
    for thread in threads:
        thread.start()
    # Its engine is dead, and waits for room.
    late = Dealer(peers.address, "late")
    late.send(StartRequest(session=1))
    started = time.monotonic()
    end_turn_of_dead_trainer(peers.link, replicas=3, limit_s=90, deadline_s=90)
    assert time.monotonic() - started < WAIT_S
    for thread in threads:
        thread.join()
    assert told == ["Release", "Release"] and late.receive(0.1) is None
    late.close()


def test_a_silent_generator_keeps_a_restarted_trainer_waiting_no_longer_than_the_limit(
    peers: Peers,  # noqa: F811
) -> None:
    started = time.monotonic()
    end_turn_of_dead_trainer(peers.link, replicas=1, limit_s=0.5, deadline_s=90)
    assert 0.5 <= time.monotonic() - started < WAIT_S


def repeated_steps() -> tuple[list[tuple[str, Any]], list[str]]:
    """A restarted trainer repeats steps 4 and 5 without engines, and syncs version 6."""
    scene, asked = Scene(replicas=1, takes_turns=True), []
    scene.hello("a", version=6)
    scene.syncer.await_generators()
    scene.syncer.wait_until_level(5)
    turns = scene.syncer._turns
    for name in ("release", "reclaim"):
        setattr(turns, name, lambda members, name=name: asked.append(name) or {})
    for version in range(4, 7):
        scene.syncer.sync(version)
        scene.syncer.admit()
        scene.syncer.release()
    return scene.method.calls, asked


def test_a_trainer_that_repeats_steps_gives_its_memory_to_no_engine_meanwhile() -> None:
    [(calls, asked)] = run_ranks(repeated_steps, 1)
    assert calls == [("sync", [6, "a"])]
    assert asked == ["release", "release", "reclaim", "release"]


def test_a_second_answer_to_one_that_asked_for_room_is_no_order(tmp_path: Path) -> None:
    """It asks again and again, and may have begun to serve when an answer comes late."""
    port, told = free_port(), list[int]()
    with Router("127.0.0.1", port) as router:
        link = GeneratorLink(router)

        def talk() -> None:
            link.await_peers(1, WAIT_S)
            assert not link.tell("a", MayStart())
            ask(link, "a", Pause(), soon())

        async def serve_and_talk() -> None:
            with AsyncDealer(f"127.0.0.1:{port}", "a") as dealer:
                engine = PipedEngine(Generator("a"), [], {}, tmp_path / "notes")
                engine.world_size = 1
                client = WeightClient(dealer, engine, lambda: told.append(1))  # type: ignore[arg-type]
                serving = asyncio.create_task(client.run())
                await asyncio.to_thread(talk)
                serving.cancel()

        asyncio.run(serve_and_talk())
    assert not told, "it stands apart"
