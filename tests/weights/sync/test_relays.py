"""Trees of generators by hand and at random, and generators that really pass versions on.

`sync` of `plays.py` compares every element that a generator serves with the version's.
"""

import math
import random
from pathlib import Path

import pytest

from megatron_rl.weights.layout.copies import turns_before, turns_busy
from megatron_rl.weights.sync.relays import COPY, Relays
from tests.weights.plays import SLACK_S, sync, versions
from tests.weights.scripted_generators import Generator

SEVEN = "abcdefg"
TREE = {"a": COPY, "b": COPY, "c": "a", "d": COPY, "e": "a", "f": "b", "g": "c"}


def sources(relays: Relays, names: str, copies: int = 1) -> dict[str, str]:
    """Of generators of one kind, dealt to copies in turn."""
    copy_of = {name: place % copies for place, name in enumerate(names)}
    return relays.sources(dict.fromkeys(relays.order(names, copy_of), "kind"))


def served_after(found: dict[str, str]) -> dict[str, int]:
    """Transfers after which each holds a version, where everybody serves one at a time.

    Counted step by step, by whoever holds it and has somebody to serve.
    """
    waiting = {COPY: [n for n in found if found[n] == COPY]}
    waiting |= {name: [n for n in found if found[n] == name] for name in found}
    holders, done, step = [COPY], {}, 0
    while len(done) < len(found):
        step += 1
        taken = [waiting[holder].pop(0) for holder in holders if waiting[holder]]
        assert taken, "somebody waits for a generator that waits itself"
        done |= dict.fromkeys(taken, step)
        holders += taken
    return done


def test_seven_generators_stand_as_in_the_drawing() -> None:
    assert sources(Relays(), SEVEN) == TREE
    assert served_after(TREE) == {"a": 1, "b": 2, "c": 2, "d": 3, "e": 3, "f": 3, "g": 3}


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 44, 100])
def test_those_that_hold_a_version_double(number: int) -> None:
    names = [f"{n:03d}" for n in range(number)]
    relays = Relays()
    found = relays.sources(dict.fromkeys(relays.order(names, dict.fromkeys(names, 0)), "kind"))
    after = served_after(found)
    assert max(after.values()) == math.ceil(math.log2(number + 1))
    places = range(1, number + 1)
    assert [after[name] for name in names] == [turns_before(place) for place in places]
    busy = {s: max(after[n] for n in names if found[n] == s) for s in found.values() if s}
    assert [busy.get(name, after[name]) for name in names] == [
        turns_busy(place, number) for place in places
    ]


def test_an_empty_place_is_filled_and_what_is_below_it_goes_to_the_next_above() -> None:
    relays = Relays()
    sources(relays, SEVEN)
    # c evaluates and is not served: g goes to whoever serves c.
    assert sources(relays, "abdefg") == {**{n: TREE[n] for n in "abdef"}, "g": "a"}
    assert sources(relays, SEVEN) == TREE
    relays.forget("a")
    assert sources(relays, "bcdefg") == {
        "b": COPY, "c": COPY, "d": COPY, "e": COPY, "f": "b", "g": "c"
    }  # fmt: skip
    # Whoever comes next takes the place, and nobody else moves.
    assert sources(relays, "bcdefgh")["c"] == "h"


def test_other_kinds_and_those_that_were_passed_over_are_served_by_the_copy() -> None:
    relays = Relays()
    order = relays.order(SEVEN, dict.fromkeys(SEVEN, 0))
    found = relays.sources({name: "other" if name in "ce" else "kind" for name in order})
    # g is below c, which is below a.
    assert found == {**TREE, "c": COPY, "e": COPY, "g": "a"}
    relays.serve_directly("f")
    assert sources(relays, SEVEN) == {**TREE, "f": COPY}
    relays.forget("f")
    assert sources(relays, SEVEN) == TREE


