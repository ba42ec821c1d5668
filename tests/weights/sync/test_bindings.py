"""Generators bound to copies: by hand, and for random comings and goings."""

import random

from megatron_rl.weights.sync.relays import Bindings


def test_generators_are_spread_in_their_order() -> None:
    bindings = Bindings(3)
    assert bindings.bind(["a", "b", "c", "d"]) == []
    assert bindings.of == {"a": 0, "b": 1, "c": 2, "d": 0}
    # One that returns takes the emptiest copy.
    bindings.forget("b")
    assert bindings.bind(["e"]) == [] and bindings.of["e"] == 1


def test_who_is_served_moves_only_when_a_copy_has_two_more() -> None:
    bindings = Bindings(2)
    bindings.bind(list("abcdef"))
    bindings.forget("b")
    assert bindings.bind(list("acdef")) == []  # three and two
    bindings.forget("d")
    # Three and one; f has the emptier copy, and c is not served now.
    assert bindings.bind(["f", "a"]) == ["a"]
    assert bindings.of == {"a": 1, "c": 0, "e": 0, "f": 1}


def test_copies_stay_within_one_generator_of_each_other() -> None:
    draw = random.Random(5)
    for _ in range(200):
        bindings = Bindings(draw.randint(1, 5))
        others = Bindings(bindings._copies)
        present: set[str] = set()
        for _ in range(12):
            gone = {name for name in present if draw.random() < 0.4}
            for name in sorted(gone):
                bindings.forget(name)
                others.forget(name)
            present = (present - gone) | {f"g{draw.randint(0, 20)}" for _ in range(4)}
            before = dict(bindings.of)
            moved = bindings.bind(sorted(present))
            # Every trainer rank finds the same.
            assert others.bind(sorted(present)) == moved and others.of == bindings.of
            counts = [list(bindings.of.values()).count(n) for n in range(bindings._copies)]
            assert sum(counts) == len(present) and max(counts) - min(counts) <= 1
            assert {name for name in before if before[name] != bindings.of[name]} == set(moved)
