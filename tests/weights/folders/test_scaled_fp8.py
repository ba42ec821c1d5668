"""Folders in FP8 with scales: conversions dequantise them, runs refuse them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.conversion import Request, convert
from megatron_rl.weights.layout.shape import read_shape
from tests.weights.folders.test_ahead import write_with_layers_ahead
from tests.weights.folders.test_round_trip import assert_equal_bits, silent, tensors_of
from tests.weights.folders.test_wrapped import TOWERS
from tests.wrapped_models import write_wrapped

BLOCK = (24, 40)
"""Divides no size of the tiny model."""


def quantise(folder: Path, block: tuple[int, int] | None = BLOCK) -> dict[str, Tensor]:
    """Quantise every projection of a text model, and return what the folder's tensors then are.

    block: None: one scale a matrix, and one for its activations.
    """
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": block,
        "activation_scheme": "dynamic" if block else "static",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    written, expected = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors_of(folder).items():
        written[name] = expected[name] = tensor
        if "_proj" not in name or tensor.dim() != 2 or name.startswith(TOWERS):
            continue
        rows, columns = tensor.shape
        height, width = block or (rows, columns)
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // height), -(-columns // width))
        meant = torch.empty(rows, columns)
        for i, row in enumerate(range(0, rows, height)):
            for j, column in enumerate(range(0, columns, width)):
                place = (slice(row, row + height), slice(column, column + width))
                scales[i, j] = tensor[place].float().abs().max() / 448
                codes[place] = (tensor[place].float() / scales[i, j]).to(codes.dtype)
                meant[place] = codes[place].float() * scales[i, j]
        written |= {name: codes, f"{name}_scale_inv": scales}
        if block is None:
            written[f"{name}_scale_inv"] = scales.reshape(())
            written[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
        expected[name] = meant.to(torch.bfloat16)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    return expected


def test_a_conversion_dequantises_the_model_and_the_layers_ahead(tmp_path: Path) -> None:
    source, hf, megatron = tmp_path / "source", tmp_path / "hf", tmp_path / "megatron"
    before = write_with_layers_ahead(source, family="DeepseekV3")
    expected = quantise(source)
    changed = [name for name in before if not torch.equal(before[name], expected[name])]
    assert any(name.startswith("model.layers.4.") for name in changed)
    convert(Request(source, hf, to="hf", verify=True), silent)
    assert_equal_bits(tensors_of(hf), expected)
    assert "quantization_config" not in json.loads((hf / "config.json").read_text())
    convert(Request(source, megatron, verify=True), silent)
    convert(Request(megatron, tmp_path / "back", files_from=hf, verify=True), silent)
    assert_equal_bits(tensors_of(tmp_path / "back"), expected)
    assert read_shape(hf) == read_shape(tmp_path / "back")
    with pytest.raises(InputError, match="convert FOLDER TARGET --to hf` dequantises FP8"):
        read_shape(source)


def test_a_wrapped_model_with_one_scale_a_matrix_is_dequantised(tmp_path: Path) -> None:
    """As Ministral 3 is published; its tower is not quantised."""
    source, hf = tmp_path / "source", tmp_path / "hf"
    write_wrapped(source, "Ministral3", dtype=torch.bfloat16)
    before = tensors_of(source)
    expected = quantise(source, None)
    assert sum(not torch.equal(before[name], expected[name]) for name in before) >= 7
    convert(Request(source, hf, to="hf", verify=True), silent)
    assert_equal_bits(tensors_of(hf), expected)
    assert "quantization_config" not in json.loads((hf / "config.json").read_text())


def _without_a_code(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]


def _with_a_row_of_scales_less(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][1:].clone()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_code, r"up_proj.weight is not there: one scale for each 24 x 40 block"),
        (_with_a_row_of_scales_less, r"up_proj.weight \[160, 64\]: one scale for each 24 x 40"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    damage: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    write_with_layers_ahead(source, family="DeepseekV3")
    quantise(source)
    tensors = tensors_of(source)
    damage(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=message):
        convert(Request(source, tmp_path / "hf", to="hf"), silent)


def test_scales_without_their_description_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_with_layers_ahead(source, family="DeepseekV3")
    quantise(source)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="has scales of quantised weights"):
        convert(Request(source, tmp_path / "hf", to="hf"), silent)
