"""Members, settings and outcome of a weight sync.

Used by every trainer rank.
"""

from dataclasses import dataclass, field

import msgspec
import torch

from megatron_rl.config.generator import MOST_PASSED_BY
from megatron_rl.protocol.types import Hello


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings of the exchange."""

    host: str
    """Address on which the stores of the groups listen."""
    backend: str
    """Collective backend of the groups; or without groups IPC, memory that ranks on one node
    share, or FOLDER, files."""
    dtype: torch.dtype
    """Type of elements on the wire."""
    bucket_bytes: int
    deadline_s: float
    name: str
    """Prefix of the groups' names: equal on every rank, unique to this syncer."""
    grace_s: float = 30.0
    """Most that all wait for a generator that has taken a version before: in the roll call, and in
    each round of packets."""
    groups: int = 1
    """Parts of the generators that are served one after the other; the others generate."""
    folder: str = ""
    """With FOLDER: path or URL of the files."""
    keeps: bool = False
    """With FOLDER: engines keep their parameters, so differences between versions are sent."""


class Member(msgspec.Struct, frozen=True):
    """A generator that takes part in a weight sync."""

    name: str
    hello: Hello


class Backoff:
    """Generators that the next weight syncs leave out, because they failed several in a row. Pure.

    A weight sync waits until its deadline for a generator that does not answer. Without back-off
    all other generators would wait for it at each weight sync.
    """

    def __init__(self) -> None:
        self._weight_syncs = 0
        self._failures: dict[tuple[str, int], int] = {}
        """Failures of each session of a generator since it was last served."""
        self._due_at: dict[tuple[str, int], int] = {}
        """Number of the next weight sync that includes the session."""

    def begin_sync(self) -> None:
        """Count a weight sync."""
        self._weight_syncs += 1

    def note_failed(self, name: str, session: int) -> int:
        """Return how many weight syncs leave it out: 0 at first, then 2, 4, at most 8."""
        key = name, session
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        passed_by = min(MOST_PASSED_BY, 2 ** (failures - 1)) if failures > 1 else 0
        self._due_at[key] = self._weight_syncs + passed_by + bool(passed_by)
        return passed_by

    def note_served(self, name: str, session: int) -> None:
        """Note that it took a version."""
        self._failures.pop((name, session), None)
        self._due_at.pop((name, session), None)

    def is_due(self, name: str, session: int) -> bool:
        """Whether it takes part now. A restarted generator does: it has a new session."""
        return self._weight_syncs >= self._due_at.get((name, session), 0)


@dataclass
class Outcome:
    """Result of one weight sync on rank 0; other ranks know only `failed`."""

    failed: dict[str, str] = field(default_factory=dict)
    """Dropped generator -> reason."""
    pauses_s: list[float] = field(default_factory=list)
    """Seconds for which each generator was paused."""
    wire_bytes: int = 0
    peak_bytes: int = 0
    """Peak memory of buffers on an engine rank."""
    damaged: int = 0
    """Parcels whose digest did not match their content."""
    transfers_s: list[float] = field(default_factory=list)
    """Seconds in which the slowest rank of each generator received, if the method reports them."""
