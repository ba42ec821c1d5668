"""Recipes become Megatron's fields; loaded weights reach parameters that are kept in FP8."""

from types import MethodType

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.backend import fp8
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ModelConfig

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def test_without_fp8_nothing_is_set() -> None:
    assert fp8.transformer_fields(ModelConfig(), stage_layers=4, has_experts=True) == {}


@pytest.mark.parametrize(
    ("recipe", "numbers", "edge"),
    [("delayed", "hybrid", 0), ("tensorwise", "hybrid", 1), ("blockwise", "e4m3", 2)],
)
def test_megatron_takes_the_fields_of_every_recipe(recipe: str, numbers: str, edge: int) -> None:
    model = ModelConfig(fp8=recipe, fp8_bf16_edge_layers=edge, fp8_parameters=edge > 0)
    fields = fp8.transformer_fields(model, stage_layers=4, has_experts=False)
    config = TransformerConfig(**SIZES, **fields)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (numbers, recipe, edge > 0)
    kept = [edge, edge] if config.first_last_layers_bf16 else [0, 0]
    assert kept == [config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16]


def test_more_edge_layers_than_a_stage_has_are_an_input_error() -> None:
    model = ModelConfig(fp8="blockwise", fp8_bf16_edge_layers=3)
    with pytest.raises(InputError, match="more than the 2 layers of .*; nearest possible: 2"):
        fp8.transformer_fields(model, stage_layers=2, has_experts=False)


@pytest.mark.parametrize(
    ("recipe", "is_gathered", "multiple"),
    [
        ("none", True, 1),
        ("tensorwise", True, 16),
        ("blockwise", False, 16),
        ("blockwise", True, 128),
    ],
)
def test_ranks_that_gather_positions_have_whole_blocks_of_them(
    recipe: str, is_gathered: bool, multiple: int
) -> None:
    assert fp8.position_multiple(ModelConfig(fp8=recipe), is_gathered=is_gathered) == multiple


def test_a_width_without_whole_blocks_is_an_input_error_where_it_is_gathered() -> None:
    sizes = {"stage_layers": 2, "has_experts": False}
    for recipe, width in (("blockwise", 0), ("blockwise", 256), ("tensorwise", 576)):
        model = ModelConfig(fp8=recipe)
        assert fp8.transformer_fields(model, **sizes, gathered_width=width)
    with pytest.raises(InputError, match="divisible by 128, and .* 576; .* 'tensorwise'"):
        fp8.transformer_fields(ModelConfig(fp8="blockwise"), **sizes, gathered_width=576)


def test_loaded_values_are_kept_exact_for_the_masters_and_rounded_for_the_products() -> None:
    plain, rounded = torch.zeros(2), torch.zeros(2, dtype=torch.float8_e4m3fn)
    # As TransformerEngine 2 does for parameters that it makes in FP8.
    initial = torch.zeros(2)
    rounded.get_high_precision_init_val = MethodType(lambda self: initial, rounded)
    parameters = {"plain": plain, "rounded": rounded}
    for value in fp8.exact_values(parameters).values():
        value.copy_(torch.tensor([1.0, 1.06]))
    fp8.round_to_fp8(parameters.values())
    assert plain.tolist() == pytest.approx([1.0, 1.06])
    assert initial.tolist() == pytest.approx([1.0, 1.06])
    # E4M3 has steps of 1/8 from 1 on.
    assert rounded.float().tolist() == [1.0, 1.0]
