"""A model at a point of weight space: a combination of checkpoints, written as a folder.

Used by `megatron-rl analyse plane`. Streamed: a shard, a tensor and a chunk of all checkpoints are
held at a time. The combination is made in float64 and rounded once, to the nearest value of the
dtype; formats other than floating point are refused when checkpoints are opened.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from megatron_rl.analysis.checkpoints import CHUNK_BYTES, Checkpoint, OpenCheckpoints
from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.conversion import check_space
from megatron_rl.weights.folders.hf_folder import (
    SHARD_BYTES,
    copy_files,
    write_config,
    write_tensors,
)
from megatron_rl.weights.folders.sources import files_to_carry
from megatron_rl.weights.folders.staging import staged


@dataclass(frozen=True)
class PointFormat:
    """How a point is written."""

    dtype: torch.dtype | None = None
    """None: each tensor has that of the first checkpoint."""
    shard_bytes: int = SHARD_BYTES
    chunk_bytes: int = CHUNK_BYTES


def write_point(
    checkpoints: OpenCheckpoints,
    first: Checkpoint,
    weights: np.ndarray,
    target: Path,
    form: PointFormat = PointFormat(),
) -> float:
    """Write sum_k weights[k] * checkpoint k to `target`; the norm of what rounding added.

    weights: [checkpoints]. first: of them, whose configuration and tokenizer are copied. The folder
    appears whole or not at all. Raises InputError when it exists, when there is no room, and where
    a value is beyond the range of the dtype.
    """
    if target.exists():
        raise InputError(f"{target} exists already: name another folder, or delete it")
    check_space(target, point_bytes(checkpoints, form.dtype))
    source = checkpoints.sources[0]
    mixing = _Mixing(checkpoints, weights, target, form)
    with staged(target) as staging:
        copy_files(files_to_carry(first.folder, first.files_from), staging)
        if source.kind != "hf" or form.dtype is not None:
            write_config(source.config, staging, mixing.dtype_of("model.embed_tokens.weight"))
        write_tensors(staging, mixing.stream(), form.shard_bytes)
    return math.sqrt(mixing.rounding)


def point_bytes(checkpoints: OpenCheckpoints, dtype: torch.dtype | None) -> int:
    """Size of the tensors of a point."""
    source = checkpoints.sources[0]
    return sum(
        math.prod(size) * (dtype or source.dtype_of(name)).itemsize
        for name, size in checkpoints.sizes.items()
    )


class _Mixing:
    """Tensors of a combination of checkpoints."""

    def __init__(
        self, checkpoints: OpenCheckpoints, weights: np.ndarray, target: Path, form: PointFormat
    ) -> None:
        self.rounding = 0.0
        """Sum of squares of what was rounded so far."""
        self._checkpoints = checkpoints
        self._weights = weights
        self._target = target
        self._form = form

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor of the point."""
        return self._form.dtype or self._checkpoints.sources[0].dtype_of(name)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in order."""
        for name in self._checkpoints.sizes:
            yield name, self._mix(name)

    def _mix(self, name: str) -> Tensor:
        mixed = torch.empty(*self._checkpoints.sizes[name], dtype=self.dtype_of(name))
        for rows, values in self._checkpoints.chunks(name, self._form.chunk_bytes):
            exact = torch.from_numpy(self._weights @ values)
            part = mixed[rows].view(-1)
            part.copy_(exact)
            error = part.double().sub_(exact)
            square = float(error @ error)
            if not math.isfinite(square):
                self._refuse(name, mixed.dtype)
            self.rounding += square
        return mixed

    def _refuse(self, name: str, dtype: torch.dtype) -> NoReturn:
        self._checkpoints.check_finite(name)
        raise InputError(
            f"{self._target}: {name} would have values beyond the range of {dtype}: take a point "
            "nearer to the checkpoints, or --dtype float32"
        )
