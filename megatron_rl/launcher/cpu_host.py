"""Whether a host without a GPU can run a model: a warning for a large one, or a refusal.

Used by `run.py`, and not by a dry run, which may be made on another host.
"""

import psutil

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.placement import listed_gpus
from megatron_rl.protocol.render import count_parameters

_SLOW_FROM = 500_000_000
"""Parameters from which a step on CPU cores takes many minutes."""
_STATE_BYTES = 16
"""A parameter in float32: master weight, gradient, two moments of Adam."""


def notes_of_host(config: Config) -> list[str]:
    """Lines for the user; none where the host lists GPUs. Raises InputError."""
    if listed_gpus():
        return []
    return check_cpu_host(
        count_parameters(config.model.path),
        item_bytes=2 if config.model.dtype == "bfloat16" else 4,
        engines=config.generator.replicas,
        trains=bool(config.train.steps or config.sft.steps),
        memory_bytes=psutil.virtual_memory().total,
    )


def check_cpu_host(
    parameters: int, *, item_bytes: int, engines: int, trains: bool, memory_bytes: int
) -> list[str]:
    """Lines for the user about a run without GPUs. Pure.

    item_bytes: of a weight in model.dtype. engines: copies of the model that engines hold.
    memory_bytes: that the host has. Raises InputError where weights and optimizer exceed it.
    """
    copies = engines + trains
    needed = parameters * (copies * item_bytes + trains * _STATE_BYTES)
    if needed > memory_bytes:
        raise InputError(
            f"this host lists no GPU, and its memory of {memory_bytes / 1e9:.1f} GB does not hold "
            f"a model of {parameters / 1e9:.1f} billion parameters: weights, gradients and "
            f"optimizer take {needed / 1e9:.1f} GB. Take a smaller model, or a host with GPUs"
        )
    if parameters < _SLOW_FROM:
        return []
    return [
        f"warning: this host lists no GPU, so the run uses its CPU cores: with "
        f"{parameters / 1e9:.1f} billion parameters a step takes many minutes. If it has GPUs, "
        "nvidia-smi and CUDA_VISIBLE_DEVICES should show them; `megatron-rl doctor` says more"
    ]
