"""A run whose costs are known is recorded, and the fit to its files predicts other settings."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from megatron_rl.config.errors import InputError
from megatron_rl.config.expert import with_expert
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import RESUMED
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.simulation.calibration import Calibration, calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.machines import (
    ClusterModel,
    TrainerModel,
    VerifierModel,
    WeightSyncModel,
)
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.records import measure, read_run
from megatron_rl.simulation.workload import Conversation, LogNormalLengths, PassRates, Workload
from tests.simulation.clusters import config_of

TRUTH = ClusterModel(
    EngineModel(0.02, 4e-4, 1e-6, 0.0, max_running=32, kv_tokens=40_000),
    TrainerModel(token_s=4e-4, optimizer_s=0.4),
    WeightSyncModel(0.3),
    VerifierModel(10**6, (0.02, 0.04)),
)
WORKLOAD = Workload(LogNormalLengths(150, 0.5, 0.5), 20, PassRates.of(0.5, 0.3, 8), seed=7)
STEPS = 24
GENERATOR = {"replicas": 2, "max_running": 32, "kv_tokens": 40_000}


def setting(**sections: Any) -> Config:
    return config_of(
        groups=8,
        size=8,
        staleness=sections.pop("staleness", 1),
        generator=GENERATOR | sections.pop("generator", {}),
        **sections,
    )


def truth(
    config: Config,
    model: ClusterModel = TRUTH,
    workload: Workload = WORKLOAD,
    *,
    steps: int = 12,
) -> Outcome:
    """The outcome of another setting of the machines that are to be found out."""
    running = config.generator.max_running
    engine = dataclasses.replace(model.engine, max_running=running)
    model = dataclasses.replace(model, engine=engine)
    return Cluster(config, model, workload, Span(steps=steps)).run()


def predicted(
    fitted: Calibration, config: Config, workload: Workload = WORKLOAD, *, steps: int = 12
) -> Outcome:
    """What the fit says of it, for the same completions: chance is no part of the comparison."""
    return Cluster(config, fitted.model(config, Assumptions()), workload, Span(steps=steps)).run()


def record(
    folder: Path, config: Config, model: ClusterModel = TRUTH, workload: Workload = WORKLOAD
) -> None:
    """The files of a run that takes virtual time."""
    tree = config.model_dump(mode="json", exclude_none=True)
    (folder / "config.toml").write_text(tomli_w.dumps(with_expert(tree)))
    recorder = Recorder(folder, keeps_tokens=False)
    span = Span(steps=STEPS - 5, warm_up=5)
    cluster = Cluster(config, model, workload, span, recorder=recorder)
    cluster.run()
    rows = []
    for number, step in enumerate(cluster.records, 1):
        rows.append(
            {
                "time": step.ended_at,
                "source": "trainer",
                "step": number,
                "wait/batch_s": step.wait_s,
                "train/update_s": step.compute_s,
                "train/tokens_per_s": step.tokens / step.compute_s,
                "train/optimizer_s": model.trainer.optimizer_s,
                "weight_sync/s": step.sync_s,
                "weight_sync/pause_s": model.sync.pause_s,
                "queue/rollouts_trained": step.rollouts,
                "queue/staleness_versions_mean": step.staleness_sum / step.rollouts,
                "queue/staleness_versions_max": step.staleness_max,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("run")
    record(folder, setting())
    return calibrate(read_run(folder))


def test_what_is_measured_is_what_was_simulated(tmp_path: Path) -> None:
    record(tmp_path, setting())
    found, expected = measure(read_run(tmp_path)), truth(setting())
    assert found.step_s == pytest.approx(expected.step_s, rel=0.05)
    assert found.trainer_idle == pytest.approx(expected.trainer_idle, abs=0.03)
    assert found.generator_idle == pytest.approx(expected.generator_idle, abs=0.03)
    assert found.sync_s == pytest.approx(0.3)
    assert found.staleness_max == 1


def test_the_time_in_which_the_run_was_stopped_is_no_time_of_a_step(tmp_path: Path) -> None:
    record(tmp_path, setting())
    without = measure(read_run(tmp_path))
    stop_s = 28_800.0
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stopped = rows[9]["time"]
    for row in rows[10:]:
        row["time"] += stop_s
    again = {"source": "launch", "step": 10, RESUMED: 1, "time": stopped + stop_s - 60.0}
    synced = {"source": "trainer", "step": 10, "weight_sync/s": 0.3, "time": stopped + stop_s}
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows[:10], again, synced, *rows[10:]])
    )
    for file in (tmp_path / "rollouts").glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            # The queue's clock stood still between what it did before and after the stop.
            line["times"] = {
                name: at + stop_s * (name != "first_token_s" and at > stopped)
                for name, at in line["times"].items()
            }
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    found = measure(run)
    for name in ("step_s", "rest_s", "trainer_idle", "generator_idle"):
        assert getattr(found, name) == pytest.approx(getattr(without, name), abs=1e-3), name
    # No completion that was under way counts: the longest takes seconds.
    assert found.latency_s == pytest.approx(without.latency_s, rel=0.1)
    assert calibrate(run).fitted.trainer.step_s == pytest.approx(without.rest_s, abs=1e-3)


def test_the_fit_finds_the_costs_that_made_the_run(fitted: Calibration) -> None:
    engine, model = fitted.fitted.engine, TRUTH.engine
    for running, kv in ((8, 1400), (24, 4000), (32, 5500)):
        expected = model.iteration_s(running, kv)
        assert engine.iteration_s(running, kv) == pytest.approx(expected, rel=0.05)
    assert fitted.fitted.trainer.token_s == pytest.approx(4e-4, rel=0.05)
    assert fitted.fitted.trainer.optimizer_s == pytest.approx(0.4, rel=0.05)
    assert fitted.fitted.sync.pause_s == pytest.approx(0.3)
    assert fitted.workload.pass_rates.zero_variance_share(8) == pytest.approx(0.3, abs=0.06)
    assert fitted.workload.prompt_tokens == 20


@pytest.mark.parametrize(
    "other",
    [
        {"staleness": 0},
        {"generator": {"max_running": 16}},
        {"train": {"prompts_per_batch": 12}},
        {"generator": {"replicas": 1}},
    ],
    ids=str,
)
def test_other_settings_are_predicted(fitted: Calibration, other: dict[str, Any]) -> None:
    config = setting(**other)
    found, expected = predicted(fitted, config), truth(config)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.05)
    assert found.trainer_idle == pytest.approx(expected.trainer_idle, abs=0.04)
    assert found.generator_idle == pytest.approx(expected.generator_idle, abs=0.04)
    assert found.staleness_mean == pytest.approx(expected.staleness_mean, rel=0.1, abs=0.02)


def test_a_run_of_one_size_says_that_it_knows_no_other(tmp_path: Path) -> None:
    config = setting(staleness=0)
    record(tmp_path, config, TRUTH, Workload(LogNormalLengths(100, 0.0), 20, PassRates(1e6, 1e6)))
    fitted = calibrate(read_run(tmp_path))
    assert fitted.doubt(predicted(fitted, config, fitted.workload)) == ""
    few = predicted(fitted, setting(generator={"max_running": 8}), fitted.workload)
    assert re.search(r"decode 8 completions at a time.* 32 to 32 in nine.*", fitted.doubt(few))
    assert "generator.max_running" in fitted.doubt(few)


def test_a_run_of_many_sizes_knows_few_places(fitted: Calibration) -> None:
    few = predicted(fitted, setting(generator={"max_running": 8}))
    assert fitted.doubt(few) == ""


def test_another_layout_than_the_runs_is_refused(fitted: Calibration) -> None:
    config = setting(generator={"tensor_parallel": 2})
    with pytest.raises(InputError, match=r"generator.tensor_parallel is 2, but 1 in the run"):
        fitted.model(config, Assumptions())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        read_run(tmp_path)


def test_conversations_are_fitted_by_their_replies(tmp_path: Path) -> None:
    spoken = Conversation(replies=4, given_share=0.25, environment_s=1.5)
    workload = dataclasses.replace(WORKLOAD, conversation=spoken)
    config = setting(environments={"max_episodes": 64}, staleness=2)
    record(tmp_path, config, workload=workload)
    run = read_run(tmp_path)
    fitted, found = calibrate(run), measure(run)
    # The fit finds the engine's own costs: it leaves out waits for environments.
    for running, kv in ((8, 1400), (24, 4000)):
        expected = TRUTH.engine.iteration_s(running, kv)
        assert fitted.fitted.engine.iteration_s(running, kv) == pytest.approx(expected, rel=0.1)
    talk = fitted.workload.conversation
    assert (talk.replies, talk.given_share) == (4, pytest.approx(0.25, abs=0.02))
    assert talk.environment_s == pytest.approx(1.5, rel=0.1)
    expected = truth(config, workload=workload)
    assert found.generator_idle == pytest.approx(expected.generator_idle, abs=0.03)
    other = setting(environments={"max_episodes": 16}, staleness=2)
    guess, real = predicted(fitted, other, workload), truth(other, workload=workload)
    assert guess.step_s == pytest.approx(real.step_s, rel=0.1)
    assert real.step_s > 1.1 * expected.step_s
