"""What stand-ins tell the tracer of their rank, and ask of it; set when a rank begins.

A stand-in for a kernel computes nothing that torch's own counters would see.
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def _unset(*args: object) -> object:
    raise RuntimeError("no rank is being rehearsed")


add_flops: Callable[[int], object] = _unset
"""Called with the FLOPs of a kernel."""
leave_out: Callable[[Tensor], object] = _unset
"""Called with a tensor that stands for one of host memory."""
read_lengths: Callable[[Tensor], Sequence[int]] = _unset  # type: ignore[assignment]
"""Lengths of packed sequences from their bounds, without a wait of the host."""
