"""The trainer's seconds beside its FLOPs and the product's packing."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import GPUS
from megatron_rl.plan.flops import product_flops, step_flops
from megatron_rl.protocol.packing import deal
from megatron_rl.rollout_queue.batches import MinibatchPlan
from megatron_rl.simulation.hardware import Assumptions, cluster_model
from megatron_rl.simulation.machines import TrainerModel
from megatron_rl.weights.layout.shape import read_shape
from tests.plan.test_plan import LLAMA_8B
from tests.tiny_models import MIXED_WINDOWS

LENGTHS = [900, 700, 650, 400, 300, 120, 80]


def plan_of(lengths: list[int], ranks: int, budget: int = 1024) -> MinibatchPlan:
    return MinibatchPlan([], lengths, deal(lengths, budget_tokens=budget, dp_size=ranks))


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    plan = plan_of(LENGTHS, 2)
    model = TrainerModel(token_s=0.01, microbatch_s=0.5, optimizer_s=2.0, step_s=1.0)
    slowest = max(
        sum(0.5 + 0.01 * sum(LENGTHS[i] for i in microbatch) for microbatch in rank)
        for rank in plan.ranks
    )
    assert model.compute_s([plan]) == pytest.approx(1.0 + slowest)
    # Two minibatches: one optimizer step between them; the last counts apart.
    assert model.compute_s([plan, plan]) == pytest.approx(1.0 + 2 * slowest + 2.0)


def test_ranks_that_meet_wait_in_every_microbatch() -> None:
    plan = MinibatchPlan([], [100, 10, 20, 90], [[[0], [1]], [[2], [3]]])
    assert TrainerModel(1.0).compute_s([plan]) == 110
    assert TrainerModel(1.0, ranks_meet=True).compute_s([plan]) == 100 + 90


def test_positions_that_fill_a_microbatch_take_time() -> None:
    plan = MinibatchPlan([], [100, 10, 20, 90], [[[0], [1]], [[2], [3]]])
    model = TrainerModel(1.0, microbatch_s=1.0, positions=120, filling_s=0.5)
    # The ranks have 110 tokens each, and 240 positions.
    assert model.compute_s([plan]) == 2 * 1.0 + 110 + 0.5 * 130
    # Two placeholders make four microbatches of two; the bubble is 3 of 2 x 2 + 3.
    interleaved = TrainerModel(1.0, positions=120, filling_s=0.5, stages=4, virtual_stages=2)
    assert interleaved.compute_s([plan]) == pytest.approx((110 + 0.5 * 130 + 120.0) * 7 / 4)


def test_a_pipeline_adds_its_bubble() -> None:
    # (p - 1) / (m + p - 1) of the whole is idle: 4 microbatches in 3 stages take 6 turns for 4.
    plan = MinibatchPlan([], [10] * 4, [[[0], [1], [2], [3]]])
    assert TrainerModel(1.0, stages=3).compute_s([plan]) == pytest.approx(40 * 6 / 4)


@pytest.fixture
def model_config(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{tmp_path / "model"}"\n')
    return path


def test_seconds_are_model_flops_over_peak_and_mfu(model_config: Path) -> None:
    config = load_config(model_config, ["parallel.tensor=4", "generator.tensor_parallel=1"])
    trainer = cluster_model(config, Assumptions(mfu=0.4)).trainer
    plan = MinibatchPlan([], [4096] * 8, [[[i] for i in range(8)]])
    flops = step_flops(read_shape(config.model.path), sequences=8, length=4096).total
    peak = GPUS["h100-80g"].bf16_flops
    assert trainer.compute_s([plan]) == pytest.approx(flops / (4 * peak * 0.4))
    sized = ["expert.train.pad_microbatches=true", "train.microbatch_tokens=40960"]
    padded = config.model_copy(update={"train": load_config(None, sized).train})
    again = cluster_model(padded, Assumptions(mfu=0.4)).trainer
    # 4096 of 40960 positions are tokens, in each of 8 microbatches.
    added = 3 * 8 * (40960 - 4096) * product_flops(read_shape(config.model.path))
    assert again.compute_s([plan]) == pytest.approx((flops + added) / (4 * peak * 0.4))


def test_pairs_of_layers_with_and_without_a_window_count_apart(model_config: Path) -> None:
    config = load_config(model_config, ["parallel.tensor=4"])
    values = LLAMA_8B | MIXED_WINDOWS | {
        "architectures": ["SmolLM3ForCausalLM"], "sliding_window": 1024,
        "layer_types": ["full_attention"] * 8 + ["sliding_attention"] * 24,
        "no_rope_layers": [1] * 32,
    }  # fmt: skip
    (config.model.path / "config.json").write_text(json.dumps(values))
    trainer = cluster_model(config, Assumptions(mfu=0.4)).trainer
    plan = MinibatchPlan([], [4096] * 8, [[[i] for i in range(8)]])
    flops = step_flops(read_shape(config.model.path), sequences=8, length=4096)
    # 4 operations for a query and a key of 4096 dimensions, in three passes over 8 sequences.
    cut, whole = 1024 * 1025 // 2 + (4096 - 1024) * 1024, 4096 * 4097 // 2
    assert flops.attention == 3 * 8 * 4 * 4096 * (24 * cut + 8 * whole)
    seconds = flops.total / (4 * GPUS["h100-80g"].bf16_flops * 0.4)
    assert trainer.compute_s([plan]) == pytest.approx(seconds)


def test_an_engine_reads_its_weights_and_its_cache_every_iteration(model_config: Path) -> None:
    config = load_config(model_config, ["parallel.tensor=4", "generator.max_running=32"])
    engine = cluster_model(config, Assumptions(memory_share=0.5)).engine
    # 8.03 billion parameters in bf16 less the embedding, of which rows are read; then 128 KiB of
    # cache a token. At 32 completions the products hide behind the reads.
    rate = 3.35e12 * 0.5
    assert engine.base_s == pytest.approx(0.004 + 2 * 8.03e9 / rate, rel=0.01)
    assert engine.per_kv_token_s == pytest.approx(2 * 32 * 8 * 128 * 2 / rate)
    assert engine.per_running_s == pytest.approx(5e-6)


def test_all_engines_dead_is_refused(model_config: Path) -> None:
    config = load_config(model_config, ["parallel.tensor=4"])
    with pytest.raises(InputError, match="at least one must live"):
        cluster_model(config, Assumptions(dead=1))
