"""A grid over the plane: written in parts, evaluated elsewhere, collected."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.analysis.checkpoints import find_checkpoints, open_checkpoints
from megatron_rl.analysis.grid import (
    Grid,
    PointFormat,
    collect_grid,
    plan_grid,
    points_left,
    read_figures,
    read_grid,
    write_grid,
)
from megatron_rl.analysis.principal import gram_matrix, principal_directions
from megatron_rl.analysis.results import (
    Analysis,
    WeightsResult,
    read_analysis,
    to_json,
    weights_result,
)
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import write_whole
from tests.analysis.planted import plant, read_vector

CORNERS = [(0.0, 0.0), (4.0, 0.0), (0.0, 2.0), (4.0, 2.0)]


def analysed(folders: list[Path]) -> WeightsResult:
    found = find_checkpoints(folders)
    with open_checkpoints(found) as opened:
        gram = gram_matrix(opened, "mean")
        return weights_result(
            found, gram, principal_directions(gram, "mean"), centre="mean",
            parameters=opened.parameters,
        )  # fmt: skip


def write(
    weights: WeightsResult, grid: Grid, folder: Path, at_most: int | None = None
) -> list[str]:
    form = PointFormat()
    return list(write_grid(weights, grid, folder, form, at_most=at_most))


def evaluation(reward: float, accuracy: float, length: float) -> str:
    figures = {"reward": reward, "accuracy": accuracy, "length_tokens": length}
    held = {name: {"value": value, "se": 0.1, "problems": 9} for name, value in figures.items()}
    return json.dumps({"sets": {"aime": {**held, "problems": 9}}, "label": "x"})


def test_points_lie_where_the_grid_says_and_a_killed_writing_goes_on(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, CORNERS)
    weights = analysed(folders)
    # What is written as JSON and read again gives the same points.
    write_whole(tmp_path / "analysis.json", to_json(Analysis(weights=weights)))
    weights = read_analysis(tmp_path).weights
    assert weights is not None
    grid = plan_grid(weights, 3, 0.25, None)
    target = tmp_path / "grid"
    assert write(weights, grid, target, 2) == ["point_00_00", "point_00_01"]
    assert len(points_left(grid, target)) == 7
    # Evaluated, and its weights removed: it is not written again.
    shutil.rmtree(target / "point_00_00")
    (target / "point_00_00").mkdir()
    assert len(write(weights, grid, target)) == 7
    assert write(weights, grid, target) == []
    vectors = np.stack([read_vector(folder).numpy() for folder in folders])
    directions = weights.principal.combinations[:2] @ vectors
    extent = np.ptp(weights.principal.coordinates, axis=0)
    for point in read_grid(target).points[1:]:
        assert point.rounding is not None and point.rounding < 1e-3
        place = directions @ (read_vector(target / point.name).numpy() - vectors.mean(axis=0))
        np.testing.assert_allclose(place, (point.first, point.second), atol=point.rounding + 1e-9)
    assert np.ptp(grid.first) == pytest.approx(1.5 * extent[0])
    assert np.ptp(grid.second) == pytest.approx(1.5 * extent[1])
    with pytest.raises(InputError, match="another grid"):
        write(weights, plan_grid(weights, 4, 0.25, None), target)


def test_figures_of_points_are_collected_and_missing_ones_named(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, CORNERS)
    weights = analysed(folders)
    grid = plan_grid(weights, 2, 0.0, None)
    target = tmp_path / "grid"
    write(weights, grid, target)
    with pytest.raises(InputError, match="no point of .* is evaluated"):
        collect_grid(target, weights, None)
    (target / "point_00_01" / "eval.json").write_text(evaluation(0.5, 0.4, 321.0))
    (target / "point_01_00" / "eval").mkdir()
    (target / "point_01_00" / "eval" / "eval.json").write_text(evaluation(0.7, 0.6, 654.0))
    found = collect_grid(target, weights, None)
    assert (found.set_name, found.missing) == ("aime", ["point_00_00", "point_01_01"])
    assert [p.figures.length_tokens.value for p in found.points] == [321.0, 654.0]
    first, second = found.points
    assert (first.row, first.column, first.figures.reward.value) == (0, 1, 0.5)
    assert (first.first, first.second) == (grid.first[1], grid.second[0])
    assert (second.first, second.second) == (grid.first[0], grid.second[1])
    with pytest.raises(InputError, match="has the sets aime: choose"):
        collect_grid(target, weights, "gpqa")
    with pytest.raises(InputError, match="other directions"):
        collect_grid(target, analysed(folders[:3]), None)


def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    for text in ("{", '{"sets": {"a": {"reward": {"value": 1}}}}', "{}"):
        path.write_text(text)
        with pytest.raises(InputError, match="is not an evaluation"):
            read_figures(path, None)
    path.write_text('{"sets": {}}')
    with pytest.raises(InputError, match=r"has the sets \(none\)"):
        read_figures(path, None)
    with pytest.raises(InputError, match="cannot read"):
        read_grid(tmp_path)


def test_checkpoints_on_a_line_give_no_grid(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, [(0.0,), (1.0,), (3.0,)])
    with pytest.raises(InputError, match="span no plane"):
        plan_grid(analysed(folders), 3, 0.25, None)


def test_sections_say_what_the_checkpoints_are(tmp_path: Path) -> None:
    folders, planted = plant(tmp_path, CORNERS)
    weights = analysed(folders)
    length = float(planted[0].norm())
    assert weights.checkpoints[1].from_first == pytest.approx(4 * length, rel=1e-9)
    assert weights.checkpoints[0].from_previous is None
    assert weights.checkpoints[1].step_cosine is None
    vectors = [read_vector(folder) for folder in folders]
    steps = [after - before for before, after in zip(vectors, vectors[1:], strict=False)]
    cosine = float(steps[0] @ steps[1] / steps[0].norm() / steps[1].norm())
    assert weights.checkpoints[2].step_cosine == pytest.approx(cosine)
    assert max(one.off_plane for one in weights.checkpoints) < 1e-6
    assert weights.parameters == len(vectors[0])