def test_comings_and_goings_leave_trees_of_those_that_are_there() -> None:
    draw = random.Random(3)
    for _ in range(100):
        relays, others, copies = Relays(), Relays(), draw.randint(1, 4)
        for _ in range(10):
            names = sorted(draw.sample("abcdefghijklmnopqrst", draw.randint(1, 20)))
            copy_of = {name: (ord(name) + len(names)) % copies for name in names}
            kinds = dict.fromkeys(relays.order(names, copy_of), "kind")
            found = relays.sources(kinds)
            # Every trainer rank finds the same.
            assert others.order(names, copy_of) == list(kinds)
            assert others.sources(kinds) == found and set(found) == set(names)
            for name, source in found.items():
                assert source == COPY or copy_of[source] == copy_of[name]
            # Counts all of them, or fails where one waits for itself.
            served_after(found)
            for name in draw.sample(names, draw.randint(0, len(names))):
                relays.forget(name)
                others.forget(name)


@pytest.mark.parametrize("options", [{"tensor": 2}, {"is_concurrent": False}])
def test_seven_generators_get_each_version_bit_for_bit(
    tmp_path: Path, options: dict[str, int]
) -> None:
    generators = [Generator(name) for name in SEVEN]
    steps, notes = sync(
        tmp_path,
        generators,
        "sync 0, sync 1, sync 2",
        relays=True,
        deadline_s=8,
        **options,
    )
    for name in SEVEN:
        assert versions(notes[name]) == [0, 1, 2]
    for version, step in enumerate(steps):
        assert step.sources == TREE
        assert step.failed == step.passed_over == {}
        assert step.held == dict.fromkeys(SEVEN, version)
        assert (
            step.metrics["weight_sync/relayed"] == 4
            and step.metrics["weight_sync/passed_over"] == 0
        )
        # Receiver and sender of a rank use the same two buffers.
        assert step.metrics["weight_sync/peak_extra_mb"] * 1e6 <= 2 * 2048
    # Each engine gets its parameters once, whoever sends them.
    alone = tmp_path / "alone"
    alone.mkdir()
    [single], _ = sync(alone, [Generator("a")], "sync 0", **options)
    assert steps[0].metrics["weight_sync/wire_mb"] == pytest.approx(
        7 * single.metrics["weight_sync/wire_mb"]
    )


def test_engines_pass_on_to_those_of_their_kind_and_copy(tmp_path: Path) -> None:
    """Two copies; of the first a, c, e with two ranks and g with one, of the second b, d, f."""
    ranks = {"a": 2, "b": 1, "c": 2, "d": 1, "e": 2, "f": 1, "g": 1}
    steps, notes = sync(
        tmp_path, [Generator(n, r) for n, r in ranks.items()], "sync 0, sync 1",
        relays=True, data=2, deadline_s=8,
    )  # fmt: skip
    assert steps[1].bound == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0, "f": 1, "g": 0}
    assert steps[1].sources == {**dict.fromkeys("abcdg", COPY), "e": "a", "f": "b"}
    for name in ranks:
        assert versions(notes[name]) == [0, 1]


@pytest.mark.parametrize("fault", ["die transfer", "die sending", "fail passing"])
def test_whom_a_generator_fails_the_copy_serves_in_the_same_sync(
    tmp_path: Path, fault: str
) -> None:
    generators = [Generator("a", 1, ({1: fault}, {})), Generator("b"), Generator("c")]
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1, admit 3, sync 2, sync 3",
        relays=True, tensor=2, deadline_s=8,
    )  # fmt: skip
    assert list(steps[1].failed) == ["a"] and list(steps[1].passed_over) == ["c"]
    assert steps[1].held == {"b": 1, "c": 1} and steps[1].seconds < SLACK_S
    assert steps[1].metrics["weight_sync/passed_over"] == 1
    # c got its weights from the copy and is served by it from then on, without a break.
    assert versions(notes["b"]) == versions(notes["c"]) == [0, 1, 2, 3]
    assert steps[-1].held == dict.fromkeys("abc", 3)
    assert steps[-1].sources["c"] == COPY


