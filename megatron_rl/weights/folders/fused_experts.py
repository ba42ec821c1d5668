"""Experts that files hold in one tensor of each kind, and their names elsewhere.

Used by trainer ranks, by conversions, and by engines that read a folder. Everywhere but in files,
each expert has `gate_proj`, `up_proj` and `down_proj` of a gated MLP, as a Linear has them. A file
of gpt-oss or Qwen3-VL has, for each layer:

| tensor | shape |
|---|---|
| `gate_up_proj` | [experts, hidden, 2 * units]; `Experts.fused` says in which order |
| `gate_up_proj_bias` | [experts, 2 * units] |
| `down_proj` | [experts, units, hidden] |
| `down_proj_bias` | [experts, hidden] |

transformers 5 writes matrices of Qwen3-VL that are not transposed, and reads both. Where the sizes
do not tell, it takes a matrix as not transposed, and so do we. gpt-oss alone has biases. Its files
have, as published, `*_blocks` and `*_scales` instead of the two matrices: MXFP4 (OCP Microscaling
Formats 1.0), of which 32 inputs of an output share a power of two.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.fused_files import expert_places, is_plain
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.trainer_layout import fused_shapes

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)$")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code; the fourth is the sign."""
_SCALE_BIAS = 127
_PARTS = 3
"""Matrices of an expert; gpt-oss has as many biases."""


class _Matrices:
    """A file's matrices of all experts, each seen as a Linear has it: [experts, out, in]."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.dtype: str = whole.get_dtype()
        experts, inputs, outputs = whole.get_shape()
        self.shape = (experts, outputs, inputs)

    def rows(self, expert: int, first: int, last: int) -> Tensor:
        return self._whole[expert : expert + 1, :, first:last][0].T


class _Rows:
    """The same of biases, [experts, out], and of matrices that are not transposed."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.dtype: str = whole.get_dtype()
        self.shape = tuple(whole.get_shape())

    def rows(self, expert: int, first: int, last: int) -> Tensor:
        return self._whole[expert : expert + 1, first:last][0]


class _Quantised:
    """The same of matrices in MXFP4, dequantised to bfloat16."""

    dtype = "BF16"

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales
        experts, outputs, groups, codes = blocks.get_shape()
        self.shape = (experts, outputs, groups * codes * 2)

    def rows(self, expert: int, first: int, last: int) -> Tensor:
        codes = self._blocks[expert : expert + 1, first:last][0]
        return dequantise(codes, self._scales[expert : expert + 1, first:last][0])


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, groups * 32] bfloat16 of blocks [rows, groups, 16] and scales [rows, groups] uint8.

    A byte holds two codes, the lower one first.
    """
    values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.int()[..., None] - _SCALE_BIAS
    return torch.ldexp(values[codes.int()], exponents).to(torch.bfloat16).flatten(-2)


@dataclass(frozen=True)
class ExpertSlice:
    """A tensor of one expert, with what safetensors' lazy slices have; see the module's table."""

    fused: _Matrices | _Rows | _Quantised
    expert: int
    place: slice
    """Its rows of the fused tensor."""

    def get_dtype(self) -> str:
        """In safetensors' words."""
        return self.fused.dtype

    def get_shape(self) -> list[int]:
        """Of the expert alone."""
        _, rows, *columns = self.fused.shape
        return [len(range(rows)[self.place]), *columns]

    def __getitem__(self, index: Any) -> Tensor:
        """The part that slices of rows, or of rows and columns, name."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        asked = range(self.fused.shape[1])[self.place][rows]
        found = self.fused.rows(self.expert, asked.start, asked.stop)
        return found[:: asked.step][(slice(None), *columns)]


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a folder with experts in MXFP4."""
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def split_experts(tensors: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """A folder's lazy slices with those of experts one by one; tensors that are odd stay."""
    found, places = dict(tensors), expert_places(shape)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}.mlp.experts"
        for part in ("gate_up", "down"):
            for kind, fused in _of_kind(found, f"{name}.{part}_proj", shape):
                for expert in range(fused.shape[0]):
                    for word in ("gate", "up") if part == "gate_up" else ("down",):
                        own = f"{name}.{expert}.{word}_proj.{kind}"
                        found[own] = ExpertSlice(fused, expert, places[word])
    return found


def keeps_rows(tensors: Mapping[str, Any]) -> bool:
    """Whether the experts of `split_experts` are from files that are not transposed."""
    found = (one for one in tensors.values() if isinstance(one, ExpertSlice))
    return any(isinstance(one.fused, _Rows) for one in itertools.islice(found, 1))


def _of_kind(
    tensors: dict[str, Any], name: str, shape: ModelShape
) -> Iterator[tuple[str, _Matrices | _Rows | _Quantised]]:
    """Takes the tensors of one projection out of a folder's."""
    ranks = {key: len(one.get_shape()) for key, one in tensors.items() if key.startswith(name)}
    if ranks.get(f"{name}_blocks") == 4 and ranks.get(f"{name}_scales") == 3:
        yield "weight", _Quantised(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    elif ranks.get(name) == 3:
        whole = tensors.pop(name)
        is_row = is_plain(whole.get_shape(), name, shape)
        yield "weight", _Rows(whole) if is_row else _Matrices(whole)
    if ranks.get(f"{name}_bias") == 2:
        yield "bias", _Rows(tensors.pop(f"{name}_bias"))


def file_name(name: str, shape: ModelShape) -> str:
    """The tensor of a file with the one that is called `name` everywhere else."""
    found = _EXPERT.match(name) if FAMILIES[shape.architecture].fuses_experts else None
    if found is None:
        return name
    block, _, word, kind = found.groups()
    part = "down" if word == "down" else "gate_up"
    return f"{block}.{part}_proj" + ("_bias" if kind == "bias" else "")


def fuse_experts(
    tensors: Iterable[tuple[str, Tensor]], shape: ModelShape, *, is_transposed: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Tensors, in the order of `hf_shapes`, with experts as files hold them.

    is_transposed: as published. The experts of one layer are held until the last one is there.
    """
    fuses_experts, places = FAMILIES[shape.architecture].fuses_experts, expert_places(shape)
    held: dict[str, Tensor] = {}
    missing = 0
    for name, tensor in tensors:
        found = _EXPERT.match(name)
        if found is None or not fuses_experts:
            yield name, tensor
            continue
        block, expert, word, kind = found.groups()
        if not held:
            held = _empty(block, shape, tensor.dtype, is_transposed=is_transposed)
            missing = _PARTS * (1 + shape.has_biases) * shape.experts
        whole = held[file_name(name, shape)][int(expert)]
        rows = whole.T if is_transposed and kind == "weight" else whole
        rows[places[word]].copy_(tensor)
        missing -= 1
        if not missing:
            yield from held.items()
            held = {}


def _empty(
    block: str, shape: ModelShape, dtype: torch.dtype, *, is_transposed: bool
) -> dict[str, Tensor]:
    """The tensors of a layer as files have them, in host memory, not filled yet."""
    found = {}
    for name, (experts, *size) in fused_shapes(block, shape).items():
        found[name] = torch.empty((experts, *(size if is_transposed else size[::-1])), dtype=dtype)
    return found
