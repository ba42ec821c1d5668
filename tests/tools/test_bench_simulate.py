"""The comparison of a prediction with a run, on figures that are made up."""

import dataclasses

import pytest

from megatron_rl.simulation.records import Measured
from tests.simulation.clusters import config_of, model_of, simulated
from tools.bench.simulate import AGAIN, QUICK, RUNS, compare, noise_of


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


def test_noise_is_that_of_the_second_of_two_equal_runs() -> None:
    fields = {field.name for field in dataclasses.fields(Measured)}
    first = Measured(**{name: 1.0 for name in fields} | {"staleness_mean": 0.0})
    again = dataclasses.replace(first, step_s=1.25, trainer_idle=0.75)
    found = noise_of(first, again)
    assert found["step_s"] == {"noise": 1.25}
    assert found["trainer_idle"] == {"noise": 0.75, "noise_difference": -0.25}
    assert found["staleness_mean"] == {}


def test_the_run_that_shows_the_noise_is_like_the_first() -> None:
    assert RUNS[AGAIN] == RUNS["base"] and AGAIN in QUICK
