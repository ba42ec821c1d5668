"""Which steps of a run can be repeated, from which checkpoint, and what counts as a difference."""

import contextlib
import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli.replay import show_steps
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.launcher.replay import (
    Replay,
    compare_steps,
    differences,
    find_config,
    find_replay,
    place_rebuilt,
    step_rows,
)
from megatron_rl.launcher.run_folder import CONFIG, write_config
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.stored_batches import BATCHES, state_name
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


@pytest.mark.parametrize(("first", "last"), [(4, 5), (10, 11), (1, 1)])
def test_steps_without_batch_or_checkpoint_are_refused_and_the_possible_ones_named(
    tmp_path: Path, first: int, last: int
) -> None:
    run_dir = run_with(tmp_path / "run", [*range(4, 10)], [4, 8])
    with pytest.raises(InputError, match="Steps that can be: 5 to 10"):
        find_replay(run_dir, first, last, None, ())
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="Steps that can be: none"):
        find_replay(tmp_path / "empty", 1, 1, None, ())


def test_a_last_step_before_the_first_is_named(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", [*range(4, 10)], [4, 8])
    with pytest.raises(InputError, match="the last step 5 is before the first, 8: give --to 8"):
        find_replay(run_dir, 8, 5, None, ())


@pytest.mark.parametrize(("first", "trained_from"), [(2, 1), (5, 5), (8, 5), (9, 9)])
def test_steps_since_the_checkpoint_are_trained_too(
    tmp_path: Path, first: int, trained_from: int
) -> None:
    run_dir = run_with(tmp_path / "run", [*range(10)], [4, 8])
    assert find_replay(run_dir, first, first, None, ()).trained_from == trained_from


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", [0], [])
    for name in ("replay_000001", "replay_000001_2", "replay_000001_3"):
        assert find_replay(run_dir, 1, 1, None, ()).out == run_dir / name
        (run_dir / name).mkdir()
    with pytest.raises(InputError, match="replay_000001_2 exists: remove it, or .* by --out"):
        find_replay(run_dir, 1, 1, run_dir / "replay_000001_2", ())


def test_figures_of_the_machine_are_no_difference() -> None:
    old = {"train/loss": 0.5, "train/update_s": 1.0, "train/mfu": 0.1, "queue/x": 1, "step": 3}
    new = {"train/loss": 0.5, "train/update_s": 2.0, "train/mfu": 0.2, "queue/x": 2, "step": 3}
    assert differences(old, new) == {}
    assert differences(old, new | {"train/loss": 0.25}) == {"train/loss": (0.5, 0.25)}


def test_steps_that_were_skipped_alike_are_equal() -> None:
    nan = float("nan")
    old, new = ({"train/loss": nan, "train/grad_norm": float(g), "step": 3} for g in ("nan", "inf"))
    assert differences(old, {**old, "train/loss": float("nan")}) == {}
    assert list(differences(old, new)) == ["train/grad_norm"]
    assert list(differences(old, {**old, "train/loss": 0.5})) == ["train/loss"]


def test_a_step_that_the_run_did_not_finish_is_shown_and_not_compared(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", [4, 5, 6], [4])
    found = find_replay(run_dir, 5, 7, None, ())
    # The killed run had the batch of step 7, and wrote no row of it.
    write_losses(run_dir, {5: 0.1, 6: 0.2})
    write_losses(found.out, {5: 0.1, 6: 0.3, 7: 0.4})
    steps = compare_steps(found, step_rows(found.out, found))
    assert [one.differences for one in steps] == [{}, {"train/loss": (0.2, 0.3)}, None]
    screen = io.StringIO()
    show_steps(Console(file=screen, width=120), steps)
    lines = [line.split() for line in screen.getvalue().splitlines()]
    assert ["7", "train/loss", "-", "0.4"] in lines
    assert "1 of 2 steps equal the recorded ones in all their figures".split() in lines
    assert "Not compared without a recorded row: 7".split() in lines


def write_losses(folder: Path, losses: dict[int, float]) -> None:
    with contextlib.closing(JsonlWriter(folder / "metrics.jsonl", "trainer")) as writer:
        for step, loss in losses.items():
            writer.write(step, {"train/loss": loss})


def test_only_a_lost_checkpoint_with_a_state_of_the_queue_is_rebuilt(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "run", [*range(4, 10)], [4])
    for step in (4, 8):
        (run_dir / BATCHES / state_name(step)).touch()
    assert find_replay(run_dir, 5, 8, None, (), rebuilds=True).rebuilds
    with pytest.raises(InputError, match="step 7 cannot be rebuilt"):
        find_replay(run_dir, 5, 7, None, (), rebuilds=True)
    make_checkpoint(run_dir, 8)
    with pytest.raises(InputError, match="remove checkpoints/step_000008 if it is damaged"):
        find_replay(run_dir, 5, 8, None, (), rebuilds=True)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_checkpoint_whose_figures_differ_stays_outside_the_run(
    tmp_path: Path, is_equal: bool
) -> None:
    run_dir, out = run_with(tmp_path / "run", [], []), tmp_path / "out"
    torn = run_dir / CHECKPOINTS / "step_000008"
    torn.mkdir(parents=True)
    make_checkpoint(out, 8)
    where = place_rebuilt(Replay(run_dir, None, 5, 8, 1, out, rebuilds=True), is_equal=is_equal)
    assert where == (torn if is_equal else out / CHECKPOINTS / "step_000008")
    assert complete_checkpoints(where.parent) == {8: where}
    assert (8 in complete_checkpoints(run_dir / CHECKPOINTS)) == is_equal
    assert (out / CHECKPOINTS).exists() != is_equal


def resumes(run_dir: Path, *starts: tuple[int, str]) -> None:
    """Each start resumes after a step, with these overrides, as the launcher does."""
    for step, given in starts:
        resumed = run_dir / CHECKPOINTS / f"step_{step:06d}" if step else None
        if resumed is not None and not resumed.exists():
            make_checkpoint(run_dir, step)
        write_config(load_config(None, [f"run.dir={run_dir}", *given.split()]), resumed)


def spanning(run_dir: Path, trained_from: int, last: int, *given: str) -> Replay:
    return Replay(run_dir, None, last, last, trained_from, run_dir / "out", given)


def test_steps_have_the_configuration_under_which_they_were_trained(tmp_path: Path) -> None:
    linear = "optimizer.lr_schedule=linear train.steps="
    resumes(tmp_path, (0, f"{linear}10"), (10, f"{linear}20"))
    assert load_config(find_config(spanning(tmp_path, 9, 10))).train.steps == 10
    assert load_config(find_config(spanning(tmp_path, 11, 12))).train.steps == 20
    with pytest.raises(
        InputError, match=r"to step 10 .*differ in train.steps: give steps up to 10"
    ):
        find_config(spanning(tmp_path, 10, 11))
    same = find_config(spanning(tmp_path, 10, 11, "train.steps=20"))
    assert same == tmp_path / CONFIG


def test_a_span_over_configurations_that_train_alike_is_repeated(tmp_path: Path) -> None:
    resumes(tmp_path, (0, "train.steps=10"), (4, "train.steps=20 eval.every_steps=3"),
            (8, "train.steps=20 optimizer.lr=0.5"))  # fmt: skip
    assert load_config(find_config(spanning(tmp_path, 3, 6))).eval.every_steps == 3
    with pytest.raises(InputError, match=r"differ in optimizer\.lr: "):
        find_config(spanning(tmp_path, 3, 9))
    assert find_config(spanning(tmp_path, 3, 9, "optimizer.lr=0.1")) == tmp_path / CONFIG


def test_steps_that_an_older_checkpoint_repeats_have_its_configuration(tmp_path: Path) -> None:
    rates = [0.1, 0.2, 0.3]
    starts = zip([0, 10, 6], rates, strict=True)
    resumes(tmp_path, *((step, f"optimizer.lr={rate}") for step, rate in starts))

    def rate(step: int) -> float:
        return load_config(find_config(spanning(tmp_path, step, step))).optimizer.lr

    assert [rate(step) for step in (1, 6, 7, 10, 11)] == [0.1, 0.1, 0.3, 0.3, 0.3]
    # Steps 7 to 10 now have the third configuration, whose place the first one takes.
    resumes(tmp_path, (10, "optimizer.lr=0.4"))
    assert [rate(step) for step in (1, 11)] == [0.1, 0.4]
    with pytest.raises(InputError, match=r"steps 7 to 10 was not kept"):
        rate(7)
