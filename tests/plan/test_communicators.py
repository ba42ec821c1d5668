"""Communicators of a weight sync: memory and start by hand, and of published models."""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.plan_weights import forecast
from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import MIB
from megatron_rl.config.tree import Config
from megatron_rl.plan.communicators import (
    BETWEEN_NODES,
    ON_ONE_NODE,
    Communicators,
    communicator_bytes,
    find_communicators,
    start_seconds,
)
from megatron_rl.plan.plan import Hardware, make_plan
from megatron_rl.plan.weight_sync import PAPER_WEIGHT_SYNC_S, sync_rate
from tests.rehearsal.shapes import MISTRAL_24B, QWEN3_30B_A3B, TINY, write_shape

ROOT = Path(__file__).resolve().parents[2]
LANES = [[0, 1], [0, 1]]
"""Two trainer ranks, each of which sends to both ranks of an engine."""


def two_ranks(*overrides: str) -> Config:
    return load_config(None, ["parallel.pipeline=2", "generator.tensor_parallel=2", *overrides])


def found(*overrides: str) -> Communicators:
    communicators = find_communicators(two_ranks(*overrides), LANES)
    assert communicators is not None
    return communicators


def test_two_trainer_ranks_and_three_engines_on_one_node() -> None:
    """In MiB: structures; peers with 32 channels each."""
    communicators = found("generator.replicas=3")
    # Two lanes, and two more while a generator joins. A trainer rank has one peer in each.
    assert communicators.trainer_bytes == 4 * (64 + 32 * 10) * MIB
    # The first engine gets from both roots, and sends to the second engine.
    assert communicators.engine_bytes == (64 + 3 * 32 * 10) * MIB
    # Two lanes of five ranks, one after the other; for a joiner two of three.
    assert communicators.starts_s == (pytest.approx(2 * (1.4 + 5 * 0.085)),)
    assert communicators.join_s == pytest.approx(2 * (1.4 + 3 * 0.085))


def test_a_fourth_engine_is_on_another_node() -> None:
    """Fewer channels, and two pools of 16 steps of 128 KiB a channel."""
    fixed = 64 + 2 * 16 * 16 // 8
    communicators = found("generator.replicas=4")
    assert communicators.trainer_bytes == 4 * (fixed + 2 * 10) * MIB
    assert communicators.engine_bytes == (fixed + 3 * 2 * 10) * MIB
    assert communicators.starts_s == (pytest.approx(2 * (1.4 + 6 * 0.085)),)


def test_each_part_of_the_generators_has_its_own_lanes() -> None:
    whole, parts = found("generator.replicas=5"), found(
        "generator.replicas=5", "expert.weights.groups=2"
    )  # fmt: skip
    # Those of both parts, and those of a joiner, instead of one part and the joiner.
    assert 2 * parts.trainer_bytes == 3 * whole.trainer_bytes
    assert parts.engine_bytes == whole.engine_bytes
    # Three engines, then two.
    assert parts.starts_s == pytest.approx((2 * (1.4 + 5 * 0.085), 2 * (1.4 + 4 * 0.085)))


def test_only_a_reshard_forms_communicators() -> None:
    assert find_communicators(two_ranks("weights.method=folder"), LANES) is None


def test_lanes_without_a_common_trainer_rank_start_together() -> None:
    one = 1.4 + 0.085 * 2
    assert start_seconds([[0], [1]], 1) == pytest.approx(one)
    assert start_seconds([[0], [0]], 1) == pytest.approx(2 * one)
    # The second lane waits for rank 0, the third one for the second: 2, 3 and 2 ranks.
    assert start_seconds([[0], [0, 1], [1]], 1) == pytest.approx(2 * one + 1.4 + 0.085 * 3)


def test_no_more_peers_are_on_a_node_than_it_has_other_gpus() -> None:
    for links in (BETWEEN_NODES, ON_ONE_NODE):
        assert communicator_bytes(6, links) < communicator_bytes(7, links)
        assert communicator_bytes(7, links) == communicator_bytes(500, links)


