"""Finds the checkpoints to compare, and reads their weights together in chunks.

Used by `megatron-rl analyse`. Memory never holds a whole tensor of several checkpoints. Rows of
Hugging Face files are read in place; other formats give whole tensors, which go through a scratch
file, one checkpoint after the other.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.weights.folders.model_files import files_to_carry
from megatron_rl.weights.folders.sources import HfSource, Source, open_source
from megatron_rl.weights.layout.slices import shown
from megatron_rl.weights.layout.trainer_layout import hf_shapes

RUN_CONFIG = "config.toml"
CHUNK_BYTES = 8 << 20
"""Size of a chunk: the float64 values of all checkpoints together."""


@dataclass(frozen=True)
class Checkpoint:
    """A model folder to compare."""

    name: str
    folder: Path
    files_from: Path | None = None
    """Folder with the configuration and tokenizer that `folder` lacks; None: its run's model."""


def find_checkpoints(paths: Sequence[Path], files_from: Path | None = None) -> list[Checkpoint]:
    """Checkpoints of the paths, in order: model folders, runs or their folders of checkpoints.

    A run gives its complete checkpoints by step. Raises InputError, also for fewer than
    two checkpoints.
    """
    folders = [folder for path in paths for folder in _expand(path)]
    if len(folders) < 2:
        raise InputError(
            f"{len(folders)} checkpoint in {', '.join(map(str, paths))}: give two or more, such as "
            "model folders, or a run with checkpoint.every_steps"
        )
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise InputError(f"{folders[number]} is given twice: leave one out")
    short = [folder.name for folder in resolved]
    are_unique = len(set(short)) == len(short)
    return [
        Checkpoint(name if are_unique else str(folder), folder, files_from)
        for name, folder in zip(short, folders, strict=True)
    ]


def _expand(path: Path) -> Iterator[Path]:
    """The folder of each checkpoint of a path."""
    if not path.is_dir():
        raise InputError(f"there is no folder {path}: give a model folder or a run")
    inside = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = complete_checkpoints(inside)
    if steps:
        yield from steps.values()
    elif inside != path or (path / RUN_CONFIG).is_file():
        raise InputError(
            f"{path} has no complete checkpoint in {CHECKPOINTS}/: run with checkpoint.every_steps "
            "(and checkpoint.keep_last), or give folders of hf/"
        )
    else:
        yield path


class _Rows(Protocol):
    def read_rows(self, name: str, start: int, stop: int) -> Tensor: ...


class OpenCheckpoints:
    """Checkpoints with the same tensors."""

    def __init__(
        self, sources: Sequence[Source], rows: Sequence[_Rows], names: Sequence[str]
    ) -> None:
        self.sources = sources
        self.names = names
        self.sizes = hf_shapes(sources[0].shape)
        """HF name -> shape."""
        self._rows = rows

    @property
    def count(self) -> int:
        return len(self.sources)

    @property
    def parameters(self) -> int:
        """Parameters of one model; a tied matrix counts once."""
        return sum(math.prod(size) for size in self.sizes.values())

    def chunks(
        self, name: str, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """(rows, [checkpoints, elements of these rows] float64) of a tensor, in order.

        A chunk has at least one row; the next chunk overwrites it. Values may be NaN or infinite:
        see `check_finite`.
        """
        size = self.sizes[name]
        row = math.prod(size[1:])
        step = max(1, chunk_bytes // (8 * self.count * row))
        # Fresh memory for each chunk would take longer than the reading.
        held = np.empty(self.count * min(step, size[0]) * row)
        for start in range(0, size[0], step):
            stop = min(start + step, size[0])
            chunk = held[: self.count * (stop - start) * row].reshape(self.count, -1)
            for number, rows in enumerate(self._rows):
                torch.from_numpy(chunk[number]).copy_(rows.read_rows(name, start, stop).view(-1))
            yield slice(start, stop), chunk

    def check_finite(self, name: str) -> None:
        """Raise InputError, naming the checkpoint, when a tensor has NaN or infinite values.

        Callers check only after a bad result: the check takes as long as the work.
        """
        for _, chunk in self.chunks(name):
            are_finite = np.isfinite(chunk).all(axis=1)
            if not are_finite.all():
                bad = self.names[int(np.argmin(are_finite))]
                raise InputError(f"{bad}: {name} has values that are not finite: leave it out")


@contextmanager
def open_checkpoints(
    checkpoints: Sequence[Checkpoint], scratch: Path | None = None
) -> Iterator[OpenCheckpoints]:
    """Open all checkpoints. Raises InputError unless tensors and shapes are equal in all.

    scratch: folder for one file per checkpoint, as large as a tensor; default: the system's.
    """
    with ExitStack() as stack:
        sources, rows = [], []
        for checkpoint in checkpoints:
            files = files_to_carry(checkpoint.folder, checkpoint.files_from).paths
            source = stack.enter_context(open_source(checkpoint.folder, files))
            if sources:
                _check_same(checkpoints[0], sources[0], checkpoint, source)
            sources.append(source)
            if source.kind == "hf":
                assert isinstance(source, HfSource)
                rows.append(source)
            else:
                file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
                rows.append(_ScratchRows(source, file))
        yield OpenCheckpoints(sources, rows, [checkpoint.name for checkpoint in checkpoints])


def _check_same(first: Checkpoint, known: Source, other: Checkpoint, source: Source) -> None:
    expected, found = hf_shapes(known.shape), hf_shapes(source.shape)
    for has, lacks, names in (
        (first, other, expected.keys() - found.keys()),
        (other, first, found.keys() - expected.keys()),
    ):
        if names:
            raise InputError(
                f"{lacks.folder} lacks {len(names)} tensors that {has.folder} has: {shown(names)}; "
                "give checkpoints of one model"
            )
    for name, size in expected.items():
        if found[name] != size:
            raise InputError(
                f"{name} has shape {found[name]} in {other.folder}, but {size} in {first.folder}: "
                "give checkpoints of one model"
            )


class _ScratchRows:
    """Rows of a format that gives whole tensors; a file keeps the last one."""

    def __init__(self, source: Source, file: BinaryIO) -> None:
        self._source = source
        self._file = file
        self._name = ""
        self._size: tuple[int, ...] = ()

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        dtype = self._source.dtype_of(name)
        if name != self._name:
            self._fill(name)
        row_bytes = math.prod(self._size[1:]) * dtype.itemsize
        self._file.seek(start * row_bytes)
        held = np.fromfile(self._file, np.uint8, (stop - start) * row_bytes)
        return torch.from_numpy(held).view(dtype).view(stop - start, *self._size[1:])

    def _fill(self, name: str) -> None:
        tensor = self._source.read(name).contiguous()
        self._source.release()
        self._file.seek(0)
        tensor.view(-1).view(torch.uint8).numpy().tofile(self._file)
        self._name, self._size = name, tuple(tensor.shape)
