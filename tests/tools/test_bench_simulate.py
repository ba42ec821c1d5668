"""The comparison of a prediction with a run, on figures that are made up."""

import dataclasses

import pytest

from megatron_rl.simulation.records import Measured
from tests.simulation.clusters import config_of, model_of, simulated
from tools.bench.simulate import QUICK, RUNS, compare


def test_ratios_and_differences() -> None:
    outcome = simulated(config_of(), model_of(), steps=2, warm_up=1)
    fields = {field.name for field in dataclasses.fields(Measured)}
    values = {name: 1.0 for name in fields}
    measured = Measured(**values | {"step_s": outcome.step_s / 2, "trainer_idle": 0.0})
    found = compare(outcome, measured)
    assert found["step_s"]["ratio"] == pytest.approx(2.0, abs=1e-3)
    # A share of nothing has no ratio.
    assert "ratio" not in found["trainer_idle"]
    said = found["generator_idle"]["predicted"]
    assert found["generator_idle"]["difference"] == pytest.approx(said - 1.0, abs=1e-4)


def test_the_first_run_is_the_one_that_is_fitted() -> None:
    assert next(iter(RUNS)) == QUICK[0] == "base" and RUNS["base"] == ()
