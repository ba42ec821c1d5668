"""First tokens that come with the prefill, and completions handed over one after the other."""

import dataclasses
import random
from pathlib import Path

import pytest

from megatron_rl.simulation.calibration import calibrate
from megatron_rl.simulation.engine import Engine, EngineModel
from megatron_rl.simulation.hand_over_fit import ending_together, fit_hand_over
from megatron_rl.simulation.machines import (
    ClusterModel,
    TrainerModel,
    VerifierModel,
    WeightSyncModel,
)
from megatron_rl.simulation.records import read_run
from megatron_rl.simulation.request import Request
from megatron_rl.simulation.workload import LogNormalLengths, PassRates, Workload
from tests.simulation.clusters import config_of, model_of, simulated
from tests.simulation.test_calibration import predicted, record, truth


def ends_of(model: EngineModel, requests: list[tuple[int, int]]) -> list[float]:
    """When completions of (prompt, tokens) end that are all there at time 0."""
    engine = Engine(model)
    for number, (prompt, tokens) in enumerate(requests):
        engine.add(Request(number, 0, number, prompt, tokens), 0.0)
    ends = [0.0] * len(requests)
    engine.pause(0.0)
    engine.resume(0, 0.0)
    while engine.in_flight:
        engine.advance(engine.next_at())
        for when, request in engine.take_finished():
            ends[request.lease_id] = when
    assert engine.kv == 0
    assert engine.tokens == sum(tokens for _, tokens in requests)
    return ends


def loop(model: EngineModel, requests: list[tuple[int, int]]) -> list[float]:
    """The same, one pass after the other: the first request's prefill begins before the others."""
    clock, ends, running = 0.0, [0.0] * len(requests), {}
    waiting = list(range(len(requests)))
    while waiting or running:
        while joining := waiting[: 1 if not clock else model.max_running - len(running)]:
            waiting = waiting[len(joining) :]
            clock += model.prefill_base_s + model.request_s * len(joining)
            running |= {i: 1 for i in joining}
        kv = sum(requests[i][0] + done for i, done in running.items())
        clock += model.iteration_s(len(running), kv)
        for i in list(running):
            running[i] += 1
            if running[i] == requests[i][1]:
                ends[i] = clock
                del running[i]
    return ends


def test_a_prefill_is_a_pass_that_gives_the_first_token() -> None:
    model = EngineModel(
        0.01, 0.0005, 2e-6, 1e-4, max_running=6, kv_tokens=10**5, prefill_samples=True,
        prefill_base_s=0.03,
    )  # fmt: skip
    # The pass and 100 tokens' prefill; then 2 iterations over 101 and 102 tokens.
    [end] = ends_of(model, [(100, 3)])
    assert end == pytest.approx(0.03 + 0.01 + 2 * 0.0105 + 2e-6 * 203)


def test_the_first_of_a_prompt_goes_ahead_and_what_came_meanwhile_is_next() -> None:
    model = EngineModel(
        0.01, 0.0, 0.0, 0.0, max_running=6, kv_tokens=10**5, prefill_samples=True,
        prefill_base_s=0.03,
    )  # fmt: skip
    engine = Engine(model)
    engine.resume(0, 0.0)
    for number in range(3):
        engine.add(Request(number, 0, 7, 10, 3), 0.0)
    engine.add(Request(3, 0, 8, 10, 3), 0.02)
    # Passes for the first of prompt 7, for its followers and prompt 8's, then two iterations.
    while engine.in_flight:
        engine.advance(engine.next_at())
    finished = engine.take_finished()
    assert [when for when, _ in finished] == pytest.approx([0.08] * 4)
    assert {r.lease_id: r.first_token_at for _, r in finished} == pytest.approx(
        {0: 0.03, 1: 0.06, 2: 0.06, 3: 0.06}
    )
    assert (engine.counted.iterations, engine.counted.tokens) == (2, 8)


def test_a_pass_after_a_rest_takes_longer() -> None:
    model = EngineModel(
        0.01, 0.0, 0.0, 0.0, max_running=6, kv_tokens=10**5, prefill_samples=True,
        prefill_base_s=0.03, wake_s=0.005,
    )  # fmt: skip
    engine = Engine(model)
    engine.resume(0, 0.0)
    # The second comes while the first one decodes, the third into an idle engine.
    for number, arrives_at in enumerate((0.0, 0.04, 0.5)):
        while engine.next_at() < arrives_at:
            engine.advance(engine.next_at())
        engine.add(Request(number, 0, number, 10, 3), arrives_at)
    while engine.in_flight:
        engine.advance(engine.next_at())
    firsts = {r.lease_id: r.first_token_at for _, r in engine.take_finished()}
    assert firsts == pytest.approx({0: 0.035, 1: 0.045 + 0.03, 2: 0.5 + 0.035})


