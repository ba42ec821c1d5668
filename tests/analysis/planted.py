"""Checkpoints that lie where a test puts them, as real folders of several files."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.weights.folders.hf_folder import write_tensors
from megatron_rl.weights.folders.model_files import carried_files, copy_files
from tests.tiny_models import write_model

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}


def read_vector(folder: Path) -> Tensor:
    """All weights of a Hugging Face folder in one float64 vector, by name."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def plant(
    folder: Path,
    coordinates: Sequence[Sequence[float]],
    *,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> tuple[list[Path], Tensor]:
    """Folders of start + sum_j coordinates[k][j] * direction_j; and these, [directions, weights].

    Every value is a multiple of 1/64 below 2**17 / 64, so float32 holds it exactly. No value of
    the start is 0.
    """
    write_model(folder / "start", family="Qwen2", **{**SIZES, **sizes})
    start = load_file(folder / "start" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def draw(size: torch.Size) -> Tensor:
        return torch.randint(-512, 513, size, generator=generator) / 64

    base = {name: draw(t.shape) + 64 + 1 / 64 for name, t in sorted(start.items())}
    directions = [{name: draw(t.shape) for name, t in base.items()} for _ in coordinates[0]]
    paths = []
    for number, row in enumerate(coordinates):
        path = folder / f"checkpoint_{number}"
        path.mkdir()
        copy_files(carried_files(folder / "start"), path)
        moved = {
            name: (t + sum(c * d[name] for c, d in zip(row, directions, strict=True))).to(dtype)
            for name, t in base.items()
        }
        write_tensors(path, moved.items(), 1 << 14)
        paths.append(path)
    vectors = [torch.cat([d[name].double().flatten() for name in sorted(d)]) for d in directions]
    return paths, torch.stack(vectors)
