"""The sharded model as a stream of full Hugging Face tensors. Runs on every trainer rank.

    export_tensors -> (name, tensor) one by one -> bucketed -> what a publisher sends
                                                -> save_hf  -> a folder

A publisher takes any iterator of buckets, so an exchange from shard to shard can take the place of
`export_tensors` without a change there.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.weights.load import INDEX, SINGLE
from megatron_rl.weights.names import Entry, entries, named_parameters
from megatron_rl.weights.shape import ModelShape

NamedTensor = tuple[str, Tensor]
_SHARD_BYTES = 4 << 30
_STAGING_SUFFIX = ".partial"


@torch.no_grad()
def export_tensors(model: Sequence[torch.nn.Module], shape: ModelShape) -> Iterator[NamedTensor]:
    """Full HF tensors, in the compute dtype, without vocabulary padding.

    Every rank must iterate to the end; world rank 0 yields all tensors, the others yield none.
    Each tensor is gathered to the first tensor rank of its pipeline stage and sent to rank 0, one
    at a time: rank 0 holds one full tensor (three for attention) besides its shards.
    """
    if parallel_state.get_data_parallel_rank() != 0:
        return
    parameters = named_parameters(model[0])
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    for stage in range(stages):
        for entry in entries(shape, stage, stages):
            yield from _export(entry, parameters, shape, stage)


def _export(
    entry: Entry, parameters: dict[str, Tensor], shape: ModelShape, owner: int
) -> list[NamedTensor]:
    """The entry's tensors on world rank 0, nothing elsewhere; `owner` is its pipeline stage."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage not in (0, owner):
        return []
    tensors = _gather(parameters[entry.megatron], entry, shape) if stage == owner else []
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return []
    if owner != 0:
        tensors = _move_to_first_stage(tensors, entry, shape, owner, parameters)
    return list(zip(entry.hf, tensors, strict=True)) if stage == 0 else []


def _gather(part: Tensor, entry: Entry, shape: ModelShape) -> list[Tensor]:
    """HF tensors on the stage's first tensor rank, nothing on its others."""
    group = parallel_state.get_tensor_model_parallel_group()
    is_first = group.rank() == 0
    # A copy, so that what is yielded never aliases a parameter that the next step changes.
    part = part.detach().clone()
    if group.size() == 1:
        return entry.layout.join([part], shape)
    parts = [torch.empty_like(part) for _ in range(group.size())] if is_first else None
    dist.gather(part, parts, group=group, group_dst=0)
    return entry.layout.join(parts, shape) if parts is not None else []


def _move_to_first_stage(
    tensors: list[Tensor],
    entry: Entry,
    shape: ModelShape,
    owner: int,
    parameters: dict[str, Tensor],
) -> list[Tensor]:
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.rank() == owner:
        for tensor in tensors:
            dist.send(tensor.contiguous(), group=group, group_dst=0)
        return []
    like = next(iter(parameters.values()))
    received = [like.new_empty(size) for size in entry.hf_shapes(shape)]
    for tensor in received:
        dist.recv(tensor, group=group, group_src=owner)
    return received


def bucketed(tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Group tensors in order; a bucket exceeds `bucket_bytes` only when one tensor alone does."""
    bucket: list[NamedTensor] = []
    held_bytes = 0
    for name, tensor in tensors:
        if bucket and held_bytes + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append((name, tensor))
        held_bytes += tensor.nbytes
    if bucket:
        yield bucket


def save_hf(
    folder: Path, model: Sequence[torch.nn.Module], shape: ModelShape, *, source: Path
) -> None:
    """Write the model as a Hugging Face folder; every rank must call it.

    Configuration and tokenizer files are copied from `source`. The folder appears at once, when
    complete. Raises FileExistsError if it is there already.
    """
    if dist.get_rank() != 0:
        for _ in export_tensors(model, shape):
            pass
    else:
        _write_folder(folder, export_tensors(model, shape), source)
    dist.barrier()


def _write_folder(folder: Path, tensors: Iterable[NamedTensor], source: Path) -> None:
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    staging = folder.with_name(folder.name + _STAGING_SUFFIX)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    dtype = torch.float32
    for number, bucket in enumerate(bucketed(tensors, _SHARD_BYTES), start=1):
        file = f"model-{number:05d}.safetensors"
        held = {name: tensor.cpu().contiguous() for name, tensor in bucket}
        save_file(held, staging / file, metadata={"format": "pt"})
        # safetensors 0.8 leaves it readable by its owner alone.
        (staging / file).chmod(0o644)
        weight_map.update(dict.fromkeys(held, file))
        total_bytes += sum(tensor.nbytes for tensor in held.values())
        dtype = bucket[0][1].dtype
    _name_weights(staging, weight_map, total_bytes)
    _copy_files(source, staging, dtype)
    os.replace(staging, folder)


def _name_weights(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    files = set(weight_map.values())
    if len(files) == 1:
        os.replace(folder / files.pop(), folder / SINGLE)
        return
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _copy_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    for path in source.iterdir():
        is_weights = path.name == INDEX or path.suffix in (".safetensors", ".bin", ".pt", ".pth")
        if path.is_file() and not is_weights:
            shutil.copyfile(path, folder / path.name)
    values = json.loads((source / "config.json").read_text())
    # transformers 5 writes dtype, earlier ones torch_dtype.
    values.pop("torch_dtype", None)
    values["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
