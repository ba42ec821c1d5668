"""NCCL variables that all ranks of a communicator must share, and the limit of its calls.

The launcher sets them; generators send theirs in Hello, and the trainer compares. They decide how
ranks map each other's memory: ranks that differ fail or hang.
"""

import math
import os

from megatron_rl.config.errors import InputError

CHOSEN = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}
"""NCCL's defaults, explicitly, because SGLang sets each unset one to 0 for its ranks. With
CUMEM=0, repeated sends of several ranks to one over a network hang (NCCL issue 1721). NVLS=2: if
the hardware can."""

CALL_LIMIT_S = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Torch's variable with the seconds after which a call of a communicator that does not block ends.
Ranks may differ."""


def call_limit(timeout_s: float) -> str:
    """Value of CALL_LIMIT_S: whole seconds."""
    return str(max(1, math.ceil(timeout_s)))


def own_settings() -> dict[str, str]:
    """This process's values; "" if unset."""
    return {name: os.environ.get(name, "") for name in CHOSEN}


def check_settings(own: dict[str, str], theirs: dict[str, str]) -> None:
    """Raise InputError for a trainer and a generator that cannot share a communicator.

    A variable must be set on both sides, because an engine may choose a value for an unset one.
    """
    faulty = [name for name in CHOSEN if not own.get(name) or own[name] != theirs.get(name)]
    if faulty:
        told = ", ".join(
            f"{name} is {own.get(name) or 'not set'} at the trainer and "
            f"{theirs.get(name) or 'not set'} at the generator"
            for name in faulty
        )
        raise InputError(
            f"{told}: such ranks cannot exchange weights over NCCL. `megatron-rl` sets both for "
            "all that it starts; where they are set by hand, set the same on every host"
        )
