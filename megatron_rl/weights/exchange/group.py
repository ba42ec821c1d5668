"""Process groups of trainer ranks and the ranks of one engine.

Used by trainer ranks and by engines; needs torch and messages alone, so that both may share it.
For broadcasts SGLang's ranks form the same group with their own `init_custom_process_group`: what
must match is the TCP store, the prefix in front of its keys and the group's name.
"""

import socket
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.protocol.types import JoinGroup
from megatron_rl.weights.exchange.device_group import (
    abort_group,
    group_options,
    is_of_devices,
    made_apart,
)


class Work(Protocol):
    """An operation under way; torch's word for what an asynchronous one returns."""

    def wait(self, timeout: timedelta) -> object:
        """Until it is over. Raises RuntimeError when it fails or takes longer."""


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
    """Form the group; over gloo it returns when all `world_size` ranks have joined.

    NCCL waits for them in the group's first operation: see `connect_group`. The ranks need not
    share a default process group. Raises torch's DistError when the others do not come within
    timeout_s, which is also the deadline of each later collective.
    """
    has_devices = is_of_devices(backend)
    with made_apart(timeout_s) if has_devices else nullcontext():
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            backend_options=group_options(timeout_s) if has_devices else None,
            timeout=timedelta(seconds=timeout_s),
        )
    # Collectives look up a rank's place in a group here (torch 2.11 to 2.14.1).
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


def connect_group(group: dist.ProcessGroup, device: torch.device, ends_at: float) -> None:
    """Connect all ranks, each of which calls this; until then backends may not have met.

    ends_at: monotonic time. Raises RuntimeError (torch's own) when the others are not there by
    then; the group is good for nothing but `close_group` afterwards.
    """
    # Asynchronous: a synchronous one over NCCL would run, or hang, in the stream of the training.
    work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    wait_until(work, ends_at)


def wait_until(work: Work, ends_at: float) -> None:
    """Wait for a work. Raises RuntimeError when it fails, or at `ends_at` (monotonic time)."""
    left_s = ends_at - time.monotonic()
    # torch takes a timeout of 0 for the group's default, which may be much longer.
    if left_s <= 0:
        raise RuntimeError("the exchange of weights passed its deadline")
    work.wait(timedelta(seconds=left_s))


def close_group(group: dist.ProcessGroup) -> None:
    """Leave the group."""
    if is_of_devices(dist.get_backend(group)):
        abort_group(group)
    else:
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
