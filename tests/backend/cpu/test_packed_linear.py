"""Reordered copies of weights: exact products, and never one of older weights."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from generation.engine import load_engine
from megatron_rl.protocol.engine_requests import DETERMINISTIC_VARIABLE
from megatron_rl.protocol.types import Sampling
from megatron_rl.weights.layout.shape import read_shape
from tests.backend.cpu.site_modules import import_shim
from tests.generation.engine_driver import Driver, make_setup
from tests.generation.syncer import SliceSyncer, TrainerProcess
from tests.generation.tiny_model import logprobs, make_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]
WIDE = {
    "hidden_size": 512,
    "num_hidden_layers": 1,
    "intermediate_size": 512,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
"""Each linear layer but the output layer is large enough to be reordered."""


@pytest.fixture
def packed() -> Iterator[ModuleType]:
    module = import_shim("packed_linear")
    module.COPIES.is_watched = True
    yield module
    module.COPIES.is_watched = False


def make_layer(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(512, 512, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 33, 64, 257])
def test_products_are_those_of_the_plain_layer(
    packed: ModuleType, dtype: torch.dtype, rows: int
) -> None:
    layer = make_layer(dtype)
    x = torch.randn(rows, 512, dtype=dtype)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for bias in (layer.bias, None):
        expected = exact if bias is not None else exact - layer.bias.double()
        found = packed.multiply(layer, x, bias)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("units", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_row_rounds_alike_among_any_number_of_rows(
    packed: ModuleType, dtype: torch.dtype, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DETERMINISTIC_VARIABLE, "1")
    torch.manual_seed(0)
    layer = torch.nn.Linear(units, units, dtype=dtype).requires_grad_(False)
    x = torch.randn(600, units, dtype=dtype)
    whole = packed.multiply(layer, x, layer.bias)
    for rows in (1, 2, 3, 4, 5, 16, 33, 64, 257):
        for first in (0, 300):
            found = packed.multiply(layer, x[first : first + rows].contiguous(), layer.bias)
            assert torch.equal(found, whole[first : first + rows]), rows


def round_by(
    packed: ModuleType, monkeypatch: pytest.MonkeyPatch, error: Callable[[int], torch.Tensor]
) -> torch.nn.Linear:
    """A layer on a CPU that errs by `error` of the number of rows, [rows, 1]."""
    monkeypatch.setenv(DETERMINISTIC_VARIABLE, "1")
    product = packed._product
    monkeypatch.setattr(
        packed, "_product", lambda *given: product(*given) + error(given[1].shape[0])
    )
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64).requires_grad_(False)


def test_cpu_that_rounds_by_the_number_of_rows_multiplies_in_blocks(
    packed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = round_by(packed, monkeypatch, lambda count: torch.full((count, 1), float(count > 20)))
    x = torch.randn(50, 64)
    whole = packed.multiply(layer, x, layer.bias)
    for first, last in ((0, 1), (3, 40), (49, 50), (7, 7)):
        assert torch.equal(packed.multiply(layer, x[first:last], layer.bias), whole[first:last])
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_cpu_that_rounds_by_the_place_of_a_row_is_refused(
    packed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = round_by(packed, monkeypatch, lambda count: torch.arange(count)[:, None] * 1e-3)
    with pytest.raises(RuntimeError, match=r"matrix of \[64, 64\] rounds by its place among 16"):
        packed.multiply(layer, torch.zeros(5, 64))


def test_a_write_voids_the_copy_even_if_torch_does_not_see_it(packed: ModuleType) -> None:
    layer, x = make_layer(torch.float32), torch.randn(8, 512)
    before = packed.multiply(layer, x)
    assert layer.__dict__["_reordered"][2] is not None
    seen = layer.weight._version
    with packed.COPIES.voided():
        # So do SGLang's loaders, and so does gloo.
        layer.weight.data.mul_(2)
    assert layer.weight._version == seen
    torch.testing.assert_close(packed.multiply(layer, x), 2 * before, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="midway"), packed.COPIES.voided():
        packed.multiply(layer, x)
        layer.weight.data.mul_(2)
        raise ValueError("midway")
    torch.testing.assert_close(packed.multiply(layer, x), 4 * before, atol=1e-5, rtol=1e-5)


def test_nothing_is_kept_while_nobody_counts_updates(packed: ModuleType) -> None:
    packed.COPIES.is_watched = False
    layer = make_layer(torch.float32)
    packed.multiply(layer, torch.randn(8, 512))
    assert "_reordered" not in layer.__dict__


def test_small_layers_and_other_types_stay_plain(packed: ModuleType) -> None:
    weight = torch.zeros(512, 512)
    assert packed.is_worthwhile(weight, torch.zeros(8, 512))
    assert not packed.is_worthwhile(weight[:64], torch.zeros(8, 512))
    assert not packed.is_worthwhile(weight, torch.zeros(1, 512))
    assert not packed.is_worthwhile(weight.half(), torch.zeros(8, 512).half())
    assert not packed.is_worthwhile(weight, torch.zeros(8, 512).bfloat16())


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("wide")
    return {
        str(folder / str(seed)): make_model(folder / str(seed), seed, **WIDE) for seed in (0, 1)
    }


@pytest.mark.slow(40)
@pytest.mark.timeout(300)
def test_a_weight_sync_of_an_engine_reaches_its_products(
    wide_models: dict[str, LlamaForCausalLM], tmp_path: Path
) -> None:
    (old_folder, old), (_, new) = wide_models.items()
    trainer = TrainerProcess()
    loop = asyncio.new_event_loop()
    setup = make_setup(Path(old_folder).parent, tmp_path / "engine.log", model=Path(old_folder))
    driver = Driver(load_engine("sglang")(setup), loop)

    def check(model: LlamaForCausalLM) -> None:
        # Eight at once: products of fewer rows use no copy in float32.
        for found in driver.run(driver.collect(PROMPT, Sampling(12, 1.0), list(range(8)))):
            torch.testing.assert_close(
                torch.tensor(found.logprobs),
                logprobs(model, PROMPT, found.token_ids),
                atol=1e-5,
                rtol=0,
            )

    try:
        loop.run_until_complete(driver.engine.start())
        check(old)
        slices = SliceSyncer(driver.engine, trainer, read_shape(Path(old_folder)), "slices")
        driver.run(slices.open())
        driver.run(slices.sync(new, 1))
        check(new)
        driver.run(slices.sync(old, 2))
        check(old)
        driver.run(slices.close())
    finally:
        loop.run_until_complete(driver.engine.close())
        loop.close()
        trainer.close()
