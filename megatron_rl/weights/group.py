"""The weight group: one process group over trainer rank 0 and all ranks of all engines.

Used by trainer rank 0 and by in-process engines; imports nothing but torch, so that both sides may
share it. SGLang's ranks form the same group with their own `init_custom_process_group`: what must
match is the TCP store, the prefix in front of its keys and the group's name.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def open_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
) -> dist.ProcessGroup:
    """Form the group; returns when all `world_size` ranks have joined.

    Rank 0 listens at address:port. It need not share a default process group with the others.
    Raises torch's DistStoreError or DistNetworkError when the others do not come within timeout_s,
    which is also the deadline of each later collective.
    """
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, use_libuv=True
    )
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    # Collectives look up a rank's place in a group here (torch 2.11 to 2.13).
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def close_group(group: dist.ProcessGroup) -> None:
    """Leave the group."""
    dist.destroy_process_group(group)


def split_bucket(
    flat: torch.Tensor, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> list[tuple[str, torch.Tensor]]:
    """Views of the tensors that a flattened bucket holds.

    flat: [bytes] uint8, the tensors one after the other; dtypes are torch's names.
    """
    tensors, start = [], 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        tensors.append((name, flat[start:end].view(dtype).view(shape)))
        start = end
    if start != flat.numel():
        raise ValueError(f"the bucket holds {flat.numel()} bytes, its tensors need {start}")
    return tensors


def bucket_bytes(dtypes: list[str], shapes: list[list[int]]) -> int:
    """Size of a flattened bucket."""
    return sum(
        torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    )
