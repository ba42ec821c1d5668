"""How slices are exchanged. Runs on every trainer rank."""

from dataclasses import dataclass

import torch

ATTEMPTS = 2
"""Transfers of one weight sync to one generator; the second if parcels arrived damaged."""


@dataclass(frozen=True)
class ExchangeSettings:
    """How to exchange."""

    host: str
    """Where the stores of the groups listen."""
    backend: str
    """Collectives of the groups; or IPC: no groups, but memory that ranks on one node share; or
    HOST: gloo, by way of host memory."""
    dtype: torch.dtype
    """Of elements on the wire."""
    bucket_bytes: int
    deadline_s: float
    name: str
    """Prefix of the groups' names, the same on every rank and of no other syncer."""
    grace_s: float = 30.0
    """How long all others wait for a generator that has taken a version before."""
    is_concurrent: bool = True
    """Whether a trainer rank serves all its generators at once. Not where collectives are kernels:
    those of two groups on one device, started in different orders on different ranks, may wait for
    each other for ever."""
    relays: bool = False
    """Whether generators pass weights on to each other."""
