"""What stand-ins tell the tracer of their rank, and ask of it; set when a rank begins.

A stand-in for a kernel computes nothing that torch's own counters would see.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor


def _unset(*args: object) -> object:
    raise RuntimeError("no rank is being rehearsed")


add_flops: Callable[[int], object] = _unset
"""Called with the FLOPs of a kernel."""
know: Callable[[Tensor, Tensor], object] = _unset
"""Called with a tensor of the device and the values that the host has sent to it."""
read_lengths: Callable[[Tensor], Sequence[int]] = _unset  # type: ignore[assignment]
"""Lengths of packed sequences from their bounds, without a wait of the host."""
in_purpose: Callable[[str], AbstractContextManager[None]] = _unset  # type: ignore[assignment]
"""Called with the purpose of memory that is allocated within."""
