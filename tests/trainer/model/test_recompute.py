"""Modules that are computed again give the same gradients, and keep as much less as predicted."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig
from megatron_rl.plan.activations import (
    Microbatch,
    activation_bytes,
    recomputed_elements,
)
from megatron_rl.plan.flops import (
    hardware_flops,
    product_flops,
    recomputed_flops,
    step_flops,
)
from megatron_rl.trainer.model.build import packed, transformer_config
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import run_ranks
from tests.tiny_models import QWEN3_MOE, load_on_rank, write_model

TOKENS, LAYERS = 96, 2
CORE, NORM, MLP, MOE = ("core_attn",), ("layernorm",), ("mlp",), ("moe",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("dense", "mixture")}
    write_model(made["dense"], num_hidden_layers=LAYERS)
    write_model(made["mixture"], family="Qwen3Moe", num_hidden_layers=LAYERS, **QWEN3_MOE)
    return made


def pass_through(folder: Path, modules: tuple[str, ...] | None) -> tuple[Tensor, int]:
    """All gradients in one, and bytes that the forward pass keeps, parameters left out."""
    how = {"recompute": "selective", "modules": modules} if modules else {}
    loaded = load_on_rank(folder, ParallelConfig(), **how)
    [chunk] = loaded.model
    own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = (torch.arange(TOKENS)[None] * 7) % loaded.shape.vocab
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = chunk(
            ids, torch.arange(TOKENS)[None], None, packed_seq_params=packed([60, TOKENS - 60])
        )
    # What is discarded to be recomputed has no storage any more.
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    kept.clear()
    logits.square().mean().backward()
    return torch.cat([p.main_grad.flatten() for p in chunk.parameters()]), size


@pytest.mark.parametrize(
    ("kind", "choices"),
    [("dense", [CORE, MLP, (*CORE, *MLP)]), ("mixture", [MOE, (*CORE, *MOE)])],
)
def test_gradients_are_the_same_and_less_is_kept(
    folders: dict[str, Path], kind: str, choices: list[tuple[str, ...]]
) -> None:
    folder = folders[kind]
    [(expected, whole)] = run_ranks(pass_through, 1, folder, None)
    assert expected.abs().max() > 0
    shape = read_shape(folder)
    for modules in choices:
        [(found, size)] = run_ranks(pass_through, 1, folder, modules)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.max()))
        spared = (whole - size) / (4 * TOKENS * LAYERS)
        predicted = recomputed_elements(shape, ParallelConfig(), modules)
        # A gated MLP on the CPU keeps two tensors less in the first place.
        predicted -= 2 * shape.ffn if "mlp" in modules else 0
        if "core_attn" in modules:
            # Attention on the CPU keeps its result twice, and sums, until it is computed again.
            assert spared >= 0.97 * predicted
        else:
            assert spared == pytest.approx(predicted, rel=0.03)


def config_of(folder: Path, *modules: str) -> tuple[str, list[str]]:
    """What Megatron is told."""
    loaded = load_on_rank(folder, ParallelConfig(), recompute="selective", modules=modules)
    config = transformer_config(loaded.backend, loaded.cfg, loaded.shape)
    return config.recompute_granularity, config.recompute_modules


def refusal(folder: Path, *modules: str) -> str:
    try:
        config_of(folder, *modules)
    except InputError as error:
        return str(error)
    return ""


def test_megatron_is_told_the_modules(folders: dict[str, Path]) -> None:
    [found] = run_ranks(config_of, 1, folders["dense"], "core_attn", "mlp")
    assert found == ("selective", ["core_attn", "mlp"])


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        ("dense", "moe", "is a dense model, which has no moe; nearest possible: 'mlp'"),
        ("mixture", "mlp", "is a mixture of experts, which has no mlp; nearest possible: 'moe'"),
        ("mixture", "moe_act", "moe_act need TransformerEngine's layers"),
        ("dense", "layernorm", "layernorm need TransformerEngine's layers"),
    ],
)
def test_a_module_that_is_not_there_is_refused(
    folders: dict[str, Path], kind: str, module: str, words: str
) -> None:
    [found] = run_ranks(refusal, 1, folders[kind], module)
    assert words in found


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (['model.recompute_modules=["mlp"]'], "has no effect with model.recompute='none'"),
        (["model.recompute=selective", "model.recompute_modules=[]"], "at least one module"),
        (
            ["model.recompute=selective", 'model.recompute_modules=["moe", "moe_act"]'],
            "moe holds moe_act already",
        ),
        (
            ["model.recompute=selective", 'model.recompute_modules=["layernorm"]',
             "model.fp8=delayed"],
            "nearest possible: model.fp8='tensorwise'",
        ),
        (["model.recompute=selective", 'model.recompute_modules=["mla"]'], "core_attn"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_load(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


def test_memory_and_flops_worked_by_hand(folders: dict[str, Path]) -> None:
    shape = read_shape(folders["mixture"])
    top, ffn, hidden = shape.experts_per_token, shape.moe_ffn, shape.hidden
    assert recomputed_elements(shape, ParallelConfig(), MOE) == (
        top * (hidden + 6 * ffn) + 2 * shape.experts
    )
    assert recomputed_elements(shape, ParallelConfig(), ("moe_act", "layernorm")) == (
        top * 4 * ffn + hidden
    )
    assert recomputed_elements(shape, ParallelConfig(), CORE) == 0
    none, selective = (
        activation_bytes(shape, ParallelConfig(), Microbatch(10, 4), stage=0, item_bytes=2,
                         recompute=recompute, modules=MOE)
        for recompute in ("none", "selective")
    )  # fmt: skip
    # No layer keeps anything of it, and one at a time computes it again.
    again = recomputed_elements(shape, ParallelConfig(), MOE)
    assert none.kept - selective.kept == 10 * 2 * again * LAYERS
    assert selective.backward - none.backward == 10 * 2 * again
    flops = step_flops(shape, sequences=3, length=8)
    experts = top * 3 * hidden * ffn + shape.experts * hidden
    more = recomputed_flops(shape, MOE, sequences=3, length=8)
    assert more == 2 * LAYERS * experts * 24
    assert more < 24 * product_flops(shape)
    assert hardware_flops(flops, recomputes_layers=False, again=more) == flops.total + more
    assert recomputed_flops(shape, CORE, sequences=3, length=8) * 3 == flops.attention
    assert recomputed_flops(shape, NORM, sequences=3, length=8) == 0


def test_a_config_with_modules_can_be_turned_to_whole_layers() -> None:
    config = load_config(None, ["model.recompute=full", 'model.recompute_modules=["mlp"]'])
    assert config.model.recompute == "full"


def test_the_default_is_that_of_before() -> None:
    assert Config(model=ModelConfig(recompute="selective")).model.recompute_modules == CORE
