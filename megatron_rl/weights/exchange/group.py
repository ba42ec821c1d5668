"""Process groups of trainer ranks and the ranks of one engine.

Used by trainer ranks and by engines; needs torch and the protocol alone, so both may share it.

A group of device memory (NCCL) beside the trainer's needs what torch does not do by itself; the
section "Groups over NCCL" of docs/weights.md has the reasons:

- it is made while the default group is bound to no device, and without watchdog (`made_apart`);
- its communicators do not block their callers, which needs a limit of calls that torch reads once,
  in a process's first collective: the launcher sets it (`backend/environment.py`);
- each batch of sends starts in a new thread (`start_batch`), and a group is left by an abort.

As in torch 2.11 to 2.13. Of 2.14.1, which GPU hosts have, the Python part and the headers say the
same. Its second implementation of NCCL groups (TORCH_DIST_USE_NCCL2=1 takes it) is not known.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.protocol.nccl_settings import CALL_LIMIT_S, call_limit

log = logging.getLogger(__name__)

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
NON_BLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
LANE = "WEIGHT_SYNC_LANE"
"""What torch calls such a group in its own messages."""

# The environment and the default group belong to the whole process.
_making = threading.Lock()


def is_of_devices(backend: str) -> bool:
    """Whether groups of this backend are those of this file."""
    return backend == dist.Backend.NCCL


@contextmanager
def made_apart(timeout_s: float) -> Iterator[None]:
    """Within it a group is made apart from the default group, and without a watchdog.

    Making one forms no communicator and waits for nobody.
    """
    with _making:
        # Too late where the process has had collectives: see the module's docstring.
        os.environ.setdefault(CALL_LIMIT_S, call_limit(timeout_s))
        default: Any = distributed_c10d._get_default_group() if dist.is_initialized() else None
        bound = None if default is None else default.bound_device_id
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        if bound is not None:
            default.bound_device_id = None
        try:
            yield
        finally:
            if bound is not None:
                default.bound_device_id = bound
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def start_batch(ops: list[dist.P2POp], device: torch.device) -> list[dist.Work]:
    """As torch's `batch_isend_irecv`, in a thread that ends with it. Raises what that raises.

    Started in the caller's stream, so that what the caller has queued there comes first.
    """
    has_streams = torch.accelerator.is_available()
    stream = torch.accelerator.current_stream(device) if has_streams else None

    def start() -> list[dist.Work]:
        if stream is not None:
            torch.accelerator.set_stream(stream)
        with torch.no_grad():
            return dist.batch_isend_irecv(ops)

    with ThreadPoolExecutor(1, thread_name_prefix="start-batch") as thread:
        return thread.submit(start).result()


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
        master_listen_fd=listen(address, port) if is_master else None,
    )


def listen(address: str, port: int) -> int:
    """A listening socket's descriptor, whose owner is the caller."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family).detach()


def join_group(
    store: dist.Store,
    rank: int,
    members: Sequence[int],
    *,
    name: str,
    backend: str,
    timeout_s: float,
) -> dist.ProcessGroup:
    """Form the group; over gloo it returns when all members have joined.

    rank: in the group. members: the number of each rank of it, by which torch knows them.

    NCCL waits for them in the group's first operation. The ranks need not share a default process
    group. Raises torch's DistError when the others do not come within timeout_s, which is also the
    deadline of each later operation.
    """
    options = None
    if has_devices := is_of_devices(backend):
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        # A user who has set TORCH_NCCL_USE_COMM_NONBLOCKING has chosen, and is obeyed.
        if NON_BLOCKING not in os.environ:
            options.config.blocking = 0
    with made_apart(timeout_s) if has_devices else nullcontext():
        group, _ = distributed_c10d._new_process_group_helper(
            len(members),
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            backend_options=options,
            timeout=timedelta(seconds=timeout_s),
            group_desc=LANE,
        )
    # Collectives look up a rank's place in a group here (torch 2.11 to 2.14.1).
    places = {member: place for place, member in enumerate(members)}
    distributed_c10d._world.pg_group_ranks[group] = places
    return group


def close_group(group: dist.ProcessGroup) -> None:
    """Leave the group, whatever its peers do. Works that were waited for have ended by then."""
    if not is_of_devices(dist.get_backend(group)):
        dist.destroy_process_group(group)
        return
    try:
        distributed_c10d._abort_process_group(group)
    except dist.DistError as error:
        # It takes device memory until the process ends, which is no reason to end it.
        log.error("a group of the exchange could not be aborted: %s", error)
