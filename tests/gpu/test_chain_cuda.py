"""Engines hand a version on to each other over NCCL; a row of docs/gpu-evidence.md.

The syncer, weight clients and engine ranks are the product's; all processes share one GPU.
`sync` compares every element that a generator serves with the version's.
"""

from pathlib import Path

import pytest

from tests.weights.plays import sync, versions
from tests.weights.scripted_generators import Generator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
OPTIONS = {"method": "nccl", "deadline_s": 20, "grace_s": 5}


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}])
def test_generators_hand_versions_on_over_nccl(tmp_path: Path, layout: dict[str, int]) -> None:
    generators = [Generator(name, 2, device="cuda") for name in "abc"]
    script = "sync 0, sync 1, sync 2"
    steps, notes = sync(tmp_path, generators, script, **OPTIONS, **layout)
    for version, step in enumerate(steps):
        assert step.failed == {} and step.metrics["weight_sync/damaged_parcels"] == 0
        assert step.held == dict.fromkeys("abc", version)
    assert all(versions(notes[name]) == [0, 1, 2] for name in "abc")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_dies_in_a_transfer_over_nccl_harms_no_other(tmp_path: Path, place: int) -> None:
    lives = ({1: "die transfer"}, {})
    generators = [
        Generator(name, 1, lives if number == place else ({},), device="cuda")
        for number, name in enumerate("abc")
    ]
    script = "sync 0, sync 1, admit 3, sync 2"
    steps, notes = sync(tmp_path, generators, script, **OPTIONS)
    assert list(steps[1].failed) == ["abc"[place]]
    assert steps[-1].held == dict.fromkeys("abc", 2)
    for number, name in enumerate("abc"):
        if number != place:
            assert versions(notes[name]) == [0, 1, 2]
