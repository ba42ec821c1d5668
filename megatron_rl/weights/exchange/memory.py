"""Memory that ranks on one node share, and the stream in which a device copies it.

Used by trainer ranks and engines; needs torch alone. Shared memory is a file without a name, or a
device's memory by CUDA IPC: nothing is left behind when processes die. A `Handle` is plain data.

A device does the work of one stream in order, and of several streams side by side. All threads
begin in the same stream, where a copy of a weight sync would wait for all queued training.
"""

import os
from base64 import b64decode, b64encode

import msgspec
import torch
from torch import Tensor


class SideStream:
    """A stream for one thread at a time that works in parallel to the thread that makes this.

    The same one each time: torch keeps what was freed in a stream for that stream.
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the stream; a thread on the CPU needs none."""
        self._device = device
        self._stream: torch.Stream | None = None
        self._begin: torch.Event | None = None

    def begin(self) -> None:
        """What the calling thread has queued on the device comes before all that follows."""
        if self._device.type != "cpu":
            self._begin = torch.accelerator.current_stream(self._device).record_event()

    def enter(self) -> None:
        """Called in a thread after `begin`: use the stream from now on."""
        if self._begin is None:
            return
        torch.accelerator.set_device_index(self._device.index)
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_event(self._begin)
        torch.accelerator.set_stream(self._stream)


def synchronize(device: torch.device) -> None:
    """Wait until what the calling thread has started on the device is done."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


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
            "weights.method='ipc' both need the same CUDA_VISIBLE_DEVICES, or use 'folder'"
        )
    parts = (b64decode(part) if isinstance(part, str) else part for part in handle.parts)
    storage = torch.UntypedStorage._new_shared_cuda(number, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: handle.size]


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
