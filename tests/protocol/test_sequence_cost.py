"""FLOPs of a sequence are those of `plan`, and ranks that get equally many of them end together."""

import json
import statistics
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.plan.flops import step_flops
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost, find_cost, read_cost
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import GLM4_MOE, GPT_OSS, LATENT, MIXED_WINDOWS, QWEN3_MOE, write_model
from tests.wrapped_models import write_wrapped
from tools.bench.packing import magistral_like

# Magistral Small: 40 layers of 32 heads and 8 key heads of 128, hidden 5,120, FFN 32,768.
PROJECTIONS, UNITS = 5120 * 128 * (2 * 32 + 2 * 8), 3 * 5120 * 32_768
MAGISTRAL = SequenceCost(
    per_token=2 * (40 * (PROJECTIONS + UNITS) + 5120 * 131_072), per_pair=4 * 40 * 32 * 128
)
BUDGET = 40_960


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 32}),
        ("Qwen3Moe", QWEN3_MOE),
        ("Glm4Moe", GLM4_MOE),
        ("DeepseekV3", LATENT),
        ("Glm4MoeLite", {**LATENT, "q_lora_rank": None}),
        ("Mistral", {"sliding_window": 6}),
        ("SmolLM3", MIXED_WINDOWS),
        ("SmolLM3", {}),
        ("GptOss", {**GPT_OSS, "sliding_window": 6}),
    ],
)
def test_costs_are_the_flops_of_a_forward_pass(tmp_path: Path, family: str, options: dict) -> None:
    write_model(tmp_path, family=family, **options)
    cost, shape = read_cost(tmp_path), read_shape(tmp_path)
    for length in (1, 2, 5, 6, 7, 100):
        assert 3 * cost.of(length) == step_flops(shape, sequences=1, length=length).total
    assert find_cost("flops", tmp_path) == cost and find_cost("tokens", tmp_path) == TOKENS


def test_a_text_model_inside_a_wrapper_costs_what_it_costs_alone(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "Qwen3VL")
    whole = 3 * read_cost(tmp_path).of(7)
    assert whole == step_flops(read_shape(tmp_path), sequences=1, length=7).total


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    write_model(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"sliding_window": 3, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_cost(tmp_path).window is None


def test_a_token_of_32k_costs_a_fifth_more_than_one_of_1k() -> None:
    dearer = (MAGISTRAL.of(32_768) / 32_768) / (MAGISTRAL.of(1000) / 1000)
    # (6.55e5 x 32,769 / 2) over 2 x 2.36e10, less the same for 1,000.
    assert dearer == pytest.approx(1.226, abs=0.002)


def test_a_folder_without_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train.packing='flops': .*config.json does not give"):
        read_cost(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(InputError, match="num_attention_heads"):
        read_cost(tmp_path)


def slowest(lengths: list[int], ranks: list[list[list[int]]]) -> float:
    """FLOPs of the rank with most of them over the mean."""
    flops = [sum(MAGISTRAL.of(lengths[i]) for m in rank for i in m) for rank in ranks]
    return max(flops) / (sum(flops) / len(flops))


@pytest.mark.parametrize(("count", "dp_size"), [(2048, 8), (512, 8), (256, 8), (1024, 32)])
def test_the_slowest_rank_has_less_to_do(count: int, dp_size: int) -> None:
    by_tokens, by_flops = [], []
    for seed in range(4):
        lengths = [each.total for each in magistral_like(count, seed=seed)]
        tokens = deal(lengths, budget_tokens=BUDGET, dp_size=dp_size)
        flops = deal(lengths, budget_tokens=BUDGET, dp_size=dp_size, cost=MAGISTRAL)
        by_tokens.append(slowest(lengths, tokens))
        by_flops.append(slowest(lengths, flops))
        assert len(flops[0]) == len(tokens[0]), "no more microbatches than by tokens"
        assert by_flops[-1] < by_tokens[-1]
    # A quarter of the time lost, on average; what is left is where microbatches are few.
    assert statistics.fmean(by_flops) - 1 < (statistics.fmean(by_tokens) - 1) / 4
    assert max(by_flops) < 1.012


def test_microbatches_change_places_where_dealing_in_turn_is_uneven() -> None:
    # Each its own microbatch of 9: 9 8 6 5 4 2 in turn give 9 + 5 + 4 and 8 + 6 + 2.
    found = deal(
        [9, 8, 6, 5, 4, 2], budget_tokens=9, dp_size=2, cost=SequenceCost(per_token=2, per_pair=0)
    )
    assert {sum([9, 8, 6, 5, 4, 2][i] for m in rank for i in m) for rank in found} == {17}
