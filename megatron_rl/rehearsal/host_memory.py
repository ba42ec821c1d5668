"""Host memory that the device reads and writes: sizes without data, as the device's own tensors."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

PAGEABLE_BYTES = 64 << 10
"""The host waits for no copy of this size or less from pageable memory (CUDA Runtime API, "API
synchronization behavior")."""
_META = torch.device("meta")


class HostTensor(Tensor):
    """A tensor of the CPU that has the sizes of `held`, a meta tensor; so have results of it."""

    held: Tensor
    is_in_pinned_memory: bool

    @staticmethod
    def __new__(cls: type[Self], held: Tensor, *, is_pinned: bool) -> Self:
        found: Self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cpu",
        )
        found.held, found.is_in_pinned_memory = held, is_pinned
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func._schema.returns:
            return None
        own, options = tree_map_only(HostTensor, lambda each: each.held, (args, kwargs or {}))
        on_device = _META in (options.get("device"), getattr(args[0], "device", None))
        if "device" in options:
            options["device"] = _META
        result = func(*own, **options)
        if on_device:
            return result
        if result is own[0]:
            return args[0]
        is_pinned = func.is_view and args[0].is_in_pinned_memory
        return tree_map_only(Tensor, lambda each: cls(each, is_pinned=is_pinned), result)


def makes_host_wait(host: Tensor, device: Tensor, *, is_non_blocking: bool) -> bool:
    """Whether the host waits for the end of a copy between the two, as torch makes it on CUDA.

    A change of dtype or of strides goes through a pageable tensor of the host (torch 2.13.0,
    aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda).
    """
    if not is_non_blocking:
        return True
    is_plain = host.dtype is device.dtype and host.is_contiguous() and device.is_contiguous()
    if isinstance(host, HostTensor) and host.is_in_pinned_memory and is_plain:
        return False
    return device.numel() * device.element_size() > PAGEABLE_BYTES
