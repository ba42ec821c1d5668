"""Process groups of trainer ranks and the ranks of one engine.

Used by trainer ranks and by engines; needs torch and messages alone, so that both may share it.
For broadcasts SGLang's ranks form the same group with their own `init_custom_process_group`: what
must match is the TCP store, the prefix in front of its keys and the group's name.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.protocol.types import JoinGroup


def open_store(address: str, port: int, *, is_master: bool, timeout_s: float) -> dist.TCPStore:
    """The store by which a group's ranks find each other; the master listens at address:port.

    port: 0 for any, at the master; the store knows which. Raises torch's DistError when the master
    is not there within timeout_s, which is also the deadline of each later wait for a key; OSError
    at the master when it cannot listen.
    """
    return dist.TCPStore(
        address,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        use_libuv=True,
        # By itself torch would listen on every interface.
        master_listen_fd=_listen(address, port) if is_master else None,
    )


def _listen(address: str, port: int) -> int:
    """A listening socket's descriptor, whose owner is the caller."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family).detach()


def join_group(
    store: dist.Store, rank: int, world_size: int, *, name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Form the group; returns when all `world_size` ranks have joined.

    The ranks need not share a default process group. Raises torch's DistError when the others do
    not come within timeout_s, which is also the deadline of each later collective.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )
    # Collectives look up a rank's place in a group here (torch 2.11 to 2.13).
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def open_group(message: JoinGroup, rank: int) -> dist.ProcessGroup:
    """Form a broadcast's group as an engine. Raises as `open_store` and `join_group` do."""
    store = open_store(message.address, message.port, is_master=False, timeout_s=message.timeout_s)
    return join_group(
        store,
        rank,
        message.world_size,
        name=message.group_name,
        backend=message.backend,
        timeout_s=message.timeout_s,
    )


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
