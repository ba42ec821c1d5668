"""Steps that are not equally long, found again in what a run records, and simulated."""

import dataclasses

import pytest

from megatron_rl.simulation.calibration import calibrate
from megatron_rl.simulation.core_use import CoreUse, update_span
from megatron_rl.simulation.pace_fit import engine_paces, trainer_paces
from megatron_rl.simulation.records import WARM_UP, RunRecords, read_run
from tests.simulation.clusters import config_of, model_of, simulated
from tests.simulation.test_calibration import TRUTH, record, setting

TRAINER, ENGINE = (1.3, 1.0, 0.7), (0.8, 1.2, 1.0)
UNEQUAL = dataclasses.replace(
    TRUTH,
    trainer=dataclasses.replace(TRUTH.trainer, optimizer_s=0.0, paces=TRAINER),
    engine=dataclasses.replace(TRUTH.engine, paces=ENGINE),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    folder = tmp_path_factory.mktemp("run")
    # Without staleness a step generates what it trains on.
    record(folder, setting(staleness=0), UNEQUAL)
    return read_run(folder)


def in_turn(paces: tuple[float, ...], count: int) -> list[float]:
    return [paces[(WARM_UP + step) % len(paces)] for step in range(count)]


def test_the_trainers_are_found_by_tokens(run: RunRecords) -> None:
    found = trainer_paces(run, CoreUse(run, None))
    expected = in_turn(TRAINER, len(run.steps))
    mean = sum(expected) / len(expected)
    assert found == pytest.approx([pace / mean for pace in expected], rel=0.03)


def test_the_engines_are_found_by_iterations_of_any_size(run: RunRecords) -> None:
    found = engine_paces(run, CoreUse(run, None), TRUTH.engine, 0.0)
    expected = in_turn(ENGINE, len(run.steps))
    mean = sum(expected) / len(expected)
    assert found == pytest.approx([pace / mean for pace in expected], rel=0.05)


def test_steps_of_few_completions_tell_nothing_of_engines(run: RunRecords) -> None:
    # Of later steps one completion of every other group is left; of the earlier ones all.
    half = len(run.steps) // 2
    begins, _ = update_span(run.steps[half])
    kept = [
        r for r in run.rollouts if r.times.leased < begins or (r.index == 0 and r.group % 2 == 0)
    ]
    few = dataclasses.replace(run, rollouts=kept)
    found = engine_paces(few, CoreUse(few, None), TRUTH.engine, 0.0)
    assert set(found[half + 1 :]) == {1.0}
    assert len(set(found[:half])) == half


def test_a_calibration_has_both(run: RunRecords) -> None:
    fitted = calibrate(run).fitted
    assert max(fitted.trainer.paces) / min(fitted.trainer.paces) == pytest.approx(
        1.3 / 0.7, rel=0.1
    )
    assert max(fitted.engine.paces) / min(fitted.engine.paces) == pytest.approx(1.2 / 0.8, rel=0.1)


def test_a_run_that_tells_nothing_has_equal_steps(run: RunRecords) -> None:
    silent = [row | {"train/tokens_per_s": 0.0} for row in run.steps]
    assert trainer_paces(dataclasses.replace(run, steps=silent), CoreUse(run, None)) == (1.0,)


def test_steps_take_what_their_paces_say() -> None:
    # 128 completions of 100 iterations of 0.1 s, then 2 s of training, one after the other.
    model = model_of(token_s=2.0 / (128 * 110))
    unequal = dataclasses.replace(
        model,
        trainer=dataclasses.replace(model.trainer, paces=(1.5, 0.5)),
        engine=dataclasses.replace(model.engine, paces=(1.2, 0.8)),
    )
    config = config_of(staleness=0)
    # 10 x 1.2 + 2 x 1.5 and 10 x 0.8 + 2 x 0.5 s, in turn.
    assert simulated(config, model, steps=4).step_s == pytest.approx(12.0, rel=0.01)
    found = simulated(config, unequal, steps=4)
    assert found.step_s == pytest.approx((15.0 + 9.0) / 2, rel=0.01)
    assert found.trainer_idle == pytest.approx(10.0 / 12.0, abs=0.01)


def test_steps_in_which_both_are_slow_cost_less_than_those_in_which_one_is() -> None:
    # One step ahead, 10 s of either: the slower of both sets the pace of a step.
    model = model_of(token_s=10.0 / (128 * 110))
    engine = dataclasses.replace(model.engine, paces=(1.2, 0.8))
    together, crossed = (
        dataclasses.replace(
            model, engine=engine, trainer=dataclasses.replace(model.trainer, paces=paces)
        )
        for paces in ((1.2, 0.8), (0.8, 1.2))
    )
    config = config_of(staleness=1)
    least = simulated(config, together, steps=4).step_s
    assert least == pytest.approx(10.0, rel=0.03)
    assert simulated(config, crossed, steps=4).step_s > 1.08 * least
