"""What a product in FP8 keeps and sends, by shape: bytes worked out by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.backend.fp8 import free_codes
from megatron_rl.rehearsal import observed
from megatron_rl.rehearsal.device import DEVICE
from megatron_rl.rehearsal.engine_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    FP8GlobalStateManager,
    Recipe,
    checkpoint,
    fp8_autocast,
)
from megatron_rl.rehearsal.engine_layers import GroupedLinear, LayerNormLinear, Linear
from megatron_rl.rehearsal.tracer import Tracer

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=2),
    "tensorwise": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
}
POSITIONS, WIDTH, OUT, RANKS = 256, 512, 384, 4
CODES = POSITIONS * WIDTH
"""Bytes of the codes of an input."""
# Two copies; blocks of 128 x 128 have a scale each, whose rows are padded to four.
WEIGHTS = {
    "delayed": 2 * OUT * WIDTH + 4,
    "tensorwise": 2 * OUT * WIDTH + 4,
    "blockwise": 2 * OUT * WIDTH + 4 * (3 * 4 + 4 * 4),
}
KEPT = {
    "delayed": CODES + 4,
    "tensorwise": CODES + 4,
    "blockwise": CODES + 4 * (POSITIONS // 128) * WIDTH,
}
"""Bytes of transposed codes and their scales; a block is 128 positions of a column."""
# A scale, and two maxima, of three tensors forward and two backward.
MAXIMA = {"delayed": 5 * (1 + 2) * 4, "tensorwise": 0, "blockwise": 0}


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """Rank 1 of RANKS; nobody else takes part."""
    found = Tracer(DEVICE)
    monkeypatch.setattr(observed, "add_flops", found.add_flops)
    monkeypatch.setattr(observed, "in_purpose", found.memory.in_purpose)
    monkeypatch.setattr(FP8GlobalStateManager, "maxima", {})
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    try:
        with found:
            yield found
    finally:
        dist.destroy_process_group()


def inputs_of(width: int = WIDTH) -> Tensor:
    return torch.empty(POSITIONS, width, dtype=torch.bfloat16, device="meta", requires_grad=True)


def layer_of(kind: type[Linear], **options: Any) -> Any:
    sizes = {"in_features": WIDTH, "out_features": OUT, "bias": False}
    return kind(**sizes, params_dtype=torch.bfloat16, device="meta", **options)


def divided(mode: str) -> dict[str, Any]:
    """Options of a layer whose positions and weight tensor ranks divide."""
    world = dist.group.WORLD
    return {"parallel_mode": mode, "tp_group": world, "tp_size": RANKS, "sequence_parallel": True}


def forward(layer: Any, given: Tensor, recipe: Recipe, *more: Any) -> Tensor:
    with fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=dist.group.WORLD):
        found = layer(given, *more, is_first_microbatch=True)
    assert isinstance(found, Tensor)
    return found


def events(tracer: Tracer) -> list[tuple[str, int]]:
    found = [(event.kind, event.bytes) for event in tracer.events]
    tracer.events.clear()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_keeps_transposed_codes_of_its_input_and_both_of_its_weight(
    tracer: Tracer, recipe: str
) -> None:
    layer, given = layer_of(Linear), inputs_of()
    before = tracer.memory.current
    result = forward(layer, given, RECIPES[recipe])
    held = tracer.memory.current - before - result.nbytes
    assert held == KEPT[recipe] + WEIGHTS[recipe] + MAXIMA[recipe]
    result.backward(torch.empty_like(result))
    # Gradients of the weight and of the input stay, and the codes of the weight.
    gradients = 2 * (OUT * WIDTH + POSITIONS * WIDTH)
    left = tracer.memory.current - before - result.nbytes - gradients
    assert left == WEIGHTS[recipe] + MAXIMA[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_norm_before_a_product_keeps_its_input_and_codes_alone(
    tracer: Tracer, recipe: str
) -> None:
    layer, given = layer_of(LayerNormLinear), inputs_of()
    before = tracer.memory.current
    result = forward(layer, given, RECIPES[recipe])
    # A float32 scale of the norm for each position; its result is gone.
    held = tracer.memory.current - before - result.nbytes
    assert held == KEPT[recipe] + 4 * POSITIONS + WEIGHTS[recipe] + MAXIMA[recipe]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_product_whose_input_is_kept_elsewhere_keeps_no_codes(
    tracer: Tracer, recipe: str
) -> None:
    layer, given = layer_of(Linear), inputs_of()
    layer.save_original_input = True
    before = tracer.memory.current
    result = forward(layer, given, RECIPES[recipe])
    assert tracer.memory.current - before - result.nbytes == WEIGHTS[recipe]


def test_experts_have_scales_of_their_own(tracer: Tracer) -> None:
    sizes = {"num_gemms": 2, "in_features": WIDTH, "out_features": OUT, "bias": False}
    layer = GroupedLinear(**sizes, params_dtype=torch.bfloat16, device="meta")
    given = inputs_of()
    before = tracer.memory.current
    result = forward(layer, given, RECIPES["blockwise"], [16, 240])
    # 16 rows are one block of a column, and 240 are two.
    kept = CODES + 4 * (1 + 2) * WIDTH
    held = tracer.memory.current - before - result.nbytes
    assert held == kept + 2 * WEIGHTS["blockwise"]


def test_weights_are_quantised_once_for_all_microbatches(tracer: Tracer) -> None:
    layer, given = layer_of(Linear), inputs_of()
    sizes = []
    for is_first in (True, False, True):
        with fp8_autocast(enabled=True, fp8_recipe=RECIPES["tensorwise"]):
            layer(given, is_first_microbatch=is_first).sum().backward()
        sizes.append(tracer.memory.current)
    assert sizes[1:] == sizes[:1] * 2
    with torch.no_grad(), fp8_autocast(enabled=True, fp8_recipe=RECIPES["tensorwise"]):
        layer(given, is_first_microbatch=True)
    # No backward pass needs the transposed codes.
    assert sizes[0] - tracer.memory.current == OUT * WIDTH


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_that_leaves_the_device_takes_the_codes_of_its_weights_along(
    tracer: Tracer, recipe: str
) -> None:
    sizes = {"num_gemms": 2, "in_features": WIDTH, "out_features": OUT, "bias": False}
    experts = GroupedLinear(**sizes, params_dtype=torch.bfloat16, device="meta")
    norm = torch.nn.LayerNorm(WIDTH, device="meta")
    model, given = torch.nn.ModuleList([layer_of(Linear), experts, norm]), inputs_of()
    # By rows alone, as there is no backward pass; blocks have three rows of four scales.
    codes = OUT * WIDTH + 4 * (3 * 4 if recipe == "blockwise" else 1)
    before = tracer.memory.current
    for _ in range(2):
        with torch.no_grad():
            forward(model[0], given, RECIPES[recipe])
            forward(model[1], given, RECIPES[recipe], [16, 240])
        # Experts have maxima of two products.
        assert tracer.memory.current - before == 3 * codes + 3 * MAXIMA[recipe]
        free_codes([model])
        assert tracer.memory.current - before == 3 * MAXIMA[recipe]


GATHERED = {
    "delayed": [("all_gather", CODES)],
    # The maximum, so that all ranks have one scale.
    "tensorwise": [("all_reduce", 4), ("all_gather", CODES)],
    # With scales of 128 elements of a row, in one call.
    "blockwise": [("all_gather", CODES + 4 * (WIDTH // 128) * POSITIONS)],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_ranks_gather_codes_of_one_byte(tracer: Tracer, recipe: str) -> None:
    layer, given = layer_of(LayerNormLinear, **divided("column")), inputs_of()
    result = forward(layer, given, RECIPES[recipe])
    maxima = [("all_reduce", 3 * 4)] if recipe == "delayed" else []
    assert events(tracer) == GATHERED[recipe] + maxima
    result.backward(torch.empty_like(result))
    # Again for the gradient of the weight: codes that are kept have their scales.
    again = 4 * (POSITIONS // 128) * WIDTH if recipe == "blockwise" else 0
    reduced = ("reduce_scatter", 2 * RANKS * POSITIONS * WIDTH)
    maxima = [("all_reduce", 2 * 4)] if recipe == "delayed" else []
    assert events(tracer) == [("all_gather", CODES + again), reduced, *maxima]


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_ranks_gather_codes_of_gradients(tracer: Tracer, recipe: str) -> None:
    layer, given = layer_of(Linear, **divided("row")), inputs_of(WIDTH // RANKS)
    result = forward(layer, given, RECIPES[recipe])
    events(tracer)
    result.backward(torch.empty_like(result))
    own = POSITIONS // RANKS
    sizes = {
        "delayed": [("all_gather", own * OUT), ("all_reduce", 2 * 4)],
        "tensorwise": [("all_reduce", 4), ("all_gather", own * OUT)],
    }
    # 64 positions are no whole block: gradients go in bfloat16.
    assert events(tracer) == sizes.get(recipe, [("all_gather", 2 * own * OUT)])


def test_recomputed_layers_reduce_their_maxima_again(tracer: Tracer) -> None:
    """As TransformerEngine: each recomputed call is a context, and each of its layers the first."""
    square = Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="meta")
    layers = [square, layer_of(Linear)]

    def call(given: Tensor) -> Tensor:
        for layer in layers:
            given = layer(given, is_first_microbatch=False)
        return given

    with fp8_autocast(fp8_recipe=RECIPES["delayed"], fp8_group=dist.group.WORLD):
        result = checkpoint(call, inputs_of())
    forward_maxima, backward_maxima = ("all_reduce", 2 * 3 * 4), ("all_reduce", 2 * 2 * 4)
    assert events(tracer) == [forward_maxima]
    result.backward(torch.empty_like(result))
    assert events(tracer) == [forward_maxima, backward_maxima, backward_maxima]


def test_sizes_that_fp8_products_do_not_take_are_refused(tracer: Tracer) -> None:
    layer = layer_of(Linear)
    odd = torch.empty(12, WIDTH, dtype=torch.bfloat16, device="meta")
    with pytest.raises(AssertionError, match="a multiple of 8 rows and of 16 columns, not 12 x"):
        forward(layer, odd, RECIPES["tensorwise"])