@pytest.mark.parametrize("seed", range(3))
def test_with_first_tokens_closed_form_equals_a_loop(seed: int) -> None:
    draw = random.Random(seed)
    model = EngineModel(
        0.01, 5e-4, 2e-6, 0.0, max_running=8, kv_tokens=10**5, request_s=2e-3, prefill_samples=True,
        prefill_base_s=0.02,
    )  # fmt: skip
    requests = [(draw.randint(1, 200), draw.randint(2, 60)) for _ in range(40)]
    assert ends_of(model, requests) == pytest.approx(loop(model, requests), rel=1e-9)


def test_a_wave_is_handed_over_one_by_one() -> None:
    # 128 completions on 4 engines of 32 places: 100 iterations of 0.1 s, then 32 hand-overs.
    model = model_of(token_s=2.0 / (128 * 110))
    engine = dataclasses.replace(model.engine, hand_over_s=0.05)
    found = simulated(config_of(staleness=0), dataclasses.replace(model, engine=engine))
    assert found.step_s == pytest.approx(10.0 + 32 * 0.05 + 2.0, rel=0.01)
    assert found.generator_idle == pytest.approx(2.0 / 13.6, abs=0.01)
    # The k-th of 32 is there after 10 s and k hand-overs.
    assert found.latency_s == pytest.approx(10.0 + 0.05 * 33 / 2, rel=0.01)


SHORT = Workload(LogNormalLengths(10, 0.05, 0.5), 20, PassRates.of(0.5, 0.3, 8), seed=3)
TRUTH = ClusterModel(
    EngineModel(
        0.02, 1e-3, 0.0, 0.0, max_running=64, kv_tokens=40_000, request_s=2e-3,
        hand_over_s=1.5e-3, prefill_samples=True, prefill_base_s=0.02,
    ),
    TrainerModel(token_s=2e-4, optimizer_s=0.1),
    WeightSyncModel(0.05),
    VerifierModel(1, (1e-3,)),
)  # fmt: skip


GENERATOR = {"replicas": 1, "max_running": 64, "kv_tokens": 40_000}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = config_of(groups=8, size=8, staleness=1, generator=GENERATOR)
    record(tmp_path, config, TRUTH, SHORT)
    return tmp_path


def test_the_fit_finds_hand_over_and_iterations_of_short_completions(run: Path) -> None:
    records = read_run(run)
    # Some of a wave joined an iteration later than others, and count as late hand-overs.
    assert fit_hand_over(ending_together(records.rollouts)) == pytest.approx(1.5e-3, rel=0.25)
    model = calibrate(records).fitted
    assert model.engine.base_s == pytest.approx(0.02, rel=0.05)
    assert model.engine.per_running_s == pytest.approx(1e-3, rel=0.05)
    # What is left of a completion's time, chance included: little of it is prefill.
    assert model.engine.request_s == pytest.approx(2e-3, rel=0.4)
    assert model.verifier.servers == 1
    # A request that the queue kept back for its burst looks longer.
    assert 1e-3 <= sum(model.verifier.service_s) / len(model.verifier.service_s) < 2e-3


@pytest.mark.parametrize(
    ("staleness", "running"), [(0, 64), (1, 16)], ids=["without staleness", "few places"]
)
def test_other_settings_of_short_completions_are_predicted(
    run: Path, staleness: int, running: int
) -> None:
    fitted = calibrate(read_run(run))
    places = GENERATOR | {"max_running": running}
    config = config_of(groups=8, size=8, staleness=staleness, generator=places)
    # Of few steps a zero-variance group that comes a moment later makes several percent.
    found = predicted(fitted, config, SHORT, steps=40)
    expected = truth(config, TRUTH, SHORT, steps=40)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.05)
    assert found.trainer_idle == pytest.approx(expected.trainer_idle, abs=0.03)
    assert found.generator_idle == pytest.approx(expected.generator_idle, abs=0.03)
