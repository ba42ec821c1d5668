"""Who takes part in a weight sync, how the ranks exchange, and how it went.

Used by every trainer rank.
"""

from dataclasses import dataclass, field

import msgspec
import torch

from megatron_rl.config.generator import MOST_PASSED_BY
from megatron_rl.protocol.types import Hello

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


class Member(msgspec.Struct, frozen=True):
    """A generator that takes part in a weight sync."""

    name: str
    hello: Hello


class Backoff:
    """Which generators the next weight syncs pass by, as they failed several in a row. Pure.

    A weight sync waits for a generator that does not answer until its deadline. All others would
    wait at each weight sync, where one fails each time.
    """

    def __init__(self) -> None:
        self._weight_syncs = 0
        self._failures: dict[tuple[str, int], int] = {}
        """Of each life of a generator, since it was served last."""
        self._due_at: dict[tuple[str, int], int] = {}
        """Number of the weight sync that includes it again."""

    def begin_sync(self) -> None:
        """Another version is synced."""
        self._weight_syncs += 1

    def note_failed(self, name: str, session: int) -> int:
        """How many weight syncs pass it by: none after its first failure, then 2, 4, at most 8."""
        life = name, session
        self._failures[life] = failures = self._failures.get(life, 0) + 1
        passed_by = min(MOST_PASSED_BY, 2 ** (failures - 1)) if failures > 1 else 0
        self._due_at[life] = self._weight_syncs + passed_by + bool(passed_by)
        return passed_by

    def note_served(self, name: str, session: int) -> None:
        """It took a version."""
        self._failures.pop((name, session), None)
        self._due_at.pop((name, session), None)

    def is_due(self, name: str, session: int) -> bool:
        """Whether it takes part now. A restarted one does: its session is another one."""
        return self._weight_syncs >= self._due_at.get((name, session), 0)


@dataclass
class Outcome:
    """How one weight sync went, as rank 0 knows; elsewhere `failed` and `passed_over` alone."""

    failed: dict[str, str] = field(default_factory=dict)
    """Generators that were dropped, with the reason."""
    pauses_s: list[float] = field(default_factory=list)
    """How long each generator was paused."""
    wire_bytes: int = 0
    peak_bytes: int = 0
    """Most memory of buffers on an engine rank."""
    damaged: int = 0
    """Parcels whose digest was not that of their content."""
    transfers_s: list[float] = field(default_factory=list)
    """How long the slowest rank of each generator took parcels, if the method says so."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Generators to which another one did not pass the version on, with the reason: the method
    serves them otherwise when it is asked again. On every rank."""
    relayed: int = 0
    """Generators to which another one did."""
