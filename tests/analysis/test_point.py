"""Models at points of the plane: read back, they are where they should be."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.analysis.checkpoints import find_checkpoints, open_checkpoints
from megatron_rl.analysis.grid import PointFormat, write_point
from megatron_rl.analysis.principal import Centre, gram_matrix, principal_directions
from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.conversion import Request, convert
from tests.analysis.planted import plant, read_vector

SMALL = PointFormat(shard_bytes=1 << 14, chunk_bytes=1 << 14)
TRIANGLE = [(0.0, 0.0), (2.0, 0.5), (1.0, 3.0)]
FIVE = [(0.0, 0.0, 0.0), (1.0, 0.5, 0.1), (2.0, -0.5, 0.2), (3.0, 0.5, -0.1), (4.0, 0.0, 0.3)]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centre", ["mean", "first"])
def test_three_checkpoints_are_reproduced_bit_for_bit(
    tmp_path: Path, centre: Centre, dtype: torch.dtype
) -> None:
    folders, _ = plant(tmp_path, TRIANGLE, dtype=dtype)
    found = find_checkpoints(folders)
    with open_checkpoints(found) as opened:
        principal = principal_directions(gram_matrix(opened, centre), centre)
        assert principal.coordinates.shape == (3, 2)
        for number, folder in enumerate(folders):
            made = tmp_path / f"made_{number}"
            weights = principal.weights_of(principal.coordinates[number])
            rounding = write_point(opened, found[0], weights, made, SMALL)
            # float64's own error, in all values together.
            assert rounding < 1e-9
            expected, written = tensors_of(folder), tensors_of(made)
            assert written.keys() == expected.keys()
            for name, tensor in expected.items():
                assert written[name].dtype == dtype
                assert torch.equal(written[name], tensor), name
            for file in folder.glob("*.json"):
                if "index" not in file.name:
                    assert (made / file.name).read_text() == file.read_text()


def test_more_checkpoints_are_reproduced_within_their_residual(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, FIVE, dtype=torch.float32)
    found = find_checkpoints(folders)
    with open_checkpoints(found) as opened:
        principal = principal_directions(gram_matrix(opened, "mean"), "mean")
        residuals = principal.residuals(2)
        assert residuals.max() > 1
        for number, folder in enumerate(folders):
            made = tmp_path / f"made_{number}"
            point = principal.coordinates[number, :2]
            rounding = write_point(opened, found[0], principal.weights_of(point), made, SMALL)
            distance = float((read_vector(made) - read_vector(folder)).norm())
            # Rounding moves the point by its norm, in any direction.
            assert abs(distance - residuals[number]) <= rounding + 1e-9
            assert 0 < rounding < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_to_the_nearest_and_its_norm_is_told(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folders, _ = plant(tmp_path, TRIANGLE)
    found = find_checkpoints(folders)
    weights = np.array([0.3, 0.5, 0.2])
    with open_checkpoints(found) as opened:
        rounding = write_point(
            opened, found[0], weights, tmp_path / "made", PointFormat(dtype, 1 << 14, 1 << 14)
        )
    vectors = [read_vector(folder) for folder in folders]
    exact = sum(w * v for w, v in zip(weights, vectors, strict=True))
    written = read_vector(tmp_path / "made")
    error = (written - exact).abs()
    # Half the distance of neighbours: 2^-9 of a value in bfloat16, 2^-25 in float32, with 8 and 24
    # bits; a power of two above it is its binade.
    bits = {torch.bfloat16: 8, torch.float32: 24}[dtype]
    binade = torch.exp2(torch.floor(torch.log2(exact.abs())))
    assert (error <= binade * 2.0**-bits * (1 + 1e-6)).all()
    assert rounding == pytest.approx(float(error.norm()), rel=1e-6)
    assert f'"dtype": "{str(dtype)[6:]}"' in (tmp_path / "made" / "config.json").read_text()


def test_a_point_of_megatron_checkpoints_is_a_hugging_face_folder(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, TRIANGLE[:2])
    for number, folder in enumerate(folders):
        convert(Request(folder, tmp_path / f"megatron_{number}"), lambda done, total: None)
    weights = np.array([0.25, 0.75])
    made = []
    for name, inputs in (
        ("a", folders),
        ("b", [tmp_path / "megatron_0", tmp_path / "megatron_1"]),
    ):
        found = find_checkpoints(inputs)
        with open_checkpoints(found) as opened:
            write_point(opened, found[0], weights, tmp_path / name)
        made.append(tmp_path / name)
    assert torch.equal(read_vector(made[0]), read_vector(made[1]))
    assert (made[1] / "config.json").is_file()


def test_a_point_beyond_the_range_of_its_dtype_leaves_nothing(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, TRIANGLE, dtype=torch.float16)
    found = find_checkpoints(folders)
    with open_checkpoints(found) as opened:
        with pytest.raises(InputError, match="beyond the range of torch.float16"):
            write_point(opened, found[0], np.array([2e4, 1 - 2e4, 0.0]), tmp_path / "far", SMALL)
        assert not list(tmp_path.glob("far*"))
        with pytest.raises(InputError, match="exists already"):
            write_point(opened, found[0], np.ones(3) / 3, folders[0])