@pytest.mark.parametrize("fault", ["die transfer", "damage", "fail receive"])
def test_a_generator_that_fails_does_not_harm_the_one_that_passes_on_to_it(
    tmp_path: Path, fault: str
) -> None:
    """a serves c and e, one after the other."""
    generators = [Generator(n) for n in "abde"]
    generators.insert(2, Generator("c", 1, ({1: fault}, {})))
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1, admit 5, sync 2",
        relays=True, deadline_s=8,
    )  # fmt: skip
    assert steps[0].sources["c"] == steps[0].sources["e"] == "a"
    for name in "abde":
        assert steps[1].held[name] == 1 and versions(notes[name]) == [0, 1, 2]
    if fault == "damage":
        # Once is mended by sending once more.
        assert steps[1].metrics["weight_sync/damaged_parcels"] == 1 and steps[1].failed == {}
    assert steps[1].seconds < SLACK_S and steps[-1].held == dict.fromkeys("abcde", 2)


def test_generators_that_hang_are_dropped_and_those_behind_them_are_served(tmp_path: Path) -> None:
    """a hangs as it receives in one weight sync, and as it passes on in another one."""
    faults = {1: "stop reading", 3: "stop sending"}
    generators = [Generator("a", 1, (faults,)), Generator("b"), Generator("c"), Generator("d")]
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1, admit 4, sync 2, sync 3, admit 4",
        relays=True, deadline_s=6, grace_s=0.7,
    )  # fmt: skip
    assert "expert.weights.grace_s" in steps[1].failed["a"] and list(steps[1].passed_over) == ["c"]
    assert steps[1].held == {"b": 1, "c": 1, "d": 1} and steps[1].seconds < 0.7 + SLACK_S
    # c is served by the copy since then: so nobody waits for a, as it passes nothing on.
    assert steps[3].held["c"] == 2 and versions(notes["c"]) == [0, 1, 2, 3]
    assert versions(notes["b"]) == versions(notes["d"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["stop sending", "refuse to send"])
def test_a_hang_amid_passing_on_costs_no_more_than_the_grace(tmp_path: Path, fault: str) -> None:
    generators = [Generator("a", 1, ({1: fault},)), Generator("b"), Generator("c")]
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1, admit 3, sync 2",
        relays=True, deadline_s=5, grace_s=0.7,
    )  # fmt: skip
    # c receives already, and cannot be served otherwise before it gives up.
    assert "c" in steps[1].failed and steps[1].held["b"] == 1
    assert steps[1].seconds < 3 * 0.7 + SLACK_S
    assert versions(notes["b"]) == [0, 1, 2] and steps[-1].held == dict.fromkeys("abc", 2)
    assert [v for v in versions(notes["c"]) if v >= 0] == [0, 1, 2]


def test_versions_are_passed_on_while_the_trainer_trains(tmp_path: Path) -> None:
    generators = [Generator("a", 1, ({2: "die sending"}, {}))]
    generators += [Generator(name) for name in "bcdefg"]
    script = "sync 0, start 1, join 0, spoil 9, start 2, join 0, admit 7, spoil 8, sync 3"
    steps, notes = sync(tmp_path, generators, script, relays=True, tensor=2, deadline_s=8)
    assert steps[2].held == dict.fromkeys(SEVEN, 1) and steps[2].announced == (1,)
    # c, e and g wait for a: they are served at the join, before the parameters change.
    assert steps[5].held == dict.fromkeys("bcdefg", 2) and steps[5].announced == (1, 2)
    assert {"c"} <= set(steps[5].passed_over) <= {"c", "e", "g"}
    for name in "bcdefg":
        assert versions(notes[name]) == [0, 1, 2, 3]
    assert steps[-1].held == dict.fromkeys(SEVEN, 3)
