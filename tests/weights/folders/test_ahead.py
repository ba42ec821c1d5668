"""Layers that predict further tokens, and corrections of routers, come unchanged to exports."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ParallelConfig
from megatron_rl.weights.folders.conversion import Request, convert
from tests.distributed import run_ranks
from tests.tiny_models import CORRECTION, GLM4_MOE, LATENT, write_model
from tests.weights.folders.test_export import save_and_wait
from tests.weights.folders.test_round_trip import assert_equal_bits, silent, tensors_of

AHEAD = "model.layers.4."


def write_with_layers_ahead(
    folder: Path, dtype: torch.dtype = torch.bfloat16, family: str = "Glm4Moe"
) -> dict[str, Tensor]:
    """A folder as GLM-4.5's: a fifth layer after the model's four. Returns its tensors."""
    options = GLM4_MOE if family == "Glm4Moe" else LATENT
    write_model(folder, family=family, dtype=dtype, **options)
    tensors = load_file(folder / "model.safetensors")
    copied = {
        name.replace("model.layers.3.", AHEAD): tensor + 1
        for name, tensor in tensors.items()
        if name.startswith("model.layers.3.")
    }
    copied[f"{AHEAD}eh_proj.weight"] = torch.randn(64, 128).to(dtype)
    copied[f"{AHEAD}shared_head.head.weight"] = torch.randn(250, 64).to(dtype)
    save_file(tensors | copied, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors | copied


def test_they_come_back_from_a_checkpoint_with_the_source_at_hand(tmp_path: Path) -> None:
    source, megatron = tmp_path / "source", tmp_path / "megatron"
    expected = write_with_layers_ahead(source)
    convert(Request(source, megatron, verify=True), silent)
    convert(Request(megatron, tmp_path / "whole", verify=True, files_from=source), silent)
    assert_equal_bits(tensors_of(tmp_path / "whole"), expected)
    convert(Request(megatron, tmp_path / "alone", verify=True), silent)
    own = {name: tensor for name, tensor in expected.items() if not name.startswith(AHEAD)}
    assert len(own) < len(expected)
    assert_equal_bits(tensors_of(tmp_path / "alone"), own)


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3"])
def test_an_export_of_ranks_has_them(family: str, tmp_path: Path) -> None:
    source, target = tmp_path / "m", tmp_path / "out"
    expected = write_with_layers_ahead(source, family=family)
    run_ranks(save_and_wait, 2, source, target, ParallelConfig(pipeline=2), "bfloat16")
    assert_equal_bits(tensors_of(target), expected)
    written, given = (json.loads((one / "config.json").read_text()) for one in (target, source))
    assert written["num_nextn_predict_layers"] == given["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_another_dtype_leaves_corrections_and_layers_ahead_alone(to: str, tmp_path: Path) -> None:
    source, middle = tmp_path / "a", tmp_path / "b"
    given = write_with_layers_ahead(source, torch.float32)
    convert(Request(source, middle, to=to, dtype="bfloat16"), silent)
    back = middle
    if to == "megatron":
        back = tmp_path / "c"
        convert(Request(middle, back, files_from=source), silent)
    expected = {
        name: tensor if name.endswith(CORRECTION) or name.startswith(AHEAD) else tensor.bfloat16()
        for name, tensor in given.items()
    }
    assert_equal_bits(tensors_of(back), expected)


def test_a_layer_ahead_is_unexpected_where_the_family_has_none(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors[f"{AHEAD}input_layernorm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"unexpected 1 tensors .*layers\.4\.input_layernorm"):
        convert(Request(tmp_path / "a", tmp_path / "b"), silent)
