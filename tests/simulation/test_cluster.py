"""Simulated runs beside figures worked by hand; bounds that must hold whatever happens."""

import dataclasses
import time

import pytest

from megatron_rl.simulation.advice import reasons
from megatron_rl.simulation.machines import Faults, Turns, VerifierModel, WeightSyncModel
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.workload import Conversation, LogNormalLengths, PassRates, Workload
from tests.simulation.clusters import PROMPT, TOKENS, config_of, constant, model_of, simulated

ROLLOUTS = 8 * 16
GENERATION_S = 10.0
"""A batch of 128 completions on 4 x 32 slots: 100 iterations of 0.1 s."""
VARIED = Workload(LogNormalLengths(150, 0.8, 0.5), PROMPT, PassRates.of(0.4, 0.3, 16))


def token_s_for(seconds: float) -> float:
    """Of the trainer, so that a batch takes so long."""
    return seconds / (ROLLOUTS * (TOKENS + PROMPT))


@pytest.mark.parametrize("training_s", [2.0, 8.0, 12.0, 40.0])
def test_constant_lengths_take_the_longer_of_generation_and_training(training_s: float) -> None:
    found = simulated(config_of(staleness=2), model_of(token_s=token_s_for(training_s)))
    assert found.step_s == pytest.approx(max(GENERATION_S, training_s), rel=0.01)
    idle = max(0.0, 1 - training_s / GENERATION_S)
    assert found.trainer_idle == pytest.approx(idle, abs=0.01)
    # Generators stop once as many groups are open as the bound allows.
    busy = min(1.0, GENERATION_S / training_s)
    assert found.slots_used == pytest.approx(busy, rel=0.02)


@pytest.mark.parametrize(("waited_s", "episodes"), [(5.0, 64), (30.0, 96)])
def test_conversations_that_wait_for_environments_leave_the_engine_to_others(
    waited_s: float, episodes: int
) -> None:
    """By Little's law: 4 engines hold `episodes` conversations each, or all places generate."""
    spoken = Conversation(replies=6, environment_s=waited_s / 5)
    workload = dataclasses.replace(constant(), conversation=spoken)
    # With a low bound of staleness the queue holds back groups whose slowest members wait.
    config = config_of(staleness=12, environments={"max_episodes": episodes})
    found = simulated(config, model_of(token_s=0.0), workload, steps=16, warm_up=10)
    # Each reply joins at the end of an iteration of 0.1 s.
    held = ROLLOUTS * (GENERATION_S + 6 * 0.1 + waited_s) / (4 * episodes)
    assert found.step_s == pytest.approx(max(GENERATION_S, held), rel=0.03)


@pytest.mark.parametrize("training_s", [2.0, 10.0, 25.0])
def test_without_staleness_they_take_turns(training_s: float) -> None:
    sync = WeightSyncModel(2.0)
    model = model_of(token_s=token_s_for(training_s), sync=sync)
    found = simulated(config_of(staleness=0), model)
    # Engines begin as they get their weights, but strictly only once all have them.
    assert found.step_s == pytest.approx(GENERATION_S + training_s + 2.0, rel=0.01)
    assert found.staleness_max == 0


