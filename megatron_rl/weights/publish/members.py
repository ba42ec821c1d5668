"""Who takes part in a publish, and how it went. Used by every trainer rank."""

from dataclasses import dataclass, field

import msgspec

from megatron_rl.protocol.types import Hello


class Member(msgspec.Struct, frozen=True):
    """A generator that takes part in a publish."""

    name: str
    hello: Hello


@dataclass
class Outcome:
    """How one publish went, as rank 0 knows; elsewhere `failed` and `passed_over` alone."""

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
