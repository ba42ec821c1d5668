"""The most memory that tensors held at once while a function ran; that of the logprobs.

Used by tools.bench.train and by tests.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_rl.trainer.model.logprobs import OutputLayer, TokenLogprobs, token_logprobs


def is_accelerator(device: torch.device) -> bool:
    """Whether the device is not the host."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def peak_extra_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Bytes allocated at the worst moment of the call, beyond those allocated before it.

    On a device as many as were asked for: its allocator gives up to 1 MiB more to each of the large
    ones. On CPU every event of torch's allocator is counted, so that temporaries inside of
    operators count too; buffers of the math library do not.
    """
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        stats = torch.get_device_module(device).memory_stats
        before = stats(device)["requested_bytes.all.current"]
        function()
        torch.accelerator.synchronize(device)
        return stats(device)["requested_bytes.all.peak"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    events = trace.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def logprob_peak_over_bound(hidden: Tensor, targets: Tensor, layer: OutputLayer) -> float:
    """Most extra memory of logprobs, of the forward or the backward pass, over its bound.

    Extra is what is neither argument, nor result, nor gradient. hidden and the layer's weight must
    require gradients. The weight's gradient is summed in float32, then handed on in its dtype.
    """
    results: list[TokenLogprobs] = []

    def forward() -> None:
        results.append(token_logprobs(hidden, targets, layer))

    weight = layer.weight
    handed_on = 0 if weight.dtype == torch.float32 else weight.nbytes
    gradients = hidden.nbytes + 4 * weight.numel() + handed_on
    forward_bytes = peak_extra_bytes(forward, hidden.device)
    loss = results[0].logprobs.sum()
    backward_bytes = peak_extra_bytes(loss.backward, hidden.device) - gradients
    bound = layer.chunk_tokens * len(weight) * 4
    return max(forward_bytes, backward_bytes) / bound
