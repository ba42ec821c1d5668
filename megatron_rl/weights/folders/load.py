"""Loads a model folder into this rank's shards. Runs on every trainer rank; none holds it whole.

A rank reads only its slices of the memory-mapped Hugging Face files, or the chunks of a Megatron
checkpoint that hold its slices.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.backend import fp8
from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.finite import check_loaded
from megatron_rl.weights.folders.hf_folder import open_model
from megatron_rl.weights.folders.megatron_folder import MegatronFolder
from megatron_rl.weights.folders.text_tensors import EMBEDDING, check_tied
from megatron_rl.weights.layout.entries import PADDED
from megatron_rl.weights.layout.local_names import named_tensors
from megatron_rl.weights.layout.ranks import own_place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Slice, local_part
from megatron_rl.weights.layout.trainer_layout import copy_slices, trainer_slices, untrained

_SHOWN = 5


@torch.no_grad()
def load_weights(model: Sequence[torch.nn.Module], shape: ModelShape, folder: Path) -> None:
    """Fill every parameter of this rank from `folder`; vocabulary padding becomes zero.

    Call before the optimizer is built, which copies its float32 masters from the parameters. Raises
    InputError when tensors are missing, unexpected or of another shape than config.json says.
    """
    place = own_place(model[0].config)
    slices = [*trainer_slices(shape, place), *copy_slices(shape, place)]
    held = named_tensors(model)
    parameters = fp8.exact_values(held)
    _check_cover(slices, parameters)
    for name in PADDED & parameters.keys():
        parameters[name].zero_()
    with ExitStack() as stack:
        tensors = open_model(folder, shape, stack).text
        for part in slices:
            local_part(parameters, part).copy_(_read(tensors[part.hf], part))
            if part.hf == EMBEDDING and shape.is_tied:
                check_tied(tensors, folder, part.row, part.row + part.rows)
    check_loaded(parameters, lambda: slices, folder)
    fp8.round_to_fp8(held.values())


@torch.no_grad()
def load_megatron(model: Sequence[torch.nn.Module], shape: ModelShape, folder: Path) -> None:
    """Fill every parameter of this rank from a Megatron checkpoint; every rank must call it.

    Call before the optimizer is built, as `load_weights`. Optimizer state is left alone. Raises
    InputError when the checkpoint is cut off or another model's.
    """
    checkpoint = MegatronFolder(folder)
    checkpoint.check(shape)
    chunks = [unwrap(chunk) for chunk in model]
    wanted = {str(n): _sharded(chunk, checkpoint.prefix) for n, chunk in enumerate(chunks)}
    # Rows that pad the vocabulary and are not in the checkpoint become zero.
    loaded = dist_checkpointing.load(wanted, str(checkpoint.folder))
    for number, chunk in enumerate(chunks):
        # Not strict: TransformerEngine's extra state is not loaded.
        lacking = chunk.load_state_dict(loaded[str(number)], strict=False).missing_keys
        assert not lacking or all("_extra_state" in key for key in lacking), lacking
    place = own_place(model[0].config)
    check_loaded(named_tensors(model), lambda: trainer_slices(shape, place), folder)


@torch.no_grad()
def check_untrained(model: Sequence[torch.nn.Module], shape: ModelShape, path: Path) -> None:
    """Raise InputError if a tensor that training never changes differs from that of `path`.

    path: model.path, from which engines take them: no weight sync sends them.
    """
    if not (names := untrained(shape)):
        return
    held = named_tensors(model)
    slices = trainer_slices(shape, own_place(model[0].config))
    with ExitStack() as stack:
        tensors = open_model(path, shape, stack).text
        for part in slices:
            if part.hf not in names:
                continue
            mine = local_part(held, part)
            if not torch.equal(mine, _read(tensors[part.hf], part).to(mine)):
                raise InputError(
                    f"{path}: {part.hf} differs from that of the weights that the trainer has "
                    "loaded. Engines would keep the folder's, since training does not change it: "
                    "set model.path to the Hugging Face folder of these weights (megatron-rl "
                    "convert, or an export of their run)"
                )


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside data parallelism and the bf16 wrapper."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def _sharded(chunk: GPTModel, prefix: str) -> dict[str, Any]:
    """The parts of checkpoint tensors that are a chunk's parameters."""
    state = chunk.sharded_state_dict()
    state = {name: part for name, part in state.items() if not isinstance(part, ShardedObject)}
    for part in state.values():
        part.key = prefix + part.key
    return state


def _check_cover(slices: Iterable[Slice], parameters: dict[str, Tensor]) -> None:
    """Check that slices cover every element of a parameter, padding excepted."""
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
