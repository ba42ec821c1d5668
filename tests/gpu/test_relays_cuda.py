"""Versions that generators pass on to each other over NCCL; a row of docs/gpu-evidence.md.

The syncer, weight clients and engine ranks are the product's; all processes share one GPU.
`sync` compares every element that a generator serves with the version's.
"""

from pathlib import Path

import pytest

from tests.weights.plays import sync, versions
from tests.weights.scripted_generators import Generator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
OPTIONS = {"method": "nccl", "relays": True, "is_concurrent": False, "deadline_s": 20}


def test_generators_pass_versions_on_over_nccl(tmp_path: Path) -> None:
    generators = [Generator(name, device="cuda") for name in "abc"]
    script = "sync 0, sync 1, sync 2"
    steps, notes = sync(tmp_path, generators, script, **OPTIONS)
    for version, step in enumerate(steps):
        assert step.sources["c"] == "a" and step.metrics["weight_sync/relayed"] == 1
        assert step.failed == step.passed_over == {}
        assert step.held == dict.fromkeys("abc", version)
    assert all(versions(notes[name]) == [0, 1, 2] for name in "abc")


def test_whom_a_generator_fails_over_nccl_the_trainer_serves(tmp_path: Path) -> None:
    lives = ({1: "fail passing"}, {})
    generators = [Generator("a", 1, lives, device="cuda")]
    generators += [Generator(name, device="cuda") for name in "bc"]
    script = "sync 0, sync 1, admit 3, sync 2"
    steps, notes = sync(tmp_path, generators, script, **OPTIONS)
    assert list(steps[1].failed) == ["a"] and list(steps[1].passed_over) == ["c"]
    assert steps[-1].held == dict.fromkeys("abc", 2)
    assert versions(notes["b"]) == versions(notes["c"]) == [0, 1, 2]
