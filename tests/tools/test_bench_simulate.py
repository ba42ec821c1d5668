"""The comparison of a prediction with a run, on figures that are made up."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.simulation.records import Measured
from tests.simulation.clusters import config_of, model_of, simulated
from tools.bench.simulate import (
    QUICK,
    RUNS,
    SHARES,
    TIMES,
    Figures,
    compare,
    main,
    medians_of,
    noise_of,
)


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


def figures(measured: float, said: float) -> Figures:
    shares = {"predicted": said, "measured": measured, "difference": said - measured}
    return {name: dict(shares, ratio=said / measured) for name in (*TIMES, *SHARES)}


def test_medians_are_those_of_the_rounds_and_not_of_one() -> None:
    rounds = [figures(1.0, 1.1), figures(2.0, 1.8), figures(4.0, 4.8)]
    found = medians_of(rounds)
    # The ratio's median, 1.1, is not the ratio of the medians, 0.9.
    assert found["step_s"]["ratio"] == pytest.approx(1.1)
    assert (found["step_s"]["predicted"], found["step_s"]["measured"]) == (1.8, 2.0)
    assert found["step_s"]["by_round"] == [1.1, 0.9, 1.2]
    assert found["trainer_idle"]["by_round"] == pytest.approx([0.1, -0.2, 0.8])


def test_a_share_of_nothing_in_one_round_has_no_ratio() -> None:
    rounds = [figures(1.0, 1.1), figures(1.0, 1.2)]
    del rounds[1]["staleness_mean"]["ratio"]
    found = medians_of(rounds)["staleness_mean"]
    assert "ratio" not in found and "by_round" not in found


def test_noise_is_the_span_of_what_one_run_measured() -> None:
    found = noise_of([figures(0.5, 1.0), figures(0.4, 9.0), figures(0.6, 0.0)])
    assert found["step_s"] == pytest.approx(1.5)
    assert found["trainer_idle"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--start", "x"], "--start needs --work"),
        (["--start", "x", "--work", "y", "--rounds", "0"], "at least 1"),
        (["--round", "a", "b", "--round", "c"], "as many runs"),
    ],
)
def test_options_that_make_no_comparison(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert problem in capsys.readouterr().err


def test_a_folder_of_an_earlier_comparison_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last of the runs that would be made: those before it would be lost.
    (tmp_path / "round-2" / "sync").mkdir(parents=True)
    assert main(["--start", str(tmp_path), "--work", str(tmp_path), "--quick"]) == 2
    assert "round-2/sync is there already" in capsys.readouterr().err
    assert not (tmp_path / "round-1").exists()
