"""Full tensors to generators by broadcast and by way of a folder; see `peers.py`."""

from pathlib import Path

import pytest

from tests.weights.plays import SLACK_S, sync, versions
from tests.weights.scripted_generators import Generator

METHODS = {"broadcast": "bucket", "disk": "load"}


@pytest.mark.parametrize("method", METHODS)
def test_two_generators_get_every_version(tmp_path: Path, method: str) -> None:
    generators = [Generator("a", 0), Generator("b", 0)]
    script = "sync 0, sync 1, sync 2"
    steps, notes = sync(tmp_path, generators, script, tensor=2, method=method)
    assert versions(notes["a"]) == versions(notes["b"]) == [0, 1, 2]
    assert [step.failed for step in steps] == [{}, {}, {}]
    folders = sorted(path.name for path in tmp_path.glob("weights/*"))
    assert folders == (["version_000001", "version_000002"] if method == "disk" else [])


@pytest.mark.parametrize(("method", "occasion"), METHODS.items())
def test_a_generator_that_fails_is_dropped_alone_and_comes_back(
    tmp_path: Path, method: str, occasion: str
) -> None:
    generators = [Generator("a", 0, ({1: f"fail {occasion}"},)), Generator("b", 0)]
    script = "sync 0, sync 1, admit 2, sync 2"
    steps, notes = sync(tmp_path, generators, script, tensor=2, method=method)
    assert f"scripted failure of {occasion}" in steps[1].failed["a"]
    assert steps[1].held == {"b": 1} and steps[1].seconds < SLACK_S
    assert versions(notes["a"]) == [0, -1, 1, 2] and versions(notes["b"]) == [0, 1, 2]
    assert steps[-1].metrics["weight_sync/dropped_generators"] == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("occasion", ["pause", "work"])
def test_a_generator_that_is_killed_costs_one_deadline(
    tmp_path: Path, method: str, occasion: str
) -> None:
    fault = f"die {METHODS[method] if occasion == 'work' else occasion}"
    generators = [Generator("a", 0, ({1: fault},)), Generator("b", 0)]
    script = "sync 0, sync 1, sync 2"
    steps, notes = sync(tmp_path, generators, script, tensor=2, method=method, deadline_s=1.5)
    assert list(steps[1].failed) == ["a"] and steps[1].seconds < 1.5 + SLACK_S
    assert versions(notes["b"]) == [0, 1, 2] and steps[-1].held == {"b": 2}


def test_a_folder_that_another_training_phase_left_is_written_anew(tmp_path: Path) -> None:
    old = tmp_path / "weights" / "version_000000"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(b"old")
    _, notes = sync(tmp_path, [Generator("a", 0)], "sync 0", method="disk")
    assert versions(notes["a"]) == [0]
