"""Megatron checkpoint folders (torch_dist): which tensors they hold, and regions of them.

Used by trainer ranks and by conversions. `.metadata` is a pickle, as Megatron writes it: only open
folders whose origin you trust.
"""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.blocks import model_blocks
from megatron_rl.weights.folders.hf_folder import shown
from megatron_rl.weights.layout.shape import ModelShape

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM reads in it which subfolder has the tensors."""
RELEASE = "release"
"""Subfolder of weights that belong to no iteration."""
_METADATA = ".metadata"
_PARTS = ("embedding.", "decoder.", "output_layer.")
_PREFIXES = ("", "model.")
# What reading a pickle or a tensor raises on bytes that are cut off or of another kind.
_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)


def is_megatron_folder(folder: Path) -> bool:
    """Whether the folder looks like a Megatron checkpoint, whole or not."""
    if (folder / TRACKER).is_file() or any(folder.glob("*.distcp")) or _has_metadata(folder):
        return True
    return any(folder.glob(f"*/{_METADATA}")) and not any(folder.glob("*.safetensors"))


def find_tensors(folder: Path) -> Path:
    """The folder with the tensors: `folder`, what its tracker names, or its only such subfolder.

    Raises InputError.
    """
    if _has_metadata(folder):
        return folder
    if (folder / TRACKER).is_file():
        word = (folder / TRACKER).read_text().strip()
        named = folder / (f"iter_{int(word):07d}" if word.isdecimal() else word)
        if word and _has_metadata(named):
            return named
        raise InputError(f"{folder / TRACKER} says {word!r}, but {named / _METADATA} is missing")
    inside = [path.parent for path in folder.glob(f"*/{_METADATA}")] if folder.is_dir() else []
    if len(inside) != 1:
        raise InputError(
            f"{folder} is no Megatron checkpoint: expected a file {_METADATA} in it or in one of "
            f"its subfolders, found {len(inside)}; a checkpoint that was cut off has none"
        )
    return inside[0]


def _has_metadata(folder: Path) -> bool:
    return (folder / _METADATA).is_file()


class MegatronFolder:
    """The model's tensors in a checkpoint; optimizer state and objects are left alone."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError when the checkpoint is cut off."""
        self.folder = find_tensors(folder)
        self._reader = FileSystemReader(self.folder)
        self._metadata = self._read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._check_files()
        keys = self._metadata.state_dict_metadata
        self.prefix = next(
            (p for p in _PREFIXES if any(key.startswith(p + _PARTS[0]) for key in keys)), ""
        )
        """What stands before the model's own names."""
        self._tensors = {
            key.removeprefix(self.prefix): found
            for key, found in keys.items()
            if isinstance(found, TensorStorageMetadata)
            and key.startswith(tuple(self.prefix + part for part in _PARTS))
        }
        self._chunks = {key: _by_first_axis(found) for key, found in self._tensors.items()}

    def _read_metadata(self) -> Metadata:
        try:
            metadata = self._reader.read_metadata()
            if isinstance(metadata, Metadata) and metadata.storage_data is not None:
                return metadata
        except _UNREADABLE as error:
            raise InputError(
                f"{self.folder / _METADATA} cannot be read: {error!r}. Is it cut off?"
            ) from error
        raise InputError(f"{self.folder / _METADATA} describes no checkpoint")

    def _check_files(self) -> None:
        """Every byte that the metadata speaks of is there."""
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        for name, end in ends.items():
            file = self.folder / name
            found = file.stat().st_size if file.is_file() else 0
            if found < end:
                raise InputError(
                    f"{file} is cut off or missing: {found} bytes, but {_METADATA} needs {end}"
                )

    def check(self, shape: ModelShape) -> None:
        """Raise InputError unless the tensors are those of `shape`."""
        expected = {block.key: block for block in model_blocks(shape)}
        for claim, names in (
            ("lacks", expected.keys() - self._tensors.keys()),
            ("has unexpected", self._tensors.keys() - expected.keys()),
        ):
            if names:
                raise InputError(
                    f"{self.folder} {claim} {len(names)} tensors for {shape.architecture}: "
                    f"{shown(names)}"
                )
        for key, block in expected.items():
            found, size = tuple(self._tensors[key].size), block.full_size
            is_padded = block.may_be_padded and found[1:] == size[1:] and found[0] > size[0]
            if found != size and not is_padded:
                raise InputError(
                    f"{self.folder}: {key} has shape {found}, but config.json means {size}"
                )

    def dtype_of(self, key: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """`tensor[start : start + size]` in new memory, of one layer where layers are stacked.

        Reads no more chunks than it lies in. Raises InputError when the bytes are damaged.
        """
        chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(size))
        name = self.prefix + key
        by_layer = self._chunks[key]
        chunks = self._tensors[key].chunks if by_layer is None else by_layer.get(start[0], [])
        near = replace(self._tensors[key], chunks=chunks)
        items = create_read_items_for_chunk_list(name, near, [chunk])
        if sum(item.lengths.numel() for item in items) != chunk.sizes.numel():
            raise InputError(f"{self.folder}: no file has all of {key}[{list(start)}]")
        planner = _Region(torch.empty(*size, dtype=self.dtype_of(key)))
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except _UNREADABLE as error:
            # torch's text would advise to trust the file.
            raise InputError(
                f"{self.folder}: {key} cannot be read ({type(error).__name__}): its bytes are "
                "damaged; take another copy"
            ) from error
        return planner.target


def _by_first_axis(tensor: TensorStorageMetadata) -> dict[int, list[ChunkStorageMetadata]] | None:
    """Chunks by layer, if none has more than one; a search among all of them takes long."""
    found: dict[int, list[ChunkStorageMetadata]] = {}
    for chunk in tensor.chunks:
        if chunk.sizes[0] != 1:
            return None
        found.setdefault(chunk.offsets[0], []).append(chunk)
    return found


class _Region(DefaultLoadPlanner):
    """Puts all that is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target
