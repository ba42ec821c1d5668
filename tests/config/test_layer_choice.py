"""Layers by GPU, packages and model; each expectation is read from TransformerEngine 2.12's source.

TransformerEngine itself needs a GPU to be imported, so that no CPU test can ask it.
"""

import dataclasses

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import GPUS, named_capability
from megatron_rl.config.layer_choice import (
    PLAIN,
    Attention,
    Device,
    choose_layers,
    describe,
    settle_layers,
)
from megatron_rl.config.trainer import ModelConfig

A100, L40S, H100, B200, RTX5090 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
SINKS = Attention(head_dim=64, has_sinks=True)
LATENT = Attention(head_dim=192, value_dim=128)
EXACT = Attention(is_deterministic=True)
ENGINE, LOCAL = "transformer_engine", "local"


@pytest.mark.parametrize(
    ("capability", "flash", "dtype", "attention", "expected"),
    [
        # cuDNN computes packed sequences from capability 9.0 on, but not on 12.0.
        (H100, "", "bfloat16", PLAIN, ENGINE),
        (B200, "", "bfloat16", PLAIN, ENGINE),
        ((10, 3), "", "bfloat16", PLAIN, ENGINE),
        (A100, "", "bfloat16", PLAIN, LOCAL),
        (L40S, "", "bfloat16", PLAIN, LOCAL),
        (RTX5090, "", "bfloat16", PLAIN, LOCAL),
        # flash-attn from 2.1.1 to 2.8.3, on Blackwell from 2.7.3; nothing on Turing.
        (A100, "2.1.1", "bfloat16", PLAIN, ENGINE),
        (A100, "2.1.0", "bfloat16", PLAIN, LOCAL),
        (L40S, "2.8.3", "bfloat16", PLAIN, ENGINE),
        (L40S, "2.8.4", "bfloat16", PLAIN, LOCAL),
        (L40S, "2.8.3.post1", "bfloat16", PLAIN, LOCAL),
        (L40S, "2.8.2+cu13", "bfloat16", PLAIN, ENGINE),
        (L40S, "4.0.0b36", "bfloat16", PLAIN, LOCAL),
        (RTX5090, "2.7.2", "bfloat16", PLAIN, LOCAL),
        (RTX5090, "2.7.3", "bfloat16", PLAIN, ENGINE),
        ((7, 5), "2.8.3", "bfloat16", PLAIN, LOCAL),
        # Windows from 2.3 on, determinism from 2.4.1 on.
        (A100, "2.2.5", "bfloat16", Attention(has_window=True), LOCAL),
        (A100, "2.3", "bfloat16", Attention(has_window=True), ENGINE),
        (A100, "2.4.0", "bfloat16", EXACT, LOCAL),
        (A100, "2.4.1", "bfloat16", EXACT, ENGINE),
        (H100, "", "bfloat16", EXACT, ENGINE),
        # No kernel for float32 anywhere.
        (H100, "2.8.3", "float32", PLAIN, LOCAL),
        (A100, "2.8.3", "float32", PLAIN, LOCAL),
        # Sinks: cuDNN alone, and not deterministically.
        (H100, "", "bfloat16", SINKS, ENGINE),
        (H100, "2.8.3", "bfloat16", dataclasses.replace(SINKS, is_deterministic=True), LOCAL),
        (L40S, "2.8.3", "bfloat16", SINKS, LOCAL),
        # Heads: wide ones on Hopper, or by flash-attn; latent attention never by flash-attn.
        (H100, "", "bfloat16", Attention(head_dim=256), ENGINE),
        (B200, "", "bfloat16", Attention(head_dim=256), LOCAL),
        (B200, "2.8.3", "bfloat16", Attention(head_dim=256), ENGINE),
        (L40S, "2.8.3", "bfloat16", Attention(head_dim=256), LOCAL),
        (H100, "", "bfloat16", Attention(head_dim=264), LOCAL),
        (H100, "", "bfloat16", Attention(head_dim=100), LOCAL),
        (H100, "", "bfloat16", LATENT, ENGINE),
        (B200, "", "bfloat16", LATENT, ENGINE),
        (H100, "", "bfloat16", Attention(head_dim=256, value_dim=192), LOCAL),
        (A100, "2.8.3", "bfloat16", LATENT, LOCAL),
    ],
)
def test_auto_takes_the_engines_layers_where_it_has_a_kernel(
    capability: tuple[int, int], flash: str, dtype: str, attention: Attention, expected: str
) -> None:
    device = Device(capability, flash)
    model = ModelConfig(dtype=dtype)
    choice = choose_layers(model, attention, device)
    assert choice.layers == expected
    # The note says why, and only then; what speaks of a run before its start agrees.
    assert bool(choice.reason) is (expected == LOCAL)
    settled, note = settle_layers(model, attention, device)
    assert settled.layers == (LOCAL if expected == LOCAL else "auto")
    assert note == describe(choice)
    # An explicit choice is taken or refused, never replaced.
    named = model.model_copy(update={"layers": LOCAL})
    assert choose_layers(named, attention, device).layers == LOCAL
    named = model.model_copy(update={"layers": ENGINE})
    if expected == ENGINE:
        assert choose_layers(named, attention, device).layers == ENGINE
    else:
        with pytest.raises(InputError, match="nearest possible: "):
            choose_layers(named, attention, device)


