"""Generators and verifiers that leave in good order; a row about those that are present or missing.

Used by the rollout queue's coordinator.
"""

from collections.abc import Iterator

import msgspec

from megatron_rl.config.tree import Config
from megatron_rl.protocol.endpoints import PROMPTS, VERIFY
from megatron_rl.protocol.types import GeneratorReady, Stop, VerifierReady
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.peer_rows import (
    GENERATORS,
    GENERATORS_WANTED,
    MISSING,
    VERIFIERS,
    VERIFIERS_WANTED,
    Row,
)
from megatron_rl.rollout_queue.scoring import Scoring

_FENCE_WEIGHT_SYNCS = 1.5
"""Weight syncs during which a generator without weights keeps its leases."""
Farewell = tuple[str, str, Stop]
"""Endpoint, peer, message."""


class Presence:
    """Knows which peers are missing; forgets those that leave, and says Stop to them."""

    def __init__(self, leases: Leases, scoring: Scoring, config: Config, now: float) -> None:
        self._leases, self._scoring = leases, scoring
        self._replicas = config.generator.replicas
        self._known_generators: set[str] = set()
        self._known_verifiers: set[str] = set()
        """All peers that ever were alive, without those that left in good order."""
        self._told: Row = {}
        self._least_grace_s, self._synced_at = config.queue.heartbeat_timeout_s, now
        self._stops: list[Farewell] = []

    def note_sync(self, now: float) -> None:
        """A weight sync has ended: the next one may take as long as the time since the last."""
        grace_s = _FENCE_WEIGHT_SYNCS * (now - self._synced_at)
        self._leases.fence_grace_s, self._synced_at = max(grace_s, self._least_grace_s), now

    def take_row(self) -> Row | None:
        """A row about the live peers; None if nothing changed."""
        generators, verifiers = set(self._leases.generators), set(self._scoring.verifiers)
        self._known_generators |= generators
        self._known_verifiers |= verifiers
        missing = (self._known_generators - generators) | (self._known_verifiers - verifiers)
        row: Row = {
            GENERATORS: len(generators),
            GENERATORS_WANTED: max(self._replicas, len(self._known_generators)),
            VERIFIERS: len(verifiers),
            VERIFIERS_WANTED: len(self._known_verifiers),
            MISSING: " ".join(sorted(missing)),
        }
        is_told = row == self._told or not (self._known_generators or self._known_verifiers)
        self._told = row
        return None if is_told else row

    def let_leave(self, peer: str, ready: GeneratorReady | VerifierReady, now: float) -> None:
        if isinstance(ready, GeneratorReady):
            self._leases.announce(peer, msgspec.structs.replace(ready, capacity=0), now)
            has_left = self._leases.hand_back(peer, ready.leases or [])
            endpoint = PROMPTS.name
        else:
            full = dict.fromkeys(ready.capacity, 0)
            self._scoring.announce(peer, msgspec.structs.replace(ready, capacity=full), now)
            has_left = self._scoring.hand_back(peer, ready.requests or [])
            endpoint = VERIFY.name
        if has_left:
            self._known_generators.discard(peer)
            self._known_verifiers.discard(peer)
            self._stops.append((endpoint, peer, Stop("it has left the run")))

    def forget_all(self) -> None:
        """Every process of the run ended with its launcher: others get the work of all peers."""
        for name in self._leases.generators:
            self._leases.hand_back(name, ())
        for name in self._scoring.verifiers:
            self._scoring.hand_back(name, ())
        self._known_generators.clear()
        self._known_verifiers.clear()

    def pop_stops(self) -> list[Farewell]:
        """Stops for peers that hold nothing any more, since the last call."""
        stops, self._stops = self._stops, []
        return stops

    def dismiss_all(self) -> Iterator[Farewell]:
        """A Stop for every peer, at the end of the run."""
        for endpoint, names in (
            (PROMPTS.name, self._leases.generators),
            (VERIFY.name, self._scoring.verifiers),
        ):
            for name in names:
                yield endpoint, name, Stop("the run is over")
