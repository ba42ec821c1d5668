"""Weight syncs that are started before a batch and joined before its optimizer step; see
`peers.py`.

`sync` of `plays.py` compares every element that a generator serves with the version's.
"""

from pathlib import Path

import pytest

from tests.weights.plays import SLACK_S, sync, versions
from tests.weights.scripted_generators import DAWDLE_S, Generator


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2}])
@pytest.mark.parametrize("method", ["reshard", "folder", "ipc"])
def test_each_version_is_whole_though_the_parameters_change_after_the_join(
    tmp_path: Path, layout: dict[str, int], method: str
) -> None:
    generators = [Generator("a", 2), Generator("b", 1), Generator("c", 0)]
    script = "sync 0, start 1, join 0, spoil 9, start 2, join 0, spoil 8, sync 3"
    steps, notes = sync(tmp_path, generators, script, method=method, **layout)
    for name in "abc":
        assert versions(notes[name]) == [0, 1, 2, 3]
    assert steps[2].announced == (1,) and steps[5].announced == (1, 2)
    assert steps[2].held == dict.fromkeys("abc", 1) and steps[-1].held == dict.fromkeys("abc", 3)
    # The row of a step has the weight sync that was joined in it. Files differ a little in size.
    wire_mb = pytest.approx(steps[0].metrics["weight_sync/wire_mb"], rel=0.1)
    assert steps[4].metrics["weight_sync/wire_mb"] == wire_mb
    # Version 2 was joined, and 3 waited for, since the row before.
    assert steps[-1].metrics["weight_sync/wire_mb"] / 2 == wire_mb


def test_the_trainer_goes_on_while_a_generator_is_slow_and_waits_at_the_join(
    tmp_path: Path,
) -> None:
    # Step 1 is over before its weights can arrive: a start that waited would end at a deadline.
    generators = [Generator("a", 1, ({1: "dawdle receive 1"},)), Generator("b", 1)]
    script = "sync 0, start 1, join 0, start 2, told 2, join 0"
    steps, notes = sync(tmp_path, generators, script, tensor=2)
    assert steps[1].announced == () and steps[1].seconds < SLACK_S
    assert steps[2].announced == (1,) and steps[2].held == {"a": 1, "b": 1}
    # The weights travel before the join, which finds that they have.
    assert steps[4].announced == (1, 2) and all(step.failed == {} for step in steps)
    assert versions(notes["a"]) == versions(notes["b"]) == [0, 1, 2]


@pytest.mark.parametrize("fault", ["die transfer", "stop reading", "damage"])
def test_a_fault_during_the_overlap_harms_no_other_generator(tmp_path: Path, fault: str) -> None:
    generators = [Generator("a", 2, ({1: fault, 2: fault},)), Generator("b", 1), Generator("c", 1)]
    script = "sync 0, start 1, rest 0.1, join 0, spoil 7, start 2, join 0"
    options = {"tensor": 2, "data": 2, "grace_s": 5}
    steps, notes = sync(tmp_path, generators, script, **options)
    assert list(steps[3].failed) == ["a"] and steps[3].held == {"b": 1, "c": 1}
    assert steps[3].seconds < SLACK_S
    assert steps[-1].held in ({"b": 2, "c": 2}, {"a": 2, "b": 2, "c": 2})
    for name in "bc":
        assert versions(notes[name]) == [0, 1, 2]
    # What the optimizer step changed under a transfer that was given up is never served.
    assert [version for version in versions(notes["a"]) if version >= 0] in ([0], [0, 2])


def test_with_no_generator_left_the_join_waits_for_one(tmp_path: Path) -> None:
    generators = [Generator("a", 1, ({1: "die pause"}, {}))]
    script = "sync 0, start 1, join 0, start 2, join 0"
    steps, notes = sync(tmp_path, generators, script)
    assert steps[2].held == {"a": 1} and steps[2].announced == (1,)
    assert [version for version in versions(notes["a"]) if version >= 0] == [0, 1, 2]


def test_the_first_version_of_a_generator_is_waited_for(tmp_path: Path) -> None:
    late = Generator("late", 1, ({0: "dawdle receive", 1: "dawdle receive 3"},), starts_after=0)
    script = "sync 0, meet 2, start 1, start 2, join 0"
    steps, notes = sync(tmp_path, [Generator("a", 1), late], script)
    assert steps[2].seconds >= DAWDLE_S and steps[2].announced == (1,)
    assert steps[2].held == {"a": 1, "late": 1}
    # The next one is not.
    assert steps[3].seconds < SLACK_S and steps[-1].held == {"a": 2, "late": 2}
    assert versions(notes["late"]) == [1, 2]


def test_a_generator_that_comes_during_the_overlap_is_admitted_after_it(tmp_path: Path) -> None:
    generators = [Generator("a", 1), Generator("late", 1, starts_after=1)]
    script = "sync 0, start 1, admit 2, start 2, join 0"
    steps, notes = sync(tmp_path, generators, script)
    assert steps[2].held == {"a": 1, "late": 1} and steps[2].announced == (1,)
    assert versions(notes["a"]) == [0, 1, 2] and versions(notes["late"]) == [1, 2]
