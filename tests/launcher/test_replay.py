"""Which steps of a run can be repeated, from which checkpoint, and what counts as a difference."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.launcher.replay import differences, find_replay
from megatron_rl.protocol.stored_batches import BATCHES
from tests.launcher.test_run_folder import make_checkpoint


def run_with(folder: Path, batches: list[int], checkpoints: list[int]) -> Path:
    (folder / BATCHES).mkdir(parents=True)
    for step in batches:
        (folder / BATCHES / f"{step:06d}.batch").touch()
    for step in checkpoints:
        make_checkpoint(folder, step)
    return folder


@pytest.mark.parametrize(
    ("first", "last", "checkpoint"), [(5, 5, 4), (8, 8, 4), (5, 10, 4), (9, 10, 8), (10, 10, 8)]
)
def test_a_replay_begins_at_the_newest_checkpoint_before_it(
    tmp_path: Path, first: int, last: int, checkpoint: int
) -> None:
    run_dir = run_with(tmp_path / "run", [*range(4, 10)], [4, 8])
    found = find_replay(run_dir, first, last, None, ())
    assert found.checkpoint is not None and found.checkpoint.name == f"step_{checkpoint:06d}"
    assert (found.first, found.last, found.out) == (first, last, run_dir / f"replay_{first:06d}")


def test_a_replay_of_first_steps_begins_at_the_start_of_training(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", [0, 1, 2], [])
    assert find_replay(run_dir, 2, 3, None, ()).checkpoint is None


@pytest.mark.parametrize(("first", "last"), [(4, 5), (10, 11), (6, 5), (1, 1)])
def test_steps_without_batch_or_checkpoint_are_refused_and_the_possible_ones_named(
    tmp_path: Path, first: int, last: int
) -> None:
    run_dir = run_with(tmp_path / "run", [*range(4, 10)], [4, 8])
    with pytest.raises(InputError, match="Steps that can be: 5 to 10"):
        find_replay(run_dir, first, last, None, ())
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="Steps that can be: none"):
        find_replay(tmp_path / "empty", 1, 1, None, ())


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", [0], [])
    (run_dir / "replay_000001").mkdir()
    with pytest.raises(InputError, match="--out"):
        find_replay(run_dir, 1, 1, None, ())


def test_figures_of_the_machine_are_no_difference() -> None:
    old = {"train/loss": 0.5, "train/update_s": 1.0, "train/mfu": 0.1, "queue/x": 1, "step": 3}
    new = {"train/loss": 0.5, "train/update_s": 2.0, "train/mfu": 0.2, "queue/x": 2, "step": 3}
    assert differences(old, new) == {}
    assert differences(old, new | {"train/loss": 0.25}) == {"train/loss": (0.5, 0.25)}
