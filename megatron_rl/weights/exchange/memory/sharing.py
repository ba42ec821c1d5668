"""Memory that ranks on one node share: a file without a name, or a device's by CUDA IPC.

Shared by trainer ranks and engines. A `Handle` is plain data. Nothing has a name, so nothing is
left behind when processes die.
"""

import os
from base64 import b64decode, b64encode

import msgspec
import torch
from torch import Tensor


class Handle(msgspec.Struct, frozen=True):
    """How another process of the same user on this host reaches shared memory."""

    size: int
    """Bytes."""
    file: str = ""
    """Host memory: path of the owner's open file."""
    device: str = ""
    """Device memory: UUID of the device, which has another number in each process."""
    parts: tuple[int | bool | str, ...] = ()
    """Device memory: what torch's allocators tell each other; bytes in base64."""


class SharedMemory:
    """Memory that this process owns and others may open."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: bytes, at least 1."""
        self._descriptor = -1
        if device.type != "cpu":
            self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
            return
        self._descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        self.tensor = _mapped(f"/proc/self/fd/{self._descriptor}", size)
        """[size] uint8."""

    def handle(self) -> Handle:
        """For another process."""
        size = self.tensor.numel()
        if self._descriptor >= 0:
            return Handle(size, file=f"/proc/{os.getpid()}/fd/{self._descriptor}")
        _, *parts = self.tensor.untyped_storage()._share_cuda_()
        texts = (b64encode(part).decode() if isinstance(part, bytes) else part for part in parts)
        return Handle(size, device=_uuid(self.tensor.get_device()), parts=tuple(texts))

    def close(self) -> None:
        """Let go of it. Those who opened it keep it until they let go, too."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def open_shared(handle: Handle) -> Tensor:
    """[size] uint8, the owner's memory. Raises RuntimeError when it cannot be reached."""
    if handle.file:
        return _mapped(handle.file, handle.size)
    numbers = range(torch.cuda.device_count())
    number = next((each for each in numbers if _uuid(each) == handle.device), None)
    if number is None:
        raise RuntimeError(
            f"device {handle.device} of a trainer rank is not visible to this engine: with "
            "weights.method='ipc' both need the same CUDA_VISIBLE_DEVICES, or use 'host'"
        )
    parts = (b64decode(part) if isinstance(part, str) else part for part in handle.parts)
    storage = torch.UntypedStorage._new_shared_cuda(number, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: handle.size]


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
