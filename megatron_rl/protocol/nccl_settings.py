"""NCCL's variables that all ranks of a communicator must agree on.

Generators say theirs in their Hello, and the trainer compares; the launcher sets them. They decide
how peers map each other's memory: ranks that differ break each other or wait for ever.
"""

import os

from megatron_rl.config.errors import InputError

CHOSEN = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}
"""NCCL's own choices, aloud: SGLang sets each to 0 for its ranks where it is not set. With the
first at 0, repeated sends of several ranks to one over a network were seen to hang (NCCL issue
1721). The second at 2: where the hardware can."""


def own_settings() -> dict[str, str]:
    """This process's values; "" for one that is not set."""
    return {name: os.environ.get(name, "") for name in CHOSEN}


def check_settings(own: dict[str, str], theirs: dict[str, str]) -> None:
    """Raise InputError for a trainer and a generator that may not share a communicator.

    A variable must be set on both sides, because an engine may choose one that is not.
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
