"""NCCL as torch offers it, on a host without: a group that records how it was made.

It stands for the external library alone. torch's own code makes the group, as far as Python goes.
"""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

UNDEFINED = -(1 << 31)
"""NCCL's own value of a setting that nobody chose."""


class _Stalled:
    """A work whose peers never come."""

    def wait(self, timeout: timedelta) -> None:
        raise dist.DistBackendError(f"timed out after {timeout.total_seconds():.1f} s")


class ScriptedNccl(dist.ProcessGroup):
    """In the place of torch's class for groups over NCCL."""

    made: "list[ScriptedNccl]" = []
    refuses_to_be_made = refuses_sends = False

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=UNDEFINED)
            self.is_high_priority_stream = False
            self.split_from: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        if self.refuses_to_be_made:
            raise dist.DistBackendError("no device")
        self.options = options
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "")
        self.is_aborted = self.is_shut_down = False
        self.senders: list[int] = []
        ScriptedNccl.made.append(self)

    def _set_sequence_number_for_group(self) -> None:
        pass

    @property
    def group_name(self) -> str:
        """As torch's own groups have it, which keep it in their backends."""
        return self.options.group_name

    def _get_backend(self, device: torch.device) -> "ScriptedNccl":
        """Of any device: the tensors of the tests are the host's (torch 2.14 asks)."""
        return self

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Stalled:
        self.senders.append(threading.get_ident())
        if self.refuses_sends:
            raise dist.DistBackendError("NCCL timeout in the end of a group")
        return _Stalled()

    def abort(self) -> None:
        self.is_aborted = True

    def shutdown(self) -> None:
        self.is_shut_down = True


def install() -> None:
    """Let torch use it, in a process that ends with the test."""
    distributed_c10d.ProcessGroupNCCL = ScriptedNccl
    distributed_c10d.is_nccl_available = lambda: True


def bound_default_group() -> dist.ProcessGroup:
    """A default group of this process alone, bound to a device as `device_id=` binds it.

    Its backend says that groups can be split from it, as NCCL's does.
    """
    dist.init_process_group("gloo")
    group = distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cuda")).supports_splitting
    group.bound_device_id = torch.device("cuda", 0)
    return group
