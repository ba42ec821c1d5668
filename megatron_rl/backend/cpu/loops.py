"""The compiled loops of `megatron_rl/backend/cpu/kernels`, or None where there is no compiler.

Used by trainer ranks on CPU; whoever gets None computes the same in plain torch.
"""

import ctypes
import functools
import logging

import torch

from megatron_rl.backend.cpu.kernels.build import CompilerFailed, load

log = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """That of `kernels/NAME.cpp`; one warning where it cannot be had."""
    try:
        return load(name)
    except CompilerFailed as error:
        log.warning("training on the CPU takes up to twice as long without loops in C++: %s", error)
        return None


def library_for(name: str, tensor: torch.Tensor) -> ctypes.CDLL | None:
    """The same, or None where the tensor is of a device or dtype that the loops do not know."""
    if tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        return None
    return library(name)


def pointer(tensor: torch.Tensor, offset: int = 0) -> ctypes.c_void_p:
    """Of the tensor's element `offset`."""
    return ctypes.c_void_p(tensor.data_ptr() + offset * tensor.element_size())


def is_bfloat16(tensor: torch.Tensor) -> int:
    """As the loops ask for a dtype."""
    return int(tensor.dtype is torch.bfloat16)
