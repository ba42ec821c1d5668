"""FLOPs against torch's counter on transformers' models, and sequences worked by hand."""

from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.plan.flops import (
    StepFlops,
    attention_flops,
    bubble_share,
    causal_pairs,
    hardware_flops,
    output_flops,
    product_flops,
    step_flops,
    step_seconds,
)
from megatron_rl.plan.parameters import active_parameters, model_parameters
from megatron_rl.weights.layout.shape import ModelShape, read_shape
from tests.tiny_models import QWEN3_MOE, write_model

TOKENS = 24


def counted(model: torch.nn.Module) -> int:
    """FLOPs of forward and backward of one sequence, counted product by product."""
    ids = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("family", "options"),
    [("Llama", {}), ("Qwen3", {"head_dim": 32}), ("Mistral", {"num_key_value_heads": 1})],
)
def test_products_are_those_that_torch_counts(tmp_path: Path, family: str, options: dict) -> None:
    write_model(tmp_path, family=family, **options)
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    shape = read_shape(tmp_path)
    forward = TOKENS * (product_flops(shape) + output_flops(shape))
    # Eager attention computes the masked half of the pairs too.
    forward += attention_flops(shape, pairs=TOKENS**2)
    assert counted(model) == 3 * forward


def test_experts_count_where_a_token_meets_them(tmp_path: Path) -> None:
    write_model(tmp_path, family="Qwen3Moe", num_hidden_layers=1, **QWEN3_MOE)
    shape = read_shape(tmp_path)
    attention = 64 * 32 * (4 + 4 + 2 + 2)
    assert product_flops(shape) == 2 * (attention + 4 * 64 + 2 * 3 * 64 * 48)
    idle = 2 * 3 * 64 * 48
    assert model_parameters(shape) - active_parameters(shape) == idle


def test_causal_pairs() -> None:
    assert causal_pairs(4) == 1 + 2 + 3 + 4
    assert causal_pairs(5, window=2) == 1 + 2 + 2 + 2 + 2
    assert causal_pairs(5, window=9) == causal_pairs(5)


def test_a_step_is_three_passes_of_all_sequences() -> None:
    shape = ModelShape(
        architecture="LlamaForCausalLM", layers=2, hidden=8, ffn=12, heads=4, kv_heads=2,
        head_dim=2, vocab=100, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        is_tied=False, has_qkv_bias=False, has_qk_norm=False, sliding_window=None,
    )  # fmt: skip
    flops = step_flops(shape, sequences=5, length=10)
    assert flops.products == 3 * 50 * 2 * 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 12)
    assert flops.attention == 3 * 5 * 4 * 2 * 8 * 55
    assert flops.output == 3 * 50 * 2 * 8 * 100
    # Recomputed: one more pass through the layers, none through the output matrix.
    assert hardware_flops(flops, recomputes_layers=True) * 3 == (
        4 * (flops.products + flops.attention) + 3 * flops.output
    )
    assert hardware_flops(flops, recomputes_layers=False) == flops.total


def test_seconds_and_bubble() -> None:
    assert step_seconds(StepFlops(60, 30, 10), gpus=4, peak_flops=50.0, mfu=0.25) == 2.0
    assert bubble_share(1, 1, 8) == 0
    assert bubble_share(4, 1, 9) == 3 / 12
    assert bubble_share(4, 3, 3) == 3 / 12
