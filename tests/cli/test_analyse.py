"""`megatron-rl analyse`: each command adds its section to one report."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_rl.cli.main import main
from tests.analysis.planted import plant
from tests.analysis.test_grid import evaluation
from tests.analysis.test_lengths import SLOPE, write_run

CORNERS = [(0.0, 0.0), (4.0, 0.0), (0.0, 2.0), (4.0, 2.0)]


def colours(png: Path) -> int:
    """Different colours of a picture."""
    image = np.asarray(Image.open(io.BytesIO(png.read_bytes())).convert("RGB"))
    assert min(image.shape[:2]) > 300
    return len(np.unique(image.reshape(-1, 3), axis=0))


def test_three_analyses_make_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders, planted = plant(tmp_path, CORNERS)
    out, grid = tmp_path / "out", tmp_path / "grid"
    assert main(["analyse", "weights", *map(str, folders), "--out", str(out)]) == 0
    for _ in range(2):
        write = ["analyse", "plane", "--out", str(out), "--write", str(grid), "--points", "2"]
        assert main([*write, "--at-most", "3"]) == 0
    assert "0 of 4 points left to write" in capsys.readouterr().out
    for name in ("point_00_00", "point_00_01", "point_01_00"):
        (grid / name / "eval.json").write_text(evaluation(0.5, 0.25, 123.0))
    assert main(["analyse", "plane", "--out", str(out), "--read", str(grid)]) == 0
    write_run(tmp_path / "run", steps=4, noise=0.0)
    assert main(["analyse", "lengths", str(tmp_path / "run"), "--out", str(out)]) == 0

    found = json.loads((out / "analysis.json").read_text())
    assert found["weights"]["checkpoints"][1]["from_first"] == pytest.approx(
        4 * float(planted[0].norm())
    )
    assert sum(found["weights"]["explained"]) == pytest.approx(1)
    assert found["plane"]["missing"] == ["point_01_01"]
    assert found["lengths"]["by_rollout"]["slope"] == pytest.approx(SLOPE, abs=1e-9)
    text = (out / "analysis.md").read_text()
    assert "| point_00_01 |" in text and "0.25 +- 0.1 | 123 +- 0.1 |" in text
    assert "| by completion | 0.13 +- " in text
    for name in ("path", "explained", "plane", "lengths"):
        assert f"]({name}.png)" in text
        assert colours(out / f"{name}.png") > 10
    assert not list(out.glob(".*"))


def test_new_directions_put_an_end_to_the_plane_of_older_ones(tmp_path: Path) -> None:
    folders, _ = plant(tmp_path, CORNERS)
    out, grid = tmp_path / "out", tmp_path / "grid"
    weights = ["analyse", "weights", "--no-plots", "--out", str(out)]
    assert main([*weights, *map(str, folders)]) == 0
    plane = ["analyse", "plane", "--no-plots", "--out", str(out)]
    assert main([*plane, "--write", str(grid), "--points", "2"]) == 0
    (grid / "point_00_00" / "eval.json").write_text(evaluation(0.5, 0.25, 123.0))
    assert main([*plane, "--read", str(grid)]) == 0
    assert json.loads((out / "analysis.json").read_text())["plane"] is not None
    assert main([*weights, *map(str, folders[:3])]) == 0
    assert json.loads((out / "analysis.json").read_text())["plane"] is None
    assert main([*plane, "--read", str(grid)]) == 2
    assert not list(out.glob("*.png"))


def test_bad_input_ends_with_a_line_and_before_any_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert main(["analyse", "plane", "--read", str(tmp_path), "--out", str(out)]) == 2
    assert "first megatron-rl analyse weights" in caplog.text
    assert main(["analyse", "lengths", str(tmp_path), "--out", str(out)]) == 2
    assert "holds no rollouts" in caplog.text
    folders, _ = plant(tmp_path, CORNERS[:2])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["analyse", "weights", *map(str, folders), "--out", str(tmp_path / "new")]) == 2
    assert "plots need matplotlib" in caplog.text
    assert not (tmp_path / "new").exists()
    assert not out.exists()
    out.mkdir()
    (out / "analysis.json").write_text("{")
    assert main(["analyse", "weights", *map(str, folders), "--out", str(out), "--no-plots"]) == 2
    assert "is not an analysis" in caplog.text
