"""Principal directions of checkpoints: planted ones are found, and figures equal brute force."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.linalg import subspace_angles

from megatron_rl.analysis.checkpoints import Checkpoint, find_checkpoints, open_checkpoints
from megatron_rl.analysis.principal import (
    Centre,
    Principal,
    distances,
    gram_matrix,
    principal_directions,
    random_walk_explained,
    step_cosines,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.protocol.checkpoint_folder import folder_name, seal
from megatron_rl.weights.folders.conversion import Request, convert
from tests.analysis.planted import plant, read_vector
from tests.tiny_models import write_model
from tests.weights.folders.test_mistral_format import write_mistral

PLANE = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5), (2.5, 1.5), (4.0, 1.0)]


def analyse(folders: list[Path], centre: Centre, chunk_bytes: int = 1 << 14) -> Principal:
    with open_checkpoints(find_checkpoints(folders)) as opened:
        return principal_directions(gram_matrix(opened, centre, chunk_bytes=chunk_bytes), centre)


@pytest.mark.parametrize("centre", ["mean", "first"])
def test_a_planted_plane_is_recovered(tmp_path: Path, centre: Centre) -> None:
    folders, planted = plant(tmp_path, PLANE)
    assert len(list(folders[0].glob("model-*.safetensors"))) > 3
    found = analyse(folders, centre)
    weights = torch.stack([read_vector(folder) for folder in folders]).numpy()
    directions = found.combinations @ weights
    assert directions.shape == planted.shape
    angle = subspace_angles(directions.T, planted.numpy().T).max()
    print(f"largest principal angle {angle:.2e} rad")
    assert angle < 1e-6
    np.testing.assert_allclose(directions @ directions.T, np.eye(2), atol=1e-9)
    np.testing.assert_allclose(found.coordinates @ directions, weights - found.centre @ weights,
                               atol=1e-9)  # fmt: skip


def test_a_plane_is_recovered_from_rounded_weights(tmp_path: Path) -> None:
    # bfloat16 holds 8 bits: what is added by rounding is no part of the plane.
    folders, planted = plant(tmp_path, PLANE, dtype=torch.bfloat16)
    found = analyse(folders, "mean")
    weights = torch.stack([read_vector(folder) for folder in folders]).numpy()
    directions = found.combinations[:2] @ weights
    assert len(found.combinations) == 4
    # Values of 64 to 128 are rounded to multiples of 1/2; displacements are of about 5.
    assert 1e-6 < subspace_angles(directions.T, planted.numpy().T).max() < 0.05


@pytest.mark.parametrize("centre", ["mean", "first"])
def test_figures_equal_those_of_a_singular_value_decomposition(
    tmp_path: Path, centre: Centre
) -> None:
    folders, _ = plant(tmp_path, [*PLANE, (-1.0, 3.0)])
    weights = torch.stack([read_vector(folder) for folder in folders]).numpy()
    moved = weights - (weights.mean(axis=0) if centre == "mean" else weights[0])
    values = np.linalg.svd(moved, compute_uv=False)
    found = analyse(folders, centre)
    np.testing.assert_allclose((found.coordinates**2).sum(axis=0), values[:2] ** 2, rtol=1e-12)
    np.testing.assert_allclose(found.explained, values[:2] ** 2 / (values**2).sum(), rtol=1e-9)


def test_the_size_of_chunks_does_not_matter(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, PLANE)
    with open_checkpoints(find_checkpoints(folders)) as opened:
        by_row = gram_matrix(opened, "mean", chunk_bytes=1)
        at_once = gram_matrix(opened, "mean")
    # Integers over 64 * 5: what differs is the rounding of sums.
    np.testing.assert_allclose(by_row, at_once, rtol=1e-12)


def test_distances_and_cosines_of_a_path_by_hand() -> None:
    weights = np.array([[0.0, 0.0], [3.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    gram = weights @ weights.T
    np.testing.assert_allclose(distances(gram)[0], [0, 3, 5, 0], atol=1e-12)
    np.testing.assert_allclose(step_cosines(gram), [0.0, -0.8], atol=1e-12)


def test_a_direction_points_to_where_the_path_ends() -> None:
    weights = np.array([[0.0, 0.0], [-3.0, 1.0], [-7.0, -1.0]])
    found = principal_directions(weights @ weights.T, "first")
    assert (found.coordinates[-1] > 0).all()


def test_points_are_combinations_that_add_up_to_one() -> None:
    weights = np.random.default_rng(0).normal(size=(4, 9))
    moved = weights - weights.mean(axis=0)
    found = principal_directions(moved @ moved.T, "mean")
    mixed = found.weights_of((0.7, -1.2))
    assert mixed.sum() == pytest.approx(1)
    directions = found.combinations @ weights
    np.testing.assert_allclose(
        mixed @ weights, weights.mean(axis=0) + 0.7 * directions[0] - 1.2 * directions[1]
    )
    beyond = moved - (moved @ directions[:2].T) @ directions[:2]
    np.testing.assert_allclose(found.residuals(2), np.linalg.norm(beyond, axis=1), atol=1e-9)


def test_a_random_walk_explains_what_is_known_of_it() -> None:
    walk = np.cumsum(np.random.default_rng(2).normal(size=(20, 200_000)), axis=0)
    walk -= walk.mean(axis=0)
    measured = np.linalg.eigvalsh(walk @ walk.T)[:0:-1]
    expected = random_walk_explained(20, "mean")
    np.testing.assert_allclose(measured / measured.sum(), expected, rtol=0.02)
    # Of many checkpoints, 6 / pi^2 (arXiv 1806.08805).
    assert random_walk_explained(500, "mean")[0] == pytest.approx(6 / np.pi**2, abs=1e-3)


def test_a_megatron_checkpoint_counts_as_the_folder_that_it_was_made_from(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, PLANE[:3])
    convert(Request(folders[1], tmp_path / "megatron"), lambda done, total: None)
    mixed = [folders[0], tmp_path / "megatron", folders[2]]
    with open_checkpoints(find_checkpoints(mixed), tmp_path) as opened:
        found = gram_matrix(opened, "mean", chunk_bytes=1 << 14)
    with open_checkpoints(find_checkpoints(folders)) as opened:
        np.testing.assert_array_equal(found, gram_matrix(opened, "mean", chunk_bytes=1 << 14))


def test_a_folder_in_mistral_format_counts_as_the_same_model(tmp_path: Path) -> None:
    write_mistral(tmp_path / "mistral", tmp_path / "hf", files=2)
    found = find_checkpoints([tmp_path / "hf", tmp_path / "mistral"])
    with open_checkpoints(found, tmp_path) as opened:
        np.testing.assert_array_equal(gram_matrix(opened, "first"), np.zeros((2, 2)))


def write_run(folder: Path, models: dict[int, Path], model: Path) -> None:
    """A run of `model` with complete checkpoints."""
    config = Config(model=ModelConfig(path=model))
    for step, source in models.items():
        made = folder / "converted"
        convert(Request(source, made), lambda done, total: None)
        (folder / "checkpoints").mkdir(exist_ok=True)
        partial = folder / "checkpoints" / f"{folder_name(step)}.partial"
        (made / "release").rename(partial)
        seal(partial, step, {})
        shutil.rmtree(made)
    (folder / "config.toml").write_text(dump_toml(config))


def test_a_run_stands_for_its_complete_checkpoints(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, PLANE[:3])
    run = tmp_path / "run"
    run.mkdir()
    write_run(run, {10: folders[1], 20: folders[2]}, folders[0])
    (run / "checkpoints" / "step_000030").mkdir()
    for paths in ([folders[0], run], [folders[0], run / "checkpoints"]):
        found = find_checkpoints(paths)
        assert [one.name for one in found] == ["checkpoint_0", "step_000010", "step_000020"]
        with open_checkpoints(found) as opened, open_checkpoints(find_checkpoints(folders)) as same:
            np.testing.assert_array_equal(gram_matrix(opened, "first"), gram_matrix(same, "first"))
    (run / "config.toml").unlink()
    with pytest.raises(InputError, match="--files-from"):
        with open_checkpoints(find_checkpoints([run])):
            pass
    assert find_checkpoints([run], folders[0])[0].files_from == folders[0]


def test_equal_checkpoints_are_refused(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, [(0.0,), (0.0,)])
    with pytest.raises(InputError, match="same weights"):
        analyse(folders, "mean")


def test_checkpoints_of_other_shapes_or_names_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    write_model(tmp_path / "wide", intermediate_size=192)
    write_model(tmp_path / "deep", num_hidden_layers=5)
    with pytest.raises(InputError, match=r"gate_proj.weight has shape \(192, 64\).*\(160, 64\)"):
        analyse([tmp_path / "a", tmp_path / "wide"], "mean")
    for pair in (["a", "deep"], ["deep", "a"]):
        with pytest.raises(InputError, match="a lacks 9 tensors that .*deep has: model.layers.4."):
            analyse([tmp_path / name for name in pair], "mean")


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, PLANE[:2])
    file = sorted(folders[1].glob("*.safetensors"))[0]
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[3] = float("nan")
    save_file(tensors, file)
    with pytest.raises(InputError, match="checkpoint_1: .* not finite"):
        analyse(folders, "mean")


def test_fewer_than_two_or_the_same_twice_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    with pytest.raises(InputError, match="two or more"):
        find_checkpoints([tmp_path / "a"])
    with pytest.raises(InputError, match="twice"):
        find_checkpoints([tmp_path / "a", tmp_path / "a" / ".." / "a"])
    with pytest.raises(InputError, match="no folder"):
        find_checkpoints([tmp_path / "b"])


def test_names_are_paths_where_folders_are_called_alike(tmp_path: Path) -> None:
    for name in ("a/final", "b/final"):
        (tmp_path / name).mkdir(parents=True)
    found = find_checkpoints([tmp_path / "a/final", tmp_path / "b/final"])
    assert [one.name for one in found] == [str(tmp_path / "a/final"), str(tmp_path / "b/final")]
    assert found[0] == Checkpoint(str(tmp_path / "a/final"), tmp_path / "a/final", None)
