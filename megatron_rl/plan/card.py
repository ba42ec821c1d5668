"""The GPU of a plan: the named one, or the one that nvidia-smi lists on this node.

Used by `megatron-rl plan`.
"""

import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import DEFAULT, GIB, GPUS, MIB, named_capability

_ASSUMED = "l40s-48g"
"""Assumed for unknown GPUs: most of them have no NVLink."""
_SAME_MEMORY = 0.02
_ANSWER_S = 30.0


@dataclass(frozen=True)
class Card:
    """The GPU of a plan."""

    gpu: str
    """A name in GPUS; for an unknown card, the one whose speeds are assumed."""
    name: str = ""
    """Name of a card that is not in GPUS; "": it is in GPUS."""
    memory_bytes: int | None = None
    """None: that of `gpu`."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None: that of `gpu`."""


class ListedCard(NamedTuple):
    """A GPU as nvidia-smi lists it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


def choose_card(name: str | None, memory_gib: float | None, listed: ListedCard | None) -> Card:
    """The card of `--gpu` and `--gpu-memory`; without both, the card of this node.

    listed: this node's card, from `listed_card`. Raises InputError.
    """
    memory = None if memory_gib is None else round(memory_gib * GIB)
    if name is None and listed is not None:
        known = [
            gpu
            for gpu, offer in GPUS.items()
            if gpu.partition("-")[0] in re.split("[^a-z0-9]+", listed.name.lower())
            and abs(offer.memory_bytes - listed.memory_bytes) < _SAME_MEMORY * listed.memory_bytes
        ]
        if known:
            return Card(known[0], memory_bytes=memory)
        return Card(_ASSUMED, listed.name, memory or listed.memory_bytes, listed.capability)
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
    return Card(_ASSUMED, name, memory, named_capability(name))


def listed_card() -> ListedCard | None:
    """This node's first GPU; None: no GPU. Raises InputError as `query_gpus`."""
    found = re.match(r"(.*), (\d+), (\d+)\.(\d+)\s", query_gpus("name,memory.total,compute_cap"))
    if found is None:
        return None
    return ListedCard(found[1], int(found[2]) * MIB, (int(found[3]), int(found[4])))


def query_gpus(columns: str) -> str:
    """What nvidia-smi says of this node's GPUs, a line each; "": there is none, or it fails.

    Raises InputError if it does not answer, as with a driver that hangs.
    """
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_ANSWER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"nvidia-smi gave no answer within {_ANSWER_S:.0f} s on {socket.gethostname()}: the "
            "driver or a GPU hangs. Restart the host, or name the GPUs in CUDA_VISIBLE_DEVICES "
            "(empty: use the CPU)"
        ) from error
    return "" if done.returncode else done.stdout
