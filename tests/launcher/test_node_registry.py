"""Which nodes the run misses, waits for or continues without; launchers that are refused."""

import pytest

from megatron_rl.config.tree import NodesConfig
from megatron_rl.launcher.node_registry import Least, NodeRegistry, PlaceTaken
from megatron_rl.protocol.node_messages import NodeState

LIMITS = NodesConfig(start_timeout_s=10, silence_timeout_s=4, end_timeout_s=6)


def state(node: int, ended: int = 0, **changes: object) -> NodeState:
    given = {"node": node, "nodes": 3, "address": f"10.0.0.{node}", "session": 1, "ended": ended}
    return NodeState(**given | changes)


def test_a_node_is_missed_when_it_never_came_fell_silent_or_left() -> None:
    attendance = NodeRegistry(3, LIMITS, now=100.0)
    attendance.note(state(1), 105.0)
    assert attendance.find_lost(109.0) == ""
    assert attendance.find_lost(109.1) == "node 1 has been silent for 4 s"
    attendance.note(state(1), 110.0)
    assert attendance.find_lost(110.0) == ""
    assert attendance.find_lost(110.1) == "node 2 was not heard within 10 s of the first one"
    attendance.note(state(2), 110.2)
    attendance.note(state(1, error="a role died"), 110.3)
    assert attendance.find_lost(110.4) == "node 1 has left the run: a role died"


SERVING = {"is_vital": False, "replicas": {"generator": 2, "verifier": 1}}


def test_the_run_continues_without_a_node_that_only_serves_until_it_is_back() -> None:
    registry = NodeRegistry(3, LIMITS, now=0.0)
    registry.note(state(1), 0.0)
    registry.note(state(2, given_up={"generator": 1}, **SERVING), 0.0)
    assert (registry.find_lost(4.0), registry.given_up()) == ("", {"generator": 1})
    registry.note(state(1), 5.0)
    assert registry.find_lost(5.0) == "" and registry.behind(1) == [1]
    assert registry.take_events() == [
        "node 2 has been silent for 5 s: the run continues without its 2 generators and 1 verifier"
    ]
    assert registry.given_up() == {"generator": 2, "verifier": 1}
    registry.note(state(2, session=2, **SERVING), 6.0)
    assert (registry.find_lost(6.0), registry.given_up()) == ("", {})
    assert registry.take_events() == ["node 2 is back with 2 generators and 1 verifier"]
    # It is killed, and started again before its silence was noticed.
    assert not registry.note(state(2, session=4, **SERVING), 10.9)
    assert not registry.take_events()
    assert registry.note(state(2, session=4, **SERVING), 12.0)
    assert registry.take_events() == ["node 2 is back with 2 generators and 1 verifier"]
    registry.note(state(2, session=4, is_leaving=True, **SERVING), 13.0)
    registry.note(state(1), 13.0)
    assert registry.find_lost(13.0) == "" and registry.given_up() == SERVING["replicas"]
    assert registry.take_events() == [
        "node 2 leaves the run: the run continues without its 2 generators and 1 verifier"
    ]


def test_the_node_that_leaves_too_few_generators_is_named_with_the_key() -> None:
    registry = NodeRegistry(3, LIMITS, now=0.0)
    needs = {"generator": Least(4, 1)}
    for node in (1, 2):
        registry.note(state(node, **SERVING), 0.0)
    assert registry.find_too_few({"generator": 4}, needs) == ""
    registry.note(state(1, is_leaving=True, **SERVING), 1.0)
    assert registry.find_lost(1.0) == registry.find_too_few(registry.given_up(), needs) == ""
    registry.note(state(2, error="it was ended by signal 15", signal=15, **SERVING), 2.0)
    assert registry.find_lost(2.0) == ""
    assert registry.find_too_few(registry.given_up(), needs) == (
        "node 2 has left the run: it was ended by signal 15, and 0 of 4 generators are fewer than "
        "generator.min_replicas = 1"
    )
    assert registry.ending == (15, False)


