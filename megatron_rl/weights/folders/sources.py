"""Model folders to convert from: what kind they are, and their tensors under HF names, one by one.

Nothing is read before it is asked for; what does not fit is refused when the folder is opened.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders import mistral_format
from megatron_rl.weights.folders.fused_experts import is_mxfp4
from megatron_rl.weights.folders.hf_folder import open_tensors
from megatron_rl.weights.folders.megatron_folder import (
    Block,
    MegatronFolder,
    is_megatron_folder,
    model_blocks,
)
from megatron_rl.weights.folders.model_files import read_config
from megatron_rl.weights.folders.scaled_fp8 import is_scaled_fp8
from megatron_rl.weights.folders.text_tensors import check_tied, open_files, sort_tensors
from megatron_rl.weights.layout.shape import ModelShape, shape_of
from megatron_rl.weights.layout.slices import as_matrix
from megatron_rl.weights.layout.trainer_layout import hf_shapes

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Source(Protocol):
    """An open model folder."""

    kind: str
    config: dict[str, Any]
    """Values of its config.json, of weights that are not quantised."""
    shape: ModelShape
    carried: dict[str, Any]
    """What a folder holds besides the model: lazy slices, by their names in the files."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor, by its HF name."""

    def read(self, name: str) -> Tensor:
        """A tensor, by its HF name. Raises InputError when its bytes are damaged."""

    def release(self) -> None:
        """Free what is kept from one `read` to the next."""


@contextmanager
def open_source(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    """The model in `folder`; `files` are those to carry along, with its config.json if any.

    Raises InputError for a folder that is cut off, or holds a model that is not supported.
    """
    with ExitStack() as stack:
        if is_megatron_folder(folder):
            yield MegatronSource(folder, read_config(folder, files))
        elif mistral_format.is_mistral_folder(folder):
            yield MistralSource(folder, stack)
        else:
            config = read_config(folder, files)
            yield HfSource(folder, config, open_tensors(folder, stack))


class HfSource:
    """A Hugging Face folder."""

    kind = "hf"

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        """tensors: lazy slices of open files, by HF name."""
        is_read = is_scaled_fp8(config) or is_mxfp4(config)
        left_out = "quantization_config" if is_read else ""
        self.config = {key: value for key, value in config.items() if key != left_out}
        self.shape = shape_of(self.config, folder)
        found = sort_tensors(tensors, self.shape, folder)
        self._tensors = found.text
        self.carried = found.carried
        for name, tensor in found.text.items():
            if tensor.get_dtype() not in _DTYPES:
                raise InputError(
                    f"{folder}: {name} is {tensor.get_dtype()}, but only {', '.join(_DTYPES)} are "
                    "supported: give the model without quantisation"
                )
        if self.shape.is_tied:
            check_tied(found.text, folder, 0, self.shape.vocab)

    def dtype_of(self, name: str) -> torch.dtype:
        """See Source."""
        return _DTYPES[self._tensors[name].get_dtype()]

    def read(self, name: str) -> Tensor:
        """See Source."""
        return self._tensors[name][:]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor as its file has them; reads no others."""
        return self._tensors[name][start:stop]

    def release(self) -> None:
        """See Source; nothing is kept."""


class MistralSource(HfSource):
    """A folder in mistral format."""

    kind = "mistral"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """The files stay open until `stack` closes."""
        config = mistral_format.read_config(folder)
        names = {mistral_format.name_of(name): name for name in hf_shapes(shape_of(config, folder))}
        found = open_files(sorted(folder.glob(mistral_format.WEIGHTS)), stack)
        # A tensor that is not known keeps its name, and is reported under it.
        super().__init__(folder, config, {names.get(name, name): found[name] for name in found})

    def read(self, name: str) -> Tensor:
        """See Source."""
        return mistral_format.reorder(name, super().read(name), self.shape)


class MegatronSource:
    """A Megatron checkpoint, with or without optimizer state."""

    kind = "megatron"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.shape = shape_of(config, folder)
        self.carried = {}
        self._folder = MegatronFolder(folder)
        self._folder.check(self.shape)
        self._blocks = {name: block for block in model_blocks(self.shape) for name in block.hf}
        self._held: tuple[Block, Tensor] | None = None

    def dtype_of(self, name: str) -> torch.dtype:
        """See Source."""
        return self._folder.dtype_of(self._blocks[name].key)

    def read(self, name: str) -> Tensor:
        """See Source."""
        block = self._blocks[name]
        size = block.hf_sizes[block.hf.index(name)]
        pieces = block.pieces_of[name]
        if len(pieces) == 1:
            first = (pieces[0].local_row, pieces[0].local_column)[: len(size)]
            return self._region(block, first, size)
        full = torch.empty(*size, dtype=self.dtype_of(name))
        target, parameter = as_matrix(full), as_matrix(self._whole(block))
        for piece in pieces:
            rows = slice(piece.local_row, piece.local_row + piece.rows)
            target[piece.row : piece.row + piece.rows] = parameter[rows]
        return full

    def _region(self, block: Block, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Part of a block."""
        ones = (1,) * len(block.lead)
        return self._folder.read(block.key, (*block.lead, *start), (*ones, *size)).view(*size)

    def _whole(self, block: Block) -> Tensor:
        """A block; the last one is kept, as HF tensors that share a block are read in a row."""
        if self._held is None or self._held[0] is not block:
            self._held = None
            self._held = (block, self._region(block, (0,) * len(block.size), block.size))
        return self._held[1]

    def release(self) -> None:
        """See Source; the last block."""
        self._held = None
