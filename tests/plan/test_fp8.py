"""Elements that codes in FP8 spare, and weights that have copies, worked out by hand."""

from dataclasses import replace

import pytest

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.plan.activations import Microbatch, activation_bytes
from megatron_rl.plan.fp8 import Fp8, quantized_elements, spared_elements
from tests.plan.test_activations import SHAPE

EXPERTS = replace(SHAPE, experts=4, experts_per_token=2, moe_ffn=6, shared_ffn=10)
BLOCK_SHARE = 1 - (1 + 4 / 128) / 2
"""Of two bytes: a code, and its part of the scale of 128."""


@pytest.mark.parametrize(
    ("recipe", "recompute", "modules", "spared"),
    [
        # Half of two norms' outputs of 8, and of the 12 behind the gate.
        ("tensorwise", "none", (), (4 + 10, 0)),
        ("tensorwise", "selective", ("mlp",), (4, 10)),
        ("tensorwise", "full", (), (0, 14)),
        ("blockwise", "none", (), (28 * BLOCK_SHARE, 0)),
        # The result of attention, 8, has codes beside what attention keeps.
        ("delayed", "none", (), (4 - 4 + 10, 0)),
    ],
)
def test_codes_take_half_of_the_inputs_of_a_dense_layer(
    recipe: str, recompute: str, modules: tuple[str, ...], spared: tuple[float, float]
) -> None:
    assert spared_elements(SHAPE, ParallelConfig(), Fp8(recipe), recompute, modules) == spared


@pytest.mark.parametrize(
    ("recipe", "modules", "spared"),
    [
        # Two experts of each token have inputs of 8 and of 6; the shared ones' second product 10.
        ("tensorwise", (), (4 + (16 + 12 + 10) / 2, 0)),
        ("tensorwise", ("moe", "layernorm"), (4, 19)),
        ("tensorwise", ("moe_act",), (4 + 19 - 6, 0)),
        # The router keeps the input of shared experts, which have codes of it too.
        ("delayed", (), (4 - 4 + 19 - 4, 0)),
    ],
)
def test_codes_of_experts(
    recipe: str, modules: tuple[str, ...], spared: tuple[float, float]
) -> None:
    assert spared_elements(EXPERTS, ParallelConfig(), Fp8(recipe), "selective", modules) == spared


def test_weights_of_products_have_copies_but_those_of_edge_layers() -> None:
    # Queries, keys, values and the output; gate, up and down.
    layer = 8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 12
    fp8 = Fp8("blockwise", edge_layers=1)
    assert quantized_elements(SHAPE, ParallelConfig(), 0, None) == 0
    assert quantized_elements(SHAPE, ParallelConfig(), 0, Fp8("blockwise")) == 4 * layer
    assert quantized_elements(SHAPE, ParallelConfig(), 0, fp8) == 2 * layer
    assert quantized_elements(SHAPE, ParallelConfig(tensor=2, pipeline=2), 1, fp8) == layer // 2
    # Shared experts of 10, and two of four experts of 6.
    layer = 192 + 3 * 8 * 10 + 2 * 3 * 8 * 6
    assert quantized_elements(EXPERTS, ParallelConfig(expert=2), 0, Fp8("delayed")) == 4 * layer


def test_layers_at_the_edges_keep_as_much_as_without_fp8() -> None:
    found = activation_bytes(SHAPE, ParallelConfig(), Microbatch(10, 1), stage=0, item_bytes=2,
                             recompute="none", is_fused=True,
                             fp8=Fp8("tensorwise", edge_layers=1))  # fmt: skip
    # A fused layer keeps 104; the embedding 8, and the last norm twice 8.
    assert found.kept == 10 * 2 * (2 * 104 + 2 * (104 - 14) + 8 + 2 * 8)
