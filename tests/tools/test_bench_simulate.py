"""The comparison of a prediction with a run, on figures that are made up."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_rl.simulation.records import Measured
from tests.simulation.clusters import config_of, model_of, simulated
from tests.simulation.test_calibration import record, setting
from tools.bench.simulate import compare, main


def test_ratios_and_differences() -> None:
    outcome = simulated(config_of(), model_of(), steps=2, warm_up=1)
    values = {field.name: 1.0 for field in dataclasses.fields(Measured)}
    measured = Measured(**values | {"step_s": outcome.step_s / 2, "trainer_idle": 0.0})
    found = compare(outcome, measured)
    assert found["step_s"]["ratio"] == pytest.approx(2.0, abs=1e-3)
    # A share of nothing has no ratio.
    assert "ratio" not in found["trainer_idle"]
    said = found["generator_idle"]["predicted"]
    assert found["generator_idle"]["difference"] == pytest.approx(said - 1.0, abs=1e-4)


def test_the_first_run_predicts_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "fitted", tmp_path / "few"]
    for folder, running in zip(folders, (32, 16), strict=True):
        folder.mkdir()
        record(folder, setting(generator={"max_running": running}))
    assert main([str(folder) for folder in folders]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert list(runs) == [str(folder) for folder in folders]
    for figures in runs.values():
        assert figures["step_s"]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
