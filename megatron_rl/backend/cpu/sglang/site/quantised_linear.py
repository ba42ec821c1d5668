"""FP8 weights on a CPU without AMX, whose kernels are the only ones that SGLang has for them there.

Imported by SGLang's processes on the CPU. Weights are quantised as on a device without FP8, with
one scale a matrix. Products take their values; activations are not quantised.
"""

from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import linear


def install(module: ModuleType) -> None:
    """Let the linear layers of `sglang.srt.layers.quantization.fp8` work without AMX."""
    if module.cpu_has_amx_support():
        return

    def apply(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = (layer.weight.t().float() * layer.weight_scale).to(x.dtype)
        return linear(x, weight, bias)

    # SGLang 0.5.23 asserts AMX where it takes the device for a CPU.
    module._is_cpu = False
    module.Fp8LinearMethod.apply = apply
