"""One conversion from folder to folder: opened, checked, streamed, verified, then in place."""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.fused_experts import file_name
from megatron_rl.weights.folders.hf_folder import (
    SHARD_BYTES,
    as_in_source,
    open_origin,
    write_config,
    write_tensors,
)
from megatron_rl.weights.folders.megatron_folder import RELEASE, TRACKER
from megatron_rl.weights.folders.megatron_writer import write_checkpoint
from megatron_rl.weights.folders.model_files import files_to_carry, read_config
from megatron_rl.weights.folders.sources import Source, open_source
from megatron_rl.weights.folders.staging import staged
from megatron_rl.weights.layout.trainer_layout import hf_shapes, untrained

Kind = Literal["hf", "megatron"]
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
_SPARE = 1.01
"""A checkpoint is a little larger than its tensors."""


class VerificationFailed(RuntimeError):
    """The written tensors differ from the read ones."""


@dataclass(frozen=True)
class Request:
    """A conversion."""

    source: Path
    target: Path
    """Folder to write; it must not exist."""
    to: Kind | None = None
    """Without it, hf for a Megatron folder and megatron for any other."""
    dtype: str | None = None
    """Key of DTYPES; without it tensors keep theirs."""
    verify: bool = False
    """Read the target again and compare the digest of every tensor, before it is in place."""
    shard_bytes: int = SHARD_BYTES
    """Size of the target's files, and so of the memory that is needed."""
    files_from: Path | None = None
    """Folder with the configuration and tokenizer files that the source lacks."""


@dataclass(frozen=True)
class Done:
    """Result of a conversion."""

    kind: str
    """Of the source: hf, mistral or megatron."""
    to: Kind
    architecture: str
    tensors: int
    size_bytes: int


def convert(
    request: Request, progress: Callable[[int, int], None], *, is_dry: bool = False
) -> Done:
    """Convert; `progress` is told the bytes read so far, and how many there are to read.

    The target appears whole or not at all. is_dry: only check, and say what would be done. Raises
    InputError and VerificationFailed.
    """
    if request.target.exists():
        raise InputError(f"{request.target} exists already: name another folder, or delete it")
    files = files_to_carry(request.source, request.files_from)
    with ExitStack() as stack:
        source = stack.enter_context(open_source(request.source, files.paths))
        to: Kind = request.to or ("hf" if source.kind == "megatron" else "megatron")
        origin = open_origin(files.origin, source.shape, stack) if to == "hf" else None
        dtype = None if request.dtype is None else DTYPES[request.dtype]
        reading = _Reading(source, dtype, progress, verify=request.verify)
        check_space(request.target, reading.size_bytes)
        names = {file_name(name, source.shape) for name in hf_shapes(source.shape)}
        done = Done(source.kind, to, source.shape.architecture, len(names), reading.size_bytes)
        if is_dry:
            return done
        with staged(request.target) as staging:
            files.write(staging)
            keeps_config = source.kind != "mistral" and files.run is None
            keeps_config = keeps_config and source.config == read_config(
                request.source, files.paths
            )
            if not keeps_config or _declared_dtype(source.config) != reading.main_dtype:
                write_config(source.config, staging, reading.main_dtype)
            if to == "hf":
                whole = as_in_source(reading.stream(), source.shape, origin)
                write_tensors(staging, whole, request.shard_bytes)
            else:
                _write_megatron(staging, reading, request.shard_bytes)
            if request.verify:
                _verify(staging, reading, {} if origin is None else origin.carried)
    return done


class _Reading:
    """A source's tensors in the dtype that is asked for; notes digests and progress."""

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype | None,
        progress: Callable[[int, int], None],
        *,
        verify: bool,
    ) -> None:
        """verify: note digests, as everything will be read twice."""
        self.shape = source.shape
        self.digests: dict[str, bytes] = {}
        self._source = source
        self._dtype = dtype
        self._kept = untrained(source.shape)
        self._progress = progress
        self._verify = verify
        self._done_bytes = 0
        self.size_bytes = sum(
            math.prod(size) * self.dtype_of(name).itemsize
            for name, size in hf_shapes(source.shape).items()
        )
        self._total_bytes = (2 if verify else 1) * self.size_bytes

    @property
    def main_dtype(self) -> torch.dtype:
        """What config.json is to say."""
        return self.dtype_of("model.embed_tokens.weight")

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype in which a tensor is given; of those that are not trained, the buffers' own."""
        if name in self._kept:
            return torch.float32
        return self._dtype or self._source.dtype_of(name)

    def read(self, name: str) -> Tensor:
        """A tensor."""
        tensor = _cast(name, self._source.read(name), self.dtype_of(name)).contiguous()
        if self._verify:
            self.digests[name] = digest(tensor)
        self.advance(tensor.nbytes)
        return tensor

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in order."""
        for name in hf_shapes(self.shape):
            yield name, self.read(name)

    def advance(self, size: int) -> None:
        """Report more bytes as read."""
        self._done_bytes += size
        self._progress(self._done_bytes, self._total_bytes)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype. Raises InputError if a finite value becomes infinite."""
    found = tensor.to(dtype)
    if tensor.dtype != dtype and bool((found.isinf() & tensor.isfinite()).any()):
        largest = tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
        raise InputError(
            f"{name} holds {largest:g}, and {dtype} ends at {torch.finfo(dtype).max:g}: give "
            "--dtype bfloat16 or float32"
        )
    return found


def digest(tensor: Tensor) -> bytes:
    """SHA-256 of a contiguous tensor's bytes, its dtype and its shape."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.view(torch.uint8).numpy())
    return found.digest()


def _declared_dtype(config: dict[str, Any]) -> torch.dtype | None:
    # transformers 5 writes dtype, earlier ones torch_dtype.
    return DTYPES.get(config.get("dtype") or config.get("torch_dtype"))


def _write_megatron(folder: Path, reading: _Reading, shard_bytes: int) -> None:
    (folder / RELEASE).mkdir()
    write_checkpoint(folder / RELEASE, reading.shape, reading, shard_bytes=shard_bytes)
    (folder / TRACKER).write_text(RELEASE)


def _verify(folder: Path, reading: _Reading, carried: Mapping[str, Any]) -> None:
    """Compare what `folder` holds with what was read for it, and with tensors that are carried."""
    with open_source(folder, files_to_carry(folder, None).paths) as written:
        for name, expected in reading.digests.items():
            tensor = written.read(name).contiguous()
            _check_digest(name, tensor, expected)
            reading.advance(tensor.nbytes)
        for name, value in carried.items():
            _check_digest(name, written.carried[name][:], digest(value[:]))


def _check_digest(name: str, tensor: Tensor, expected: bytes) -> None:
    if digest(tensor) != expected:
        raise VerificationFailed(
            f"{name} was written otherwise than it was read; nothing was kept. Is the disk or the "
            "memory at fault?"
        )


def check_space(target: Path, size_bytes: int) -> None:
    """Raise InputError when the disk on which `target` is to be has no room for so much."""
    existing = next(path for path in target.absolute().parents if path.exists())
    if not existing.is_dir():
        raise InputError(f"cannot make {target}: {existing} is no folder")
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < _SPARE * size_bytes:
        raise InputError(
            f"{target} needs {size_bytes / 1e9:.1f} GB, but {existing} has {free_bytes / 1e9:.1f} "
            "GB free: make room, or name a folder on another disk"
        )