def test_replicas_of_a_joined_node_come_on_top_of_the_configured_ones() -> None:
    registry = NodeRegistry(1, LIMITS, now=0.0)
    joined = {"nodes": 1, "is_joined": True, "is_vital": False, "replicas": {"generator": 2}}
    registry.note(state(4, **joined), 0.0)
    assert registry.take_events() == ["node 4 has joined with 2 generators"]
    assert registry.given_up() == {"generator": -2} and registry.behind(1) == [4]
    registry.note(state(4, given_up={"generator": 1}, **joined), 1.0)
    assert registry.given_up() == {"generator": -1}
    # Nothing that it says ends the run.
    registry.note(state(4, session=7, **joined), 1.5)
    registry.note(state(4, error="no GPU", **joined), 2.0)
    assert registry.find_lost(2.0) == "" and registry.given_up() == {}
    assert registry.behind(1) == []


def test_a_phase_is_over_when_every_node_has_ended_it() -> None:
    attendance = NodeRegistry(3, LIMITS, now=0.0)
    assert attendance.behind(1) == [1, 2]
    attendance.note(state(2, ended=1), 1.0)
    assert attendance.behind(1) == [1] and attendance.behind(2) == [1, 2]
    attendance.note(state(1, ended=2), 1.0)
    assert attendance.behind(1) == []
    assert NodeRegistry(1, LIMITS, now=0.0).behind(7) == []


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (state(3, session=2), "as --node 3 of --nodes 3"),
        (state(0, session=2), "as --node 0 of --nodes 3"),
        (state(2, session=2, nodes=2), "as --node 2 of --nodes 2, the first one with --nodes 3"),
    ],
)
def test_launchers_with_wrong_numbers_are_refused(wrong: NodeState, expected: str) -> None:
    registry = NodeRegistry(3, LIMITS, now=0.0)
    registry.note(state(1), 8.0)
    for _ in range(2):
        with pytest.raises(PlaceTaken, match=expected):
            registry.note(wrong, 8.0)
    # It is told once, and again when the missing node does not come.
    [event] = registry.take_events()
    assert event.startswith(f"a launcher at {wrong.address} is refused, and the run continues: a")
    assert registry.present == 1 and registry.find_lost(9.0) == ""
    assert registry.find_lost(10.1).startswith("node 2 was not heard within 10 s of the first one;")
    assert expected in registry.find_lost(10.1)


def test_a_launcher_that_counts_other_gpus_is_refused_unless_it_joins() -> None:
    registry = NodeRegistry(3, LIMITS, 0.0, 1)
    assert registry.note(state(2, gpus_per_node=1), 1.0)
    with pytest.raises(PlaceTaken, match="node 1 counts 2 GPUs on each node, and the first one 1"):
        registry.note(state(1, gpus_per_node=2), 1.0)
    # The same node, started again with the right number.
    assert registry.note(state(1, session=2, gpus_per_node=1), 2.0)
    assert registry.note(state(3, is_joined=True), 2.0) and registry.present == 3


@pytest.mark.parametrize("is_vital", [False, True])
def test_a_second_launcher_is_refused_once_the_first_is_known_to_live(is_vital: bool) -> None:
    registry = NodeRegistry(2, LIMITS, now=0.0)
    first, second = (
        state(1, nodes=2, session=number, is_vital=is_vital, address=f"10.0.0.{number}")
        for number in (1, 2)
    )
    assert registry.note(first, 100.0)
    # Words of the first that were under way when the second came do not show that it lives.
    for at in (340.0, 341.0, 342.0):
        assert not registry.note(second, at)
        assert registry.note(first, at)
    assert registry.note(first, 342.1)
    with pytest.raises(PlaceTaken, match=r"at 10\.0\.0\.1, has had this place for 243 s"):
        registry.note(second, 343.0)
    assert len(registry.take_events()) == 1 and registry.find_lost(343.0) == ""
    assert registry.note(first, 344.0) and registry.addresses() == {1: "10.0.0.1"}


def test_a_first_node_that_stalled_takes_no_live_launcher_for_a_silent_one() -> None:
    registry = NodeRegistry(2, LIMITS, now=0.0)
    registry.may_return = [1]
    registry.note(state(1, nodes=2), 0.0)
    # After 9 s it reads what lies in its socket, in any order.
    assert not registry.note(state(1, nodes=2, session=2), 9.0)
    assert not registry.note(state(1, nodes=2, session=2), 9.0)
    assert registry.note(state(1, nodes=2), 9.0)
    assert not registry.note(state(1, nodes=2, session=2), 10.0)
    assert registry.take_interruptions() == []
