"""Hugging Face safetensors into this rank's shards. Runs on every trainer rank.

Files are memory-mapped and only the rank's slices are read; no rank holds a full model.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from megatron_rl.protocol.process import InputError
from megatron_rl.weights.names import (
    Entry,
    Share,
    copies,
    entries,
    named_parameters,
)
from megatron_rl.weights.shape import ModelShape

_SHOWN = 5
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@torch.no_grad()
def load_weights(model: Sequence[torch.nn.Module], shape: ModelShape, folder: Path) -> None:
    """Fill every parameter of this rank from `folder`.

    Call before the optimizer is built, which copies its float32 masters from the parameters. Raises
    InputError when tensors are missing, unexpected or of another shape than config.json says.
    """
    share = Share(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    mine = [*entries(shape, stage, stages), *copies(shape, stage, stages)]
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        _check_names(shape, set(tensors), folder)
        parameters = named_parameters(model[0])
        for entry in mine:
            sources = _sources(entry, tensors, shape, folder)
            parameter = parameters.pop(entry.megatron)
            part = entry.layout.split(sources, share, shape)
            assert part.shape == parameter.shape, f"{entry.megatron}: {part.shape}"
            parameter.copy_(part)
    assert not parameters, f"parameters without an entry in ARCHITECTURES: {sorted(parameters)}"


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


def _check_names(shape: ModelShape, present: set[str], folder: Path) -> None:
    expected = {name for entry in entries(shape, 0, 1) for name in entry.hf}
    # A tied model may store its output matrix all the same; it equals the embedding.
    optional = {"lm_head.weight"} if shape.is_tied else set()
    optional |= {name for name in present if name.endswith("rotary_emb.inv_freq")}
    for claim, names in (
        ("lacks", expected - present),
        ("has unexpected", present - expected - optional),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN])
            raise InputError(
                f"{folder} {claim} {len(names)} tensors for {shape.architecture} with "
                f"{shape.layers} layers: {shown}{', ...' if len(names) > _SHOWN else ''}"
            )


def _sources(entry: Entry, tensors: dict[str, Any], shape: ModelShape, folder: Path) -> list[Any]:
    sources = [tensors[name] for name in entry.hf]
    for name, source, expected in zip(entry.hf, sources, entry.hf_shapes(shape), strict=True):
        if tuple(source.get_shape()) != expected:
            raise InputError(
                f"{folder}: {name} has shape {tuple(source.get_shape())}, but config.json "
                f"means {expected}"
            )
    return sources
