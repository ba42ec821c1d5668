"""How slices are exchanged, and what rank 0 tells the senders. Runs on every trainer rank."""

from dataclasses import dataclass

import msgspec
import torch

from megatron_rl.protocol.types import Receive

ATTEMPTS = 2
"""Transfers of one publish to one generator; the second if parcels arrived damaged."""
ENGINE_MARGIN_S = 2.0
"""The senders' deadline ends so much later than the receivers': a receiver that is late then has
time to report why, and its error says more than a sender's."""


@dataclass(frozen=True)
class ExchangeSettings:
    """How to exchange."""

    host: str
    """Where the stores of the groups listen."""
    backend: str
    """Collectives of the groups, or IPC: no groups, but memory that ranks on one host share."""
    dtype: torch.dtype
    """Of elements on the wire."""
    bucket_bytes: int
    deadline_s: float
    name: str
    """Prefix of the groups' names, the same on every rank and of no other publisher."""
    grace_s: float = 30.0
    """How long all others wait for a generator that has taken a version before."""
    is_concurrent: bool = True
    """Whether a trainer rank serves all its generators at once. Not where collectives are kernels:
    those of two groups on one device, started in different orders on different ranks, may wait for
    each other for ever."""


class Call(msgspec.Struct, frozen=True):
    """What rank 0 tells the senders of one generator."""

    receive: Receive | None = None
    """The transfer that begins; None: the publish to this generator is over."""
    left_s: float = 0.0
    """Until the transfer's deadline."""


def prepared_key(call: int, rank: int) -> str:
    """Set by a sender to "" when it can begin, else to why not.

    call: number of the call that it waits for.
    """
    return f"prepared/{call}/{rank}"


def call_key(call: int) -> str:
    """Set by rank 0 to a `Call`."""
    return f"call/{call}"


def failed_key(attempt: int) -> str:
    """Set by a sender that could not send, to the reason."""
    return f"failed/{attempt}"
