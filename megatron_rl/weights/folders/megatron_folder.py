"""Megatron checkpoint folders (torch_dist): blocks, tensors and regions of them.

Used by trainer ranks and by conversions. A checkpoint stacks the layers of a model, and the experts
of a layer, along leading axes; layers that are not all alike have separate tensors. It knows no
tensor, pipeline or expert ranks, and neither do blocks.
`.metadata` is a pickle, as Megatron writes it: only open folders whose origin you trust.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from megatron_rl.weights.layout.entries import EMBEDDING, FINAL_NORM, OUTPUT, PADDED, layer_entries
from megatron_rl.weights.layout.local_names import ENGINE_NAMES, LATENT_NAMES
from megatron_rl.weights.layout.place import Entry, Place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Piece, shown


def _renamed(shape: ModelShape, has_experts: bool) -> dict[str, str]:
    """Our name of a norm in a layer -> the checkpoint's, where TransformerEngine fuses it."""
    names = LATENT_NAMES if shape.kv_rank else ENGINE_NAMES
    # No norm is fused into experts.
    return {ours: key for key, ours in names.items() if not (has_experts and ".linear_fc1." in key)}


@dataclass(frozen=True)
class Block:
    """One Megatron parameter of one layer or expert, undivided."""

    key: str
    """Name of the checkpoint's tensor; the block is `tensor[lead]`."""
    lead: tuple[int, ...]
    """Layer and expert, either, or neither."""
    lead_size: tuple[int, ...]
    """How many there are."""
    size: tuple[int, ...]
    hf: tuple[str, ...]
    hf_sizes: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]
    """Which part of the block, seen as a matrix, is which part of which HF tensor."""

    @property
    def full_size(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return (*self.lead_size, *self.size)

    @property
    def may_be_padded(self) -> bool:
        """Whether the checkpoint may hold more rows, which belong to no HF tensor."""
        return self.key in PADDED

    @cached_property
    def pieces_of(self) -> dict[str, list[Piece]]:
        """HF tensor -> the pieces that are parts of it."""
        found: dict[str, list[Piece]] = {name: [] for name in self.hf}
        for piece in self.pieces:
            found[self.hf[piece.source]].append(piece)
        return found


def model_blocks(shape: ModelShape) -> Iterator[Block]:
    """All blocks of a model, so that their HF tensors come nearly in the order of `hf_shapes`."""
    yield _Kind(EMBEDDING, shape).block(shape, 0, 0)
    of_kind = {
        shape.has_experts(layer): [
            _Kind(entry, shape, has_experts=shape.has_experts(layer))
            for entry in layer_entries(shape, layer)
        ]
        for layer in (0, shape.layers - 1)
    }
    for layer in range(shape.layers):
        kinds = of_kind[shape.has_experts(layer)]
        yield from (kind.block(shape, layer, 0) for kind in kinds if not kind.entry.is_expert)
        for expert in range(shape.experts):
            yield from (kind.block(shape, layer, expert) for kind in kinds if kind.entry.is_expert)
    yield _Kind(FINAL_NORM, shape).block(shape, 0, 0)
    if not shape.is_tied:
        yield _Kind(OUTPUT, shape).block(shape, 0, 0)


class _Kind:
    """What the blocks of one entry have in common."""

    def __init__(self, entry: Entry, shape: ModelShape, *, has_experts: bool = False) -> None:
        self.entry = entry
        # Megatron stacks layers unless moe_layer_freq is a list (see `build.py`).
        self.is_stacked = not shape.dense_layers
        self.key = _checkpoint_key(entry.megatron, _renamed(shape, has_experts))
        self.pieces = tuple(entry.pieces(shape, Place()))
        self.hf_sizes = tuple(entry.hf_shapes(shape))
        rows = max(piece.local_row + piece.rows for piece in self.pieces)
        columns = max(piece.local_column + piece.columns for piece in self.pieces)
        self.size = (rows,) if len(self.hf_sizes[0]) == 1 else (rows, columns)

    def block(self, shape: ModelShape, layer: int, expert: int) -> Block:
        """The block of a layer and an expert, if the entry has such."""
        key = self.key.format(layer=layer)
        axes: list[tuple[int, int]] = []
        if self.is_stacked and key != self.key:
            key = self.key.replace(".{layer}", "")
            axes.append((layer, shape.layers))
        if self.entry.is_expert:
            axes.append((expert, shape.experts))
        lead, lead_size = (tuple(axis[part] for axis in axes) for part in range(2))
        names = tuple(name.format(layer=layer, expert=expert) for name in self.entry.hf)
        return Block(key, lead, lead_size, self.size, names, self.hf_sizes, self.pieces)


def _checkpoint_key(megatron: str, renamed: dict[str, str]) -> str:
    """Megatron's name of a parameter as `GPTModel.sharded_state_dict` spells it."""
    key = megatron.replace("local_experts.{expert}", "experts")
    for ours, theirs in renamed.items():
        if key.endswith("." + ours):
            return key.removesuffix(ours) + theirs
    return key


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
        """`tensor[start : start + size]` in new memory, of one place on a leading axis.

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
