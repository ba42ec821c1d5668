"""Hugging Face safetensors into this rank's shards. Runs on every trainer rank.

Files are memory-mapped and only the rank's slices are read; no rank holds a full model.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.backend import fp8
from megatron_rl.protocol.process import InputError
from megatron_rl.weights.names import (
    PADDED,
    copy_slices,
    hf_shapes,
    named_parameters,
    trainer_slices,
)
from megatron_rl.weights.ranks import own_place
from megatron_rl.weights.shape import ModelShape
from megatron_rl.weights.slices import Slice, local_part

_SHOWN = 5
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@torch.no_grad()
def load_weights(model: Sequence[torch.nn.Module], shape: ModelShape, folder: Path) -> None:
    """Fill every parameter of this rank from `folder`; vocabulary padding becomes zero.

    Call before the optimizer is built, which copies its float32 masters from the parameters. Raises
    InputError when tensors are missing, unexpected or of another shape than config.json says.
    """
    place = own_place()
    slices = [*trainer_slices(shape, place), *copy_slices(shape, place)]
    held = named_parameters(model)
    parameters = fp8.exact_values(held)
    _check_cover(slices, parameters)
    for name in PADDED & parameters.keys():
        parameters[name].zero_()
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        _check_tensors(shape, tensors, folder)
        for part in slices:
            local_part(parameters, part).copy_(_read(tensors[part.hf], part))
    fp8.round_to_fp8(held.values())


def _check_cover(slices: Iterable[Slice], parameters: dict[str, Tensor]) -> None:
    """Every element of a parameter is in a slice, but for padding."""
    covered: Counter[str] = Counter()
    for part in slices:
        covered[part.local] += part.size
    for name, parameter in parameters.items():
        is_full = covered.pop(name, 0) == parameter.numel()
        assert is_full or name in PADDED, f"{name} {tuple(parameter.shape)} is not covered"
    assert not covered, f"slices of parameters that are not here: {sorted(covered)[:_SHOWN]}"


def _read(source: Any, part: Slice) -> Tensor:
    """The slice of a safetensors tensor, as a matrix."""
    rows = slice(part.row, part.row + part.rows)
    if len(source.get_shape()) == 1:
        return source[rows].unsqueeze(1)
    return source[rows, part.column : part.column + part.columns]


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """HF name -> a lazy slice of its tensor, over all files of the folder."""
    files = [folder / SINGLE]
    if not files[0].is_file():
        if not (folder / INDEX).is_file():
            raise InputError(f"model.path: {folder} has neither {SINGLE} nor {INDEX}")
        index = json.loads((folder / INDEX).read_text())
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    tensors = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file} cannot be read as safetensors: {error}") from error
        tensors.update((name, opened.get_slice(name)) for name in opened.keys())
    return tensors


def _check_tensors(shape: ModelShape, tensors: dict[str, Any], folder: Path) -> None:
    expected = hf_shapes(shape)
    present = set(tensors)
    # A tied model may store its output matrix all the same; it equals the embedding.
    optional = {"lm_head.weight"} if shape.is_tied else set()
    optional |= {name for name in present if name.endswith("rotary_emb.inv_freq")}
    for claim, names in (
        ("lacks", expected.keys() - present),
        ("has unexpected", present - expected.keys() - optional),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN])
            raise InputError(
                f"{folder} {claim} {len(names)} tensors for {shape.architecture} with "
                f"{shape.layers} layers: {shown}{', ...' if len(names) > _SHOWN else ''}"
            )
    for name, size in expected.items():
        found = tuple(tensors[name].get_shape())
        if found != size:
            raise InputError(f"{folder}: {name} has shape {found}, but config.json means {size}")
