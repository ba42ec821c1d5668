"""Reads and writes Hugging Face folders.

Used by trainer ranks and by conversions. Files are memory-mapped; a tensor is read when its slice
is taken.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.disk_room import os_errors_of, write_when_room
from megatron_rl.protocol.weight_files import INDEX, SINGLE, whole_weight_files
from megatron_rl.weights.folders.fused_experts import fuse_experts, keeps_rows
from megatron_rl.weights.folders.scaled_fp8 import dequantised
from megatron_rl.weights.folders.text_tensors import FolderTensors, open_files, sort_tensors
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.rope import in_both_spellings
from megatron_rl.weights.layout.shape import ModelShape

T = TypeVar("T")
NamedTensor = tuple[str, Tensor]
SHARD_BYTES = 4 << 30


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """HF name -> a lazy slice of its tensor, over all files of the folder; FP8 is dequantised.

    Raises InputError when a file is missing, cut off or no safetensors.
    """
    return dequantised(open_files(whole_weight_files(folder), stack), folder)


def open_origin(folder: Path | None, shape: ModelShape, stack: ExitStack) -> FolderTensors | None:
    """Open the folder from which an export copies tensors; None if the model has none to copy.

    Raises InputError as `open_model`, and if a wrapper's folder has no tensors.
    """
    family = FAMILIES[shape.architecture]
    has_tensors = folder is not None and any(folder.glob("*.safetensors"))
    if folder is not None and has_tensors and (family.wrapper or family.predicts_ahead):
        return open_model(folder, shape, stack)
    if family.wrapper is None:
        return None
    raise InputError(
        f"a {shape.architecture} holds more than the text model, which is all that a Megatron "
        "checkpoint has: give a Hugging Face folder with the rest, as model.path of a run or by "
        "--files-from of a conversion"
    )


def open_model(folder: Path, shape: ModelShape, stack: ExitStack) -> FolderTensors:
    """The tensors of a folder with a model of `shape`; raises InputError as `open_tensors` and
    `sort_tensors`."""
    return sort_tensors(open_tensors(folder, stack), shape, folder)


def as_in_source(
    tensors: Iterable[NamedTensor], shape: ModelShape, origin: FolderTensors | None
) -> Iterator[NamedTensor]:
    """The text model's tensors as files hold them, and as `origin` names them, then what that has
    besides, unchanged.

    origin: of `open_origin`.
    """
    if origin is None:
        yield from fuse_experts(tensors, shape)
        return
    held = fuse_experts(tensors, shape, is_transposed=not keeps_rows(origin.text))
    yield from ((origin.spelling.rename(name), tensor) for name, tensor in held)
    yield from ((name, tensor[:]) for name, tensor in origin.carried.items())


def write_config(values: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Write config.json with the dtype of the weights."""
    # transformers 5 writes dtype, earlier ones torch_dtype.
    # Nothing that is written is quantised.
    left_out = ("torch_dtype", "quantization_config")
    kept = {key: value for key, value in values.items() if key not in left_out}
    # A wrapper's engine reads the one spelling of its text_config.
    if "architectures" in kept and "text_config" not in kept:
        kept = in_both_spellings(kept, folder)
    kept["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n")


def bucketed(
    items: Iterable[T], bytes_of: Callable[[T], int], bucket_bytes: int
) -> Iterator[list[T]]:
    """Group items in order; a bucket exceeds `bucket_bytes` only when one item alone does."""
    bucket: list[T] = []
    held_bytes = 0
    for item in items:
        size = bytes_of(item)
        if bucket and held_bytes + size > bucket_bytes:
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(item)
        held_bytes += size
    if bucket:
        yield bucket


def write_tensors(
    folder: Path, tensors: Iterable[NamedTensor], shard_bytes: int, *, limit_s: float = 0.0
) -> None:
    """Write safetensors of about `shard_bytes` each, with an index if there are several.

    Holds one shard and the tensor after it. limit_s: how long a full disk is waited for. Raises
    WriteFailed.
    """
    files: list[list[str]] = []
    total_bytes = 0
    for bucket in bucketed(tensors, lambda named: named[1].nbytes, shard_bytes):
        held = {name: tensor.cpu().contiguous() for name, tensor in bucket}
        part = _part(folder, len(files))
        write = partial(_save_part, held, part)
        write_when_room(part, write, limit_s=limit_s, undo=partial(part.unlink, missing_ok=True))
        files.append(list(held))
        total_bytes += sum(tensor.nbytes for tensor in held.values())
        # The next shard is built before these names are bound again.
        held.clear()
        bucket.clear()
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        file = file if len(files) > 1 else SINGLE
        os.replace(_part(folder, number), folder / file)
        # safetensors 0.8 leaves it readable by its owner alone.
        (folder / file).chmod(0o644)
        weight_map.update(dict.fromkeys(names, file))
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _save_part(held: dict[str, torch.Tensor], part: Path) -> None:
    with os_errors_of(SafetensorError):
        save_file(held, part, metadata={"format": "pt"})


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number}.safetensors"
