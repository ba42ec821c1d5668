"""What GPUs offer, by name. Pure."""

from dataclasses import dataclass

from megatron_rl.config.errors import InputError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One device, as the vendor states it."""

    memory_bytes: int
    """As nvidia-smi shows it."""
    bf16_flops: float
    """Peak of dense matrix products, FLOP/s."""
    fp8_flops: float | None
    """None: no FP8 tensor cores."""


# Peaks: NVIDIA's data sheets, SXM models where there are several, without sparsity.
GPUS = {
    "a100-40g": Gpu(40_960 * MIB, 312e12, None),
    "a100-80g": Gpu(81_920 * MIB, 312e12, None),
    "l40s-48g": Gpu(46_068 * MIB, 362e12, 733e12),
    "h100-80g": Gpu(81_559 * MIB, 989e12, 1979e12),
    "h200-141g": Gpu(143_771 * MIB, 989e12, 1979e12),
    "b200-180g": Gpu(183_359 * MIB, 2250e12, 4500e12),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises InputError."""
    if name not in GPUS:
        raise InputError(f"--gpu {name!r} is not known; known: {', '.join(GPUS)}")
    return GPUS[name]
