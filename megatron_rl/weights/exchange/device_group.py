"""Process groups of device memory (NCCL) beside a trainer's own: how they are made and ended.

Used by trainer ranks and by engines, through `group.py`; needs torch alone. What such a group needs
that torch does not do by itself:

- torch makes a new group by splitting the default group when that is bound to a device; the ranks
  of an engine are no part of that one and would wait in vain. So it is unbound meanwhile.
- The watchdog of a group in which a peer fails ends the process. TORCH_NCCL_BLOCKING_WAIT, set
  while a group is made, gives it none: what fails raises where it is waited for.
- Forming a communicator, and the first send to a peer, wait without a deadline. Here communicators
  do not block their callers: torch ends such a call after TORCH_NCCL_NONBLOCKING_TIMEOUT. torch
  reads that once, in a process's first collective: the launcher sets it (`backend/environment.py`).
- A batch of sends that fails leaves torch's count of open NCCL groups at one, in that thread, where
  no communicator can be formed any more. So each batch starts in a thread of its own.
- Destroying a group waits for peers that may be gone; `abort_group` does not.

As in torch 2.11 to 2.13. Of 2.14.1, which GPU hosts have, the Python part and the headers say the
same. Its second implementation of NCCL groups (TORCH_DIST_USE_NCCL2=1 takes it) is not known.
"""

import logging
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
NON_BLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
CALL_LIMIT_S = "TORCH_NCCL_NONBLOCKING_TIMEOUT"

# The environment and the default group belong to the whole process.
_making = threading.Lock()


def is_of_devices(backend: str) -> bool:
    """Whether groups of this backend are those of this file."""
    return backend == dist.Backend.NCCL


def group_options(timeout_s: float) -> Any:
    """Options of a group whose communicators do not block their callers.

    A user who has set TORCH_NCCL_USE_COMM_NONBLOCKING has chosen, and is obeyed.
    """
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if NON_BLOCKING not in os.environ:
        options.config.blocking = 0
    return options


@contextmanager
def made_apart(timeout_s: float) -> Iterator[None]:
    """Within it a group is made apart from the default group, and without a watchdog.

    Making one forms no communicator and waits for nobody.
    """
    with _making, _unbound_default_group(), _blocking_wait():
        # Too late where the process has had collectives: see the module's docstring.
        os.environ.setdefault(CALL_LIMIT_S, call_limit(timeout_s))
        yield


def call_limit(timeout_s: float) -> str:
    """Value of CALL_LIMIT_S: whole seconds."""
    return str(max(1, math.ceil(timeout_s)))


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    default = distributed_c10d._get_default_group() if dist.is_initialized() else None
    if default is None or default.bound_device_id is None:
        yield
        return
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


@contextmanager
def _blocking_wait() -> Iterator[None]:
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
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


def abort_group(group: dist.ProcessGroup) -> None:
    """Leave the group, whatever its peers do. Works that were waited for have ended by then."""
    try:
        distributed_c10d._abort_process_group(group)
    except dist.DistError as error:
        # It takes device memory until the process ends, which is no reason to end it.
        log.error("a group of the exchange could not be aborted: %s", error)