def test_the_plan_of_memory_counts_them_at_both_ends(tmp_path: Path) -> None:
    def planned(method: str) -> tuple[int, int]:
        sizes = [f"model.path={write_shape(tmp_path, TINY)}", "generator.replicas=3"]
        config = two_ranks(*sizes, f"weights.method={method}", "expert.weights.bucket_bytes=1024")
        plan = make_plan(config, Hardware())
        return plan.trainer.total - plan.trainer.sync_buffers, plan.engine.kv_room

    trainer, room = planned("reshard")
    without, whole_room = planned("folder")
    communicators = found("generator.replicas=3")
    assert trainer - without == communicators.trainer_bytes
    assert whole_room - room == communicators.engine_bytes


QWEN3_235B = QWEN3_30B_A3B | {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "intermediate_size": 12288, "moe_intermediate_size": 1536,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "max_position_embeddings": 163840,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "billions", "senders", "example", "layout"),
    [
        # An engine rank needs half of each matrix: 4 of 8 tensor-parallel ranks.
        (MISTRAL_24B, 23.6, (4, 1), "magistral_24b", {}),
        # Its part of every expert, so all ranks send to all engine ranks.
        (QWEN3_30B_A3B, 30.5, (8, 2), "qwen3_30b_a3b", {}),
        (QWEN3_235B, 235.1, (32, 8), "qwen3_30b_a3b", {
            "parallel.pipeline": 2, "parallel.data": 4, "parallel.expert": 16,
            "generator.tensor_parallel": 8, "generator.replicas": 8}),
        # 16 of 256 whole experts, which 4 ranks hold, and parts of the vocabulary from two ranks.
        (DEEPSEEK_V3, 671.0, (6, 1), "qwen3_30b_a3b", {
            "parallel.tensor": 8, "parallel.data": 32, "parallel.expert": 64,
            "generator.tensor_parallel": 16, "generator.expert_parallel": 16,
            "generator.replicas": 8}),
    ],
    ids=["magistral-24b-44-engines", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3-671b"],
)  # fmt: skip
def test_a_weight_sync_of_published_models_takes_less_than_five_seconds(
    tmp_path: Path,
    sizes: dict[str, Any],
    billions: float,
    senders: tuple[int, int],
    example: str,
    layout: dict[str, int],
) -> None:
    """senders: most senders of an engine rank, and most engine ranks of a sender."""
    overrides = [f"{key}={value}" for key, value in layout.items()]
    config = load_config(
        ROOT / f"examples/{example}.toml",
        [f"model.path={write_shape(tmp_path, sizes)}", "prompts.0.path=none", *overrides],
    )
    plan = forecast(config)
    assert plan.model_bytes == pytest.approx(2e9 * billions, rel=2e-3)
    assert sync_rate(config.weights) == 25e9
    # The fullest engine rank is the limit; the last engine gets its first round so many rounds
    # after the first engine.
    rounds = -(-max(plan.received) // config.weights.bucket_bytes)
    row = 1 + (config.generator.replicas - 1) / rounds
    assert plan.cost.whole_seconds == pytest.approx(max(plan.received) / 25e9 * row + 0.4)
    assert plan.cost.whole_seconds < PAPER_WEIGHT_SYNC_S == 5
    # No more rounds than the fullest engine rank needs, up to 5 %.
    assert plan.rounds <= 1.05 * rounds
    # One communicator for each rank of an engine, of 148 MiB on a trainer rank.
    assert (plan.lane_ranks - config.generator.replicas, plan.rank_lanes) == senders
    assert plan.cost.lanes == config.generator.tensor_parallel
    assert plan.communicators is not None
    assert plan.communicators.trainer_bytes == 2 * plan.rank_lanes * 148 * MIB
    # A trainer rank starts its lanes one after the other. No lane is slower than the largest.
    longest = plan.rank_lanes * (1.4 + 0.085 * plan.lane_ranks)
    assert longest / 2 < sum(plan.communicators.starts_s) <= longest
