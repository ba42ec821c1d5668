"""Weights of a small model that differ by tensor, place and version; for tests of weight sync."""

import json
import math
import os
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from megatron_rl.weights.exchange.plan import Parcel
from megatron_rl.weights.layout.shape import ModelShape, read_shape
from megatron_rl.weights.layout.slices import Slice
from megatron_rl.weights.layout.trainer_layout import file_shapes, hf_shapes

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM", layers=2, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=2,
    vocab=131, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, is_tied=False,
    has_qkv_bias=True, has_qk_norm=False, sliding_window=None,
)  # fmt: skip


def values(shape: ModelShape, name: str, version: int) -> Tensor:
    """A Hugging Face tensor of a version, as a matrix."""
    size = hf_shapes(shape)[name]
    rows, columns = size[0], size[1] if len(size) > 1 else 1
    places = torch.arange(rows)[:, None] * 31 + torch.arange(columns) * 17
    return ((places + crc32(name.encode()) % 1000 + 101 * version) % 4093).float()


def allocate(slices: list[Slice], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Parameters of -1 with room for the slices."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for part in slices:
        size = sizes[part.local]
        size[0] = max(size[0], part.local_row + part.rows)
        size[1] = max(size[1], part.local_column + part.columns)
    return {name: torch.full(size, -1.0, device=device) for name, size in sizes.items()}


def own_device(kind: str, peer: str) -> torch.device:
    """Of this process, the only one of that name. All share a GPU.

    NCCL refuses that unless they seem to be on different hosts.
    """
    if kind != "cpu":
        os.environ["NCCL_HOSTID"] = peer
        torch.cuda.set_device(0)
    return torch.device(kind)


def fill(
    parameters: dict[str, Tensor], slices: list[Slice], shape: ModelShape, version: int
) -> None:
    """Make them those of a version."""
    held = {name: values(shape, name, version) for name in {part.hf for part in slices}}
    for part in slices:
        source = held[part.hf][part.row :, part.column :][: part.rows, : part.columns]
        target = parameters[part.local][part.local_row :, part.local_column :]
        target[: part.rows, : part.columns] = source


def buffer_bytes(parcel: Parcel, dtype: torch.dtype) -> int:
    """Bytes of a parcel's packets together: elements, padded to 8 bytes, digest, version."""
    return -(-parcel.size * dtype.itemsize // 8) * 8 + 24


def write_zeros(folder: Path) -> None:
    """The weights that the config.json of a folder means, all zero: a file without blocks."""
    header, end = {}, 0
    for name, size in file_shapes(read_shape(folder)).items():
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
