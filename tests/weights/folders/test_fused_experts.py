"""Experts that share a tensor in files: read one by one, written together, and out of MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.conversion import Request, convert
from megatron_rl.weights.folders.fused_experts import dequantise, fuse_experts
from megatron_rl.weights.folders.text_tensors import sort_tensors
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.trainer_layout import hf_shapes
from tests.tiny_models import GPT_OSS, write_model

EXPERTS = "model.layers.1.mlp.experts"
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


class Lazy:
    """A tensor with the methods of safetensors' slices."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32"}[self._tensor.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def test_each_expert_is_a_gated_mlp_of_its_own(tmp_path: Path) -> None:
    model = write_model(tmp_path, family="GptOss", **GPT_OSS)
    shape = read_shape(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    found = sort_tensors({name: Lazy(one) for name, one in held.items()}, shape, tmp_path).text
    assert list(hf_shapes(shape)) == sorted(found, key=list(hf_shapes(shape)).index)
    layer = model.model.layers[1].mlp.experts
    x = torch.randn(5, 64)
    for expert in range(4):
        gate, up, down = (
            [found[f"{EXPERTS}.{expert}.{word}_proj.{kind}"][:] for kind in ("weight", "bias")]
            for word in ("gate", "up", "down")
        )
        left = (x @ gate[0].T + gate[1]).clamp(max=1.5)
        right = (x @ up[0].T + up[1]).clamp(-1.5, 1.5)
        ours = (left * torch.sigmoid(1.702 * left) * (right + 1)) @ down[0].T + down[1]
        with torch.no_grad():
            theirs = layer(x, torch.full((5, 1), expert), torch.ones(5, 1))
        torch.testing.assert_close(ours, theirs)
    part = found[f"{EXPERTS}.2.up_proj.weight"]
    assert torch.equal(part[3:7, 10:20], part[:][3:7, 10:20])
    again = dict(fuse_experts(((name, found[name][:]) for name in hf_shapes(shape)), shape))
    assert again.keys() == held.keys()
    assert all(torch.equal(again[name], held[name]) for name in held)


def test_mxfp4_means_what_transformers_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    # All codes, and scales whose products are subnormal, ordinary and huge.
    blocks[0, :8, 0] = torch.arange(128, dtype=torch.uint8).view(8, 16)
    blocks[0, :8, 1] = torch.arange(128, 256, dtype=torch.uint8).view(8, 16)
    scales = torch.randint(0, 250, (3, 10, 2), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales)
    for expert in range(3):
        found = dequantise(blocks[expert], scales[expert])
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(found.T, expected[expert])


def write_quantised(folder: Path) -> dict[str, Tensor]:
    """A folder as the published ones; returns what transformers makes of its quantised tensors."""
    write_model(
        folder, family="GptOss", dtype=torch.bfloat16, **{**GPT_OSS, "intermediate_size": 64}
    )
    held = load_file(folder / "model.safetensors")
    expected = dict(held)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = held.pop(name).shape
        size = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, size[:3], dtype=torch.uint8, generator=generator)
        held[f"{name}_blocks"], held[f"{name}_scales"] = blocks, scales
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **MXFP4}))
    return expected


@pytest.mark.parametrize("by_megatron", [False, True])
def test_a_published_folder_converts_to_bfloat16(by_megatron: bool, tmp_path: Path) -> None:
    expected = write_quantised(tmp_path / "source")
    source = tmp_path / "source"
    if by_megatron:
        convert(Request(source, tmp_path / "megatron", verify=True), lambda done, total: None)
        source = tmp_path / "megatron"
    convert(Request(source, tmp_path / "out", to="hf", verify=True), lambda done, total: None)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(InputError, match=r"--to hf` dequantises .* MXFP4 \(gpt-oss\)"):
        read_shape(tmp_path / "source")


def test_other_quantised_folders_and_those_without_scales_are_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    del held[f"{EXPERTS}.down_proj_scales"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 4 tensors .*it has unexpected 1 tensors .*blocks"):
        convert(Request(tmp_path, tmp_path / "out"), lambda done, total: None)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"]["quant_method"] = "fp8"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="quantised weights"):
        read_shape(tmp_path)
