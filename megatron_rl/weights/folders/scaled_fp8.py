"""Folders in FP8 with a scale for each block of a matrix, as DeepSeek-V3 is, or for each matrix.

Conversions dequantise them; runs refuse them, as engines would load FP8. A matrix NAME.weight has
the scales NAME.weight_scale_inv; NAME.activation_scale serves engines alone. Sources: arXiv
2412.19437, section 3.3.2; for one scale a matrix, as in Ministral 3, `FP8Linear` of transformers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.errors import InputError

_SCALES, _OF_ACTIVATIONS = "_scale_inv", ".activation_scale"


@dataclass(frozen=True)
class ScaledFp8:
    """A matrix, as safetensors' lazy slices are: its rows are dequantised when they are taken."""

    codes: Any
    """[rows, columns] in FP8."""
    scales: Any
    """[blocks of rows, blocks of columns] float32; the last blocks may reach beyond the matrix."""
    block: tuple[int, int]

    def get_dtype(self) -> str:
        """In safetensors' words."""
        return "BF16"

    def get_shape(self) -> list[int]:
        found: list[int] = self.codes.get_shape()
        return found

    def __getitem__(self, index: slice) -> Tensor:
        """Rows, [rows, columns] bfloat16."""
        height, width = self.block
        rows, columns = self.get_shape()
        first, last, _ = index.indices(rows)
        above = first // height
        scales: Tensor = self.scales[above : -(-last // height)].float()
        scales = scales.repeat_interleave(height, 0)[first - above * height :]
        scales = scales.repeat_interleave(width, 1)[: last - first, :columns]
        return (self.codes[first:last].float() * scales).to(torch.bfloat16)


def is_scaled_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes such a folder."""
    return (config.get("quantization_config") or {}).get("quant_method") == "fp8"


def dequantised(tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A folder's lazy slices, with scales applied. Raises InputError."""
    scales = {name for name in tensors if name.endswith(_SCALES)}
    if not scales:
        return tensors
    config = json.loads((folder / "config.json").read_text())
    if not is_scaled_fp8(config):
        raise InputError(
            f"{folder} has scales of quantised weights ({min(scales)}), but config.json has no "
            "quantization_config with quant_method 'fp8'"
        )
    block = config["quantization_config"].get("weight_block_size")
    found = {
        name: one
        for name, one in tensors.items()
        if name not in scales and not name.endswith(_OF_ACTIVATIONS)
    }
    for name in scales:
        weight, grid = name.removesuffix(_SCALES), tensors[name].get_shape()
        size = found[weight].get_shape() if weight in found else []
        height, width = block or (size if len(size) == 2 else (1, 1))
        fits = block is None and math.prod(grid) == 1
        if len(size) != 2 or not (fits or grid == [-(-size[0] // height), -(-size[1] // width)]):
            raise InputError(
                f"{folder}: {name} has shape {grid}, and {weight} {size or 'is not there'}: one "
                f"scale for each {height} x {width} block is needed"
            )
        values = tensors[name] if block else tensors[name][...].reshape(1, 1)
        found[weight] = ScaledFp8(found[weight], values, (height, width))
    return found
