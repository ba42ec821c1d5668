"""Named spans of a trainer rank's time, and what a profiler records of its device.

Runs in trainer ranks. A span is an NVTX range on CUDA, and an annotation in torch's profiler.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import ProfilerActivity, record_function


@contextmanager
def span(name: str) -> Iterator[None]:
    """The block, or the function that it decorates, under a name."""
    with ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        stack.enter_context(record_function(name))
        yield


def recorded_activities() -> list[ProfilerActivity]:
    """What torch's profiler records: the host, and the GPU where there is one."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]