def test_the_speed_up_of_asynchrony_is_the_sum_over_the_longer() -> None:
    # 16 devices; the work of a batch is 64 device-seconds of training and 96 of generation.
    measured, expected = {}, {}
    for trainers in (4, 8, 12):
        engines = 16 - trainers
        training_s, generation_s = 64 / trainers, 96 / engines
        model = model_of(
            iteration_s=generation_s / TOKENS,
            token_s=token_s_for(training_s),
            max_running=ROLLOUTS // engines,
        )
        sections = {"generator": {"replicas": engines, "max_running": ROLLOUTS // engines}}
        if ROLLOUTS % engines:
            continue
        sync = simulated(config_of(staleness=0, **sections), model).step_s
        both = simulated(config_of(staleness=2, **sections), model).step_s
        measured[trainers] = sync / both
        expected[trainers] = (training_s + generation_s) / max(training_s, generation_s)
    assert set(measured) == {8, 12}
    assert measured == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_bound_of_staleness_is_never_exceeded(staleness: int) -> None:
    faults = Faults(deaths_per_engine_hour=20.0, restart_s=40.0)
    found = simulated(
        config_of(staleness=staleness),
        model_of(token_s=token_s_for(8.0), sync=WeightSyncModel(1.0), faults=faults),
        VARIED,
        steps=16,
    )
    assert found.deaths > 3
    assert found.staleness_max <= staleness


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    def run(seed: int) -> Outcome:
        workload = dataclasses.replace(VARIED, seed=seed)
        return simulated(config_of(), model_of(), workload, steps=4)

    assert run(0) == run(0)
    assert run(0).step_s != run(1).step_s


def test_flat_groups_are_generated_in_vain() -> None:
    rates = PassRates.of(0.5, 0.5, 16)
    assert rates.zero_variance_share(16) == pytest.approx(0.5, abs=1e-6)
    found = simulated(
        config_of(groups=32, staleness=1),
        model_of(token_s=token_s_for(1.0) / 4),
        constant(rates=rates),
        steps=12,
    )
    # Four times the groups on the same engines, of which every second is dropped.
    assert found.zero_variance_share == pytest.approx(0.5, abs=0.08)
    assert found.step_s == pytest.approx(
        4 * GENERATION_S / (1 - found.zero_variance_share), rel=0.03
    )


def test_dead_engines_cost_their_share_of_generation() -> None:
    model = model_of(token_s=token_s_for(2.0), faults=Faults(dead_from_start=1))
    found = simulated(config_of(), model)
    assert found.step_s == pytest.approx(GENERATION_S * 4 / 3, rel=0.02)
    assert found.generator_idle == pytest.approx(0.25, abs=0.01)


def test_a_death_costs_the_silence_until_it_is_noticed() -> None:
    # Strictly bounded, all wait for what a dead engine held: heartbeat_timeout_s, and 10 s again.
    faults = Faults(deaths_per_engine_hour=20.0, restart_s=60.0)
    model = model_of(token_s=token_s_for(2.0), faults=faults)
    late, soon = (
        simulated(config_of(queue={"heartbeat_timeout_s": seconds}), model, steps=40)
        for seconds in (60.0, 5.0)
    )
    assert late.deaths > 3
    assert soon.deaths > 3
    assert late.step_s > soon.step_s > GENERATION_S


def test_an_overlapped_sync_leaves_the_critical_path() -> None:
    config = config_of(staleness=3)
    sequential = WeightSyncModel(2.0)
    hidden = dataclasses.replace(sequential, is_overlapped=True)
    slow = simulated(config, model_of(token_s=token_s_for(20.0), sync=sequential))
    fast = simulated(config, model_of(token_s=token_s_for(20.0), sync=hidden))
    assert slow.step_s == pytest.approx(22.0, rel=0.01)
    assert fast.step_s == pytest.approx(20.0, rel=0.01)
    assert (slow.stall_s, fast.stall_s) == (2.0, 0.0)
    assert fast.sync_s == pytest.approx(2.0)


def test_slow_verifiers_bound_the_step() -> None:
    # 128 completions of 0.5 s on 2 servers: 32 s.
    found = simulated(config_of(), model_of(verifier=VerifierModel(2, (0.5,))))
    assert found.step_s == pytest.approx(32.0, rel=0.02)
    assert found.verifier_busy == pytest.approx(1.0, abs=0.02)
    assert found.verifier_s == pytest.approx(0.5, rel=0.02)
    assert "grading one completion takes 0.5 s, after" in reasons(found)[1]


def test_advice_names_what_the_trainer_waits_for() -> None:
    quick = VerifierModel(100, (0.01,))
    # Engines generate all the time, and are the limit.
    busy = simulated(config_of(), model_of(token_s=token_s_for(2.0), verifier=quick))
    assert "more GPUs for engines would help" in reasons(busy)[1]
    # Engines do nothing while the trainer trains for 10 s, and it waits while they generate.
    turns = simulated(config_of(staleness=0), model_of(token_s=token_s_for(10.0), verifier=quick))
    assert turns.generator_idle == pytest.approx(0.5, abs=0.02)
    said = " ".join(reasons(turns))
    assert "raise queue.max_staleness" in said and "more GPUs" not in said
    # The same share of idle engines, where that share never serves.
    assert "more GPUs" in " ".join(reasons(turns, dead_share=0.5))
    # One worker grades 128 completions for 6.4 s after 10 s of generation: idle most of the time.
    one = VerifierModel(1, (0.05,))
    few = simulated(config_of(staleness=0), model_of(token_s=token_s_for(2.0), verifier=one))
    assert few.verifier_busy == pytest.approx(6.4 / 18.4, rel=0.02)
    said = " ".join(reasons(few))
    assert "raise verifier.answers.workers" in said and "more GPUs" not in said
    # Workers enough, of which each takes 5 s: half the time of generation.
    slow = VerifierModel(200, (5.0,))
    graded = simulated(config_of(staleness=0), model_of(token_s=token_s_for(2.0), verifier=slow))
    said = reasons(graded, is_assumed=True)[1]
    assert "takes 5 s, as --verify-s assumes, after 0 s" in said and "make grading faster" in said


def test_engines_on_the_trainers_gpus_generate_between_its_turns() -> None:
    # All engines get their weights at once, after those have their memory back.
    sync, turns = WeightSyncModel(1.5), Turns(release_s=3.0, reclaim_s=2.0)
    model = model_of(token_s=token_s_for(8.0), sync=sync, turns=turns)
    found = simulated(config_of(staleness=2), model)
    assert found.step_s == pytest.approx(GENERATION_S + 3.0 + 8.0 + 2.0 + 1.5, rel=0.01)
    assert found.sync_s == pytest.approx(3.5)
    assert found.trainer_idle == pytest.approx(GENERATION_S / found.step_s, rel=0.01)


def test_a_thousand_gpus_take_less_than_a_minute() -> None:
    config = config_of(
        groups=256,
        generator={
            "replicas": 64,
            "tensor_parallel": 8,
            "max_running": 64,
            "context_tokens": 34_000,
            "request_timeout_s": 3600,
        },
        queue={"lease_timeout_s": 4000},
        parallel={"data": 64, "tensor": 8},
        train={"microbatch_tokens": 40960},
        sampling={"max_new_tokens": 32768},
    )
    lengths = LogNormalLengths(7000, 0.7, 0.5)
    workload = Workload(lengths, 300, PassRates.of(0.4, 0.25, 16))
    model = model_of(iteration_s=0.02, token_s=5e-6, max_running=64)
    began = time.process_time()
    found = simulated(config, model, workload, steps=1, warm_up=0, grain_s=4.0)
    assert time.process_time() - began < 60
    assert found.steps == 1
    assert found.staleness_max <= 2