FLASH = "pip install flash-attn==2.8.3 --no-build-isolation, or "


@pytest.mark.parametrize(
    ("device", "attention", "keys", "start", "nearest"),
    [
        (
            Device(L40S), PLAIN, {"layers": ENGINE},
            "expert.model.layers = 'transformer_engine': TransformerEngine has no attention kernel "
            "for packed sequences on compute capability 8.9 without flash-attn, and",
            f"{FLASH}expert.model.layers = 'local'",
        ),
        (
            Device(RTX5090, "2.7.2"), PLAIN, {"fp8": "tensorwise"},
            "model.fp8 = 'tensorwise': TransformerEngine has no attention kernel for packed "
            "sequences on compute capability 12.0 with flash-attn 2.7.2, and",
            f"{FLASH}model.fp8 = 'none'",
        ),
        (
            Device(A100), PLAIN, {"fp8": "blockwise", "layers": ENGINE},
            "expert.model.layers = 'transformer_engine' and model.fp8 = 'blockwise': ",
            f"{FLASH}expert.model.layers = 'local' and model.fp8 = 'none'",
        ),
        (
            Device(H100), PLAIN, {"layers": ENGINE, "dtype": "float32"},
            "expert.model.layers = 'transformer_engine': TransformerEngine has no attention kernel "
            "for model.dtype = 'float32', and",
            "model.dtype = 'bfloat16', or expert.model.layers = 'local'",
        ),
        (
            Device(H100), dataclasses.replace(SINKS, is_deterministic=True), {"layers": ENGINE},
            "expert.model.layers = 'transformer_engine': TransformerEngine has no deterministic "
            "kernel for sinks on compute capability 9.0, and",
            "train.deterministic = false, or expert.model.layers = 'local'",
        ),
        (
            Device(L40S), SINKS, {"fp8": "blockwise"},
            "model.fp8 = 'blockwise': TransformerEngine has no kernel for sinks on compute "
            "capability 8.9, and",
            "model.fp8 = 'none'",
        ),
        (
            Device(L40S), LATENT, {"layers": ENGINE},
            "expert.model.layers = 'transformer_engine': TransformerEngine has no attention kernel "
            "for packed sequences with heads of 192 dimensions on compute capability 8.9, and",
            "expert.model.layers = 'local'",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_keys_the_fault_and_the_nearest_settings(
    device: Device, attention: Attention, keys: dict[str, str], start: str, nearest: str
) -> None:
    with pytest.raises(InputError) as caught:
        choose_layers(ModelConfig(**keys), attention, device)
    text = str(caught.value)
    assert text.startswith(start)
    assert text.endswith(f"keeps the scores of all pairs of tokens; nearest possible: {nearest}")


@pytest.mark.parametrize("device", [None, Device(H100, has_engine=False)])
def test_without_the_engine_only_what_needs_it_is_refused(device: Device | None) -> None:
    choice = choose_layers(ModelConfig(), PLAIN, device)
    assert (choice.layers, describe(choice)) == (LOCAL, "")
    for model in (ModelConfig(layers=ENGINE), ModelConfig(fp8="blockwise")):
        with pytest.raises(InputError, match="needs a CUDA device and the package transformer-eng"):
            choose_layers(model, PLAIN, device)


def test_the_note_of_auto_names_its_key_and_the_reason() -> None:
    _, note = settle_layers(ModelConfig(), PLAIN, Device(L40S))
    assert note == (
        "the trainer takes the local layers (expert.model.layers = 'auto'): TransformerEngine has "
        "no attention kernel for packed sequences on compute capability 8.9 without flash-attn"
    )


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("a100-40g", A100),
        ("NVIDIA A10", (8, 6)),
        ("rtx3090", (8, 6)),
        ("rtx4090", L40S),
        ("NVIDIA GeForce RTX 4090", L40S),
        ("NVIDIA L40", L40S),
        ("NVIDIA L4", L40S),
        ("rtx-5090", RTX5090),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", RTX5090),
        ("NVIDIA GH200 480GB", H100),
        ("GB200", B200),
        ("NVIDIA B300", (10, 3)),
        ("mi300x", None),
        ("t4", None),
    ],
)
def test_a_gpu_has_the_capability_of_its_series(
    name: str, capability: tuple[int, int] | None
) -> None:
    assert named_capability(name) == capability


def test_gpus_of_the_table_are_of_the_expected_architectures() -> None:
    # NVIDIA's Ampere, Ada, Hopper and Blackwell.
    majors = {name: gpu.capability for name, gpu in GPUS.items()}
    assert majors == {
        "a100-40g": A100, "a100-80g": A100, "l40s-48g": L40S, "h100-80g": H100, "h200-141g": H100,
        "b200-180g": B200,
    }  # fmt: skip
