"""Properties of GPUs, by name. Pure."""

import re
from dataclasses import dataclass

from megatron_rl.config.errors import InputError

MIB = 1 << 20
GIB = 1 << 30
DEFAULT = "h100-80g"
HOST_GPUS = 8
"""GPUs of a node: tensor ranks and the ranks of an engine stay within one."""


@dataclass(frozen=True)
class Gpu:
    """One device, by the vendor's data sheet."""

    memory_bytes: int
    """As nvidia-smi shows it."""
    bf16_flops: float
    """Peak FLOP/s of dense matrix products."""
    fp8_flops: float | None
    """None: no FP8 tensor cores."""
    capability: tuple[int, int]
    """CUDA compute capability."""


# Peaks: NVIDIA's data sheets, SXM models where there are several, without sparsity.
GPUS = {
    "a100-40g": Gpu(40_960 * MIB, 312e12, None, (8, 0)),
    "a100-80g": Gpu(81_920 * MIB, 312e12, None, (8, 0)),
    "l40s-48g": Gpu(46_068 * MIB, 362e12, 733e12, (8, 9)),
    "h100-80g": Gpu(81_559 * MIB, 989e12, 1979e12, (9, 0)),
    "h200-141g": Gpu(143_771 * MIB, 989e12, 1979e12, (9, 0)),
    "b200-180g": Gpu(183_359 * MIB, 2250e12, 4500e12, (10, 0)),
}


_SERIES = {
    r"rtx.?30[5-9]0|\ba(10|16|40)\b": (8, 6),
    r"rtx.?40[5-9]0|\bl(4|40s?)\b": (8, 9),
    r"\b(gh200|h20|h800)\b": (9, 0),
    r"\bgb200\b": (10, 0),
    r"\b(gb300|b300)\b": (10, 3),
    r"rtx.?50[5-9]0|rtx pro": (12, 0),
}
"""Pattern of another GPU's name -> its compute capability."""


def named_capability(name: str) -> tuple[int, int] | None:
    """Compute capability of a GPU by a name of GPUS or the driver's; None: unknown.

    Source: developer.nvidia.com/cuda-gpus.
    """
    if name in GPUS:
        return GPUS[name].capability
    found = (known for series, known in _SERIES.items() if re.search(series, name.lower()))
    return next(found, None)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises InputError."""
    if name not in GPUS:
        raise InputError(f"--gpu {name!r} is not known; known: {', '.join(GPUS)}")
    return GPUS[name]


_SXM_NAMES = {
    r"\bA100\b": "a100-80g",
    r"\bL40S\b": "l40s-48g",
    r"\bH100\b": "h100-80g",
    r"\bH200\b": "h200-141g",
    r"\bB200\b": "b200-180g",
}
"""Pattern of the driver's name -> a GPU with the same peak."""


def named_peak(device: str, *, is_fp8: bool) -> float | None:
    """Peak FLOP/s of a device by the driver's name; None: unknown, as for PCIe and NVL models."""
    if re.search(r"\bH[12]00\b.*(PCIe|NVL)", device):
        return None
    found = (GPUS[name] for pattern, name in _SXM_NAMES.items() if re.search(pattern, device))
    gpu = next(found, None)
    if gpu is None:
        return None
    return gpu.fp8_flops if is_fp8 else gpu.bf16_flops
