"""Products of bfloat16 whose sums are float32: logits, and gradients of weights.

Used by trainer ranks; on the CPU some are MKL's.
"""

import ctypes
import functools
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.backend.cpu.loops import pointer

# Of CBLAS.
ROW_MAJOR, AS_IS, TRANSPOSED = 101, 111, 112


Way = Literal["one_dtype", "out_dtype", "mkl", "plain"]


def way_of(device: str, result: torch.dtype, factors: torch.dtype, *, has_native: bool) -> Way:
    """How a product is computed whose result is not rounded to the dtype of its factors.

    device: a torch device's type. one_dtype: there is nothing to widen. out_dtype: the device's
    kernel writes its float32 sums as they are. mkl: so does MKL, where has_native says that the CPU
    can. plain: torch's products on the CPU, some rows at a time.
    """
    if result is factors:
        return "one_dtype"
    if device != "cpu":
        return "out_dtype"
    return "mkl" if has_native else "plain"


def write_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """result = left @ right^T. result: [rows, ids], in the dtype of the factors or in float32.

    left: [rows, inner]; right: [ids, inner].
    """
    match _way(result, left, right):
        case "one_dtype":
            torch.mm(left, right.t(), out=result)
        case "out_dtype":
            torch.mm(left, right.t(), out_dtype=result.dtype, out=result)
        case "mkl":
            _multiply_natively(result, left, right, is_added=False)
        case "plain":
            wide = left.float()
            # Copies of the right factor are no larger than a quarter of the result.
            width = max(1, result.numel() // (4 * right.shape[1]))
            for start in range(0, len(right), width):
                slab = slice(start, start + width)
                result[:, slab] = wide @ right[slab].float().t()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T @ right; total is contiguous float32, the others [rows, ...] of one dtype.

    Beyond its arguments it takes no more memory than `left` in float32, give or take one row.
    """
    match _way(total, left, right):
        case "one_dtype":
            total.addmm_(left.t(), right)
        case "out_dtype":
            torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
        case "mkl":
            _multiply_natively(total, left, right, is_added=True)
        case "plain":
            # Float32 copies would take three times as long: each product is rounded, then added.
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


def _way(result: Tensor, left: Tensor, right: Tensor) -> Way:
    has_native = left.is_contiguous() and right.is_contiguous() and _has_native_bfloat16()
    return way_of(left.device.type, result.dtype, left.dtype, has_native=has_native)


def _multiply_natively(result: Tensor, left: Tensor, right: Tensor, *, is_added: bool) -> None:
    """As `add_product`, or else as `write_product`. MKL reads host memory alone."""
    rows, width = left.shape
    of_left, of_right, of_result = pointer(left), pointer(right), pointer(result)
    columns, one = result.shape[1], ctypes.c_float(1)
    sizes = (TRANSPOSED, AS_IS, width, columns, rows) if is_added else (
        AS_IS, TRANSPOSED, rows, columns, width
    )  # fmt: skip
    _mkl().cblas_gemm_bf16bf16f32(
        *(ROW_MAJOR, *sizes, one, of_left, width, of_right, right.shape[1]),
        *(ctypes.c_float(is_added), of_result, columns),
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
