"""Which tensors a Hugging Face folder has, and which of them are the text model's.

Used by trainer ranks, conversions and checks before a start; needs no torch for the last. A tensor
is a lazy slice of a file (`get_shape`, `get_dtype`, `[rows]`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import PLAIN, Spelling
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import shown
from megatron_rl.weights.layout.trainer_layout import file_shapes, hf_shapes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COMPARED_ROWS = 4096


def open_files(files: Iterable[Path], stack: ExitStack, *, framework: str = "pt") -> dict[str, Any]:
    """Name -> a lazy slice of its tensor; each tensor must be in one file. Raises InputError.

    framework: of safetensors, "np" where only names and shapes matter.
    """
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework=framework))
        except (OSError, SafetensorError) as error:
            # Such as a download that was interrupted, or git without lfs.
            raise InputError(
                f"{file}, of {file.stat().st_size} bytes, is no whole file of safetensors "
                f"({error}): fetch it again"
            ) from error
        for name in opened.keys():
            if name in tensors:
                raise InputError(f"{file}: another file of the folder has the tensor {name} too")
            tensors[name] = opened.get_slice(name)
    return tensors


def stored_rows(files: Iterable[Path], name: str) -> "np.ndarray[Any, Any]":
    """The bytes of a matrix in one of the files, [rows, bytes], without reading them yet.

    NumPy has no bfloat16, and checks before a start import no torch.
    """
    for file in files:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        if name in header:
            start, end = header[name]["data_offsets"]
            rows = header[name]["shape"][0]
            shape = (rows, (end - start) // rows)
            return np.memmap(file, np.uint8, "r", offset=8 + size + start, shape=shape)
    raise KeyError(name)


@dataclass(frozen=True)
class FolderTensors:
    """Lazy slices of a folder's tensors. Those of the text model have its own names."""

    text: dict[str, Any]
    carried: dict[str, Any]
    """Of a wrapper's towers and projectors, and of layers that predict further tokens; under their
    names in the files."""
    spelling: Spelling


def sort_tensors(tensors: dict[str, Any], shape: ModelShape, folder: Path) -> FolderTensors:
    """Tensors by what they belong to.

    Raises InputError unless the text model's are those that config.json means, and for a wrapper
    without one of its parts.
    """
    found = _sorted(tensors, shape, folder)
    sizes = {name: tuple(tensor.get_shape()) for name, tensor in found.text.items()}
    check_tensors(shape, sizes, folder)
    return found


def _sorted(tensors: dict[str, Any], shape: ModelShape, folder: Path) -> FolderTensors:
    family = FAMILIES[shape.architecture]
    wrapper = family.wrapper
    if wrapper is None:
        ahead = {name: one for name, one in tensors.items() if _is_ahead(name, shape)}
        text = {name: one for name, one in tensors.items() if name not in ahead}
        return FolderTensors(_by_expert(text, shape), ahead, PLAIN)
    carried = {name: value for name, value in tensors.items() if name.startswith(wrapper.carried)}
    rest = {name: value for name, value in tensors.items() if name not in carried}
    spelling = next((one for one in wrapper.spellings if one.rename(EMBEDDING) in rest), None)
    if spelling is None or not carried:
        lacking = wrapper.carried if spelling else [one.text for one in wrapper.spellings]
        raise InputError(
            f"{folder}: a {shape.architecture} has tensors that begin with one of "
            f"{', '.join(lacking)}, and none is here: give the whole folder"
        )
    own = {spelling.rename(name): name for name in (*file_shapes(shape), HEAD)}
    text = {own.get(name, name): value for name, value in rest.items()}
    return FolderTensors(_by_expert(text, shape), carried, spelling)


def _by_expert(tensors: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Split tensors that hold all experts of a layer into tensors of one expert each."""
    if not FAMILIES[shape.architecture].fuses_experts:
        return tensors
    # It needs torch.
    from megatron_rl.weights.folders.fused_experts import split_experts

    return split_experts(tensors, shape)


def _is_ahead(name: str, shape: ModelShape) -> bool:
    """Whether a tensor is of a layer that predicts further tokens: those follow the model's own."""
    found = _LAYER.match(name) if FAMILIES[shape.architecture].predicts_ahead else None
    return found is not None and int(found[1]) >= shape.layers


def check_tensors(shape: ModelShape, found: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise InputError unless the tensors found (HF name -> shape) are those of `shape`."""
    expected = hf_shapes(shape)
    # A tied model may store its output matrix all the same; readers call `check_tied`.
    optional = {HEAD} if shape.is_tied else set()
    optional |= {name for name in found if name.endswith("rotary_emb.inv_freq")}
    lists = (
        ("lacks", expected.keys() - found.keys()),
        ("has unexpected", found.keys() - expected.keys() - optional),
    )
    model = f"{shape.architecture} with {shape.layers} layers"
    claims = [f"{what} {len(n)} tensors for {model}: {shown(n)}" for what, n in lists if n]
    if claims:
        raise InputError(f"{folder} {'; it '.join(claims)}")
    if shape.is_tied and HEAD in found:
        expected = {**expected, HEAD: expected[EMBEDDING]}
    for name, size in expected.items():
        if found[name] != size:
            raise InputError(
                f"{folder}: {name} has shape {found[name]}, but config.json means {size}"
            )


def check_tied(text: Mapping[str, Any], folder: Path, start: int, stop: int) -> None:
    """Raise InputError unless rows [start, stop) of a stored output matrix are the embedding's.

    text: lazy slices of a model whose config.json ties the two. transformers unties such a model if
    they differ, and engines and Megatron do not.
    """
    if HEAD not in text:
        return
    for row in range(start, stop, _COMPARED_ROWS):
        rows = slice(row, min(row + _COMPARED_ROWS, stop))
        first, second = text[EMBEDDING][rows], text[HEAD][rows]
        is_like = first.shape == second.shape and first.dtype == second.dtype
        if not is_like or bool((first != second).any()):
            raise InputError(
                f"{folder}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: "
                "set it to false in config.json, or remove the tensor with which the model was not "
                "trained"
            )
