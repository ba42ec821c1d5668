"""The GPU of a plan: the named one, or the one that nvidia-smi lists on this node.

Used by `megatron-rl plan`.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import DEFAULT, GIB, GPUS, MIB

_ASSUMED = "l40s-48g"
"""Assumed for unknown GPUs: most of them have no NVLink."""
_SAME_MEMORY = 0.02
_LIST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Card:
    """The GPU of a plan."""

    gpu: str
    """A name in GPUS; for an unknown card, the one whose speeds are assumed."""
    name: str = ""
    """Name of a card that is not in GPUS; "": it is in GPUS."""
    memory_bytes: int | None = None
    """None: that of `gpu`."""


def choose_card(name: str | None, memory_gib: float | None, listed: tuple[str, int] | None) -> Card:
    """The card of `--gpu` and `--gpu-memory`; without both, the card of this node.

    listed: name and bytes of memory of this node's card, from `listed_card`. Raises InputError.
    """
    memory = None if memory_gib is None else round(memory_gib * GIB)
    if name is None and listed is not None:
        known = [
            gpu
            for gpu, offer in GPUS.items()
            if gpu.partition("-")[0] in re.split("[^a-z0-9]+", listed[0].lower())
            and abs(offer.memory_bytes - listed[1]) < _SAME_MEMORY * listed[1]
        ]
        if known:
            return Card(known[0], memory_bytes=memory)
        return Card(_ASSUMED, listed[0], memory or listed[1])
    if name is None and memory is not None:
        return Card(_ASSUMED, f"a card of {memory_gib:g} GiB", memory)
    name = name or DEFAULT
    if name in GPUS:
        return Card(name, memory_bytes=memory)
    if memory is None:
        raise InputError(
            f"--gpu {name!r} is not known; known: {', '.join(GPUS)}. Give the memory of another "
            "card in GiB with --gpu-memory"
        )
    return Card(_ASSUMED, name, memory)


def listed_card() -> tuple[str, int] | None:
    """Name and bytes of memory of this node's first GPU; None: no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=_LIST_TIMEOUT_S,
    )  # fmt: skip
    name, _, mib = done.stdout.partition("\n")[0].rpartition(", ")
    return (name, int(mib) * MIB) if done.returncode == 0 and mib.strip().isdigit() else None
