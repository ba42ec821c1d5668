"""Gradients of weights: products summed in float32 where they are kept.

Used by trainer ranks; on the CPU some are MKL's.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.backend.loops import pointer

# Of CBLAS.
ROW_MAJOR, AS_IS, TRANSPOSED = 101, 111, 112


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T @ right; total is contiguous float32, the others [rows, ...] of one dtype.

    Beyond its arguments it takes no more memory than `left` in float32, give or take one row.
    """
    if total.dtype is left.dtype:
        total.addmm_(left.t(), right)
    elif _is_native(left) and _is_native(right):
        _add_native(total, left, right)
    else:
        # In slabs whose product is no larger than `left`.
        width = max(1, left.numel() // right.shape[1])
        for start in range(0, len(total), width):
            slab = slice(start, start + width)
            total[slab] += left[:, slab].t() @ right


def note_added(weight: Tensor) -> Tensor:
    """What autograd hands on for a weight whose gradient was added to main_grad already.

    As Megatron's own layers do: its hook is called, and leaves this gradient out. It would not if
    the weight were marked as that of a second layer, which relies on zeros.
    """
    weight.grad_added_to_main_grad = True
    weight.zero_out_wgrad = False
    return torch.empty_like(weight)


def _is_native(factor: Tensor) -> bool:
    """Whether MKL can take it. It reads host memory: a device's would end the process."""
    return factor.device.type == "cpu" and factor.is_contiguous() and _has_native_bfloat16()


def _add_native(total: Tensor, left: Tensor, right: Tensor) -> None:
    rows, outputs = left.shape
    inputs = right.shape[1]
    one = ctypes.c_float(1)
    of_left, of_right, of_total = pointer(left), pointer(right), pointer(total)
    _mkl().cblas_gemm_bf16bf16f32(
        *(ROW_MAJOR, TRANSPOSED, AS_IS, outputs, inputs, rows, one),
        *(of_left, outputs, of_right, inputs, one, of_total, inputs),
    )


@functools.cache
def _mkl() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _has_native_bfloat16() -> bool:
    """Whether MKL, which torch 2.13 brings along, multiplies bfloat16 by the CPU's instructions.

    Here it takes half the time of torch's own product, which first transposes a copy, rounds and
    then adds. On other makers' CPUs MKL computes without those instructions.
    """
    try:
        maker = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return (
        maker
        and torch.backends.mkl.is_available()
        and torch.cpu._is_avx512_bf16_supported()
        and hasattr(_mkl(), "cblas_gemm_bf16bf16f32")
    )
