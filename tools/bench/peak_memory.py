"""The most memory that tensors held at once while a function ran.

Used by tools.bench.train and by tests.
"""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_extra_bytes(function: Callable[[], object], device: torch.device | None = None) -> int:
    """Bytes allocated at the worst moment of the call, beyond those allocated before it.

    On CPU every event of torch's allocator is counted, so that temporaries inside of operators
    count too; buffers of the math library do not.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    events = trace.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
