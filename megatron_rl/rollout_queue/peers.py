"""Who is there to take leases or requests, with how much room: generators, and likewise verifiers.

Used by the rollout queue. Room is counted here: announced capacity less the items that were
handed out and not returned.
"""

import dataclasses
import logging

from megatron_rl.rollout_queue.peer_capacity import PeerCapacity, Selection

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Peer:
    """One generator or verifier."""

    name: str
    capacity: int
    session: int
    version: int
    heard_at: float
    """Monotonic seconds."""
    place: int = 0
    """Grows in the order in which peers came; one that restarts keeps its place."""
    is_held: bool = False
    """A generator that keeps its version."""
    held: dict[int, int] = dataclasses.field(default_factory=dict)
    """Id of a lease or a request -> items of it still out."""
    outstanding: int = 0
    """Items handed out and not returned: the sum of `held`."""
    limit: int | None = None
    """Items it may hold where that is less than its capacity."""
    fenced_at: float | None = None
    """Since when a generator has no version; None: it has one."""

    @property
    def room(self) -> int:
        """Items it can take; 0 too where it announced less than it holds."""
        allowed = self.capacity if self.limit is None else min(self.limit, self.capacity)
        return max(0, allowed - self.outstanding)


class Peers:
    """Table of live peers of one kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._peers: dict[str, Peer] = {}
        self._rooms = PeerCapacity()
        self._apart: frozenset[str] = frozenset()
        self._next_place = 0

    def announce(
        self,
        name: str,
        *,
        capacity: int,
        session: int,
        version: int,
        now: float,
        is_held: bool = False,
    ) -> list[int]:
        """Take in a peer's state; returns the ids that an earlier session lost."""
        lost: list[int] = []
        known = self._peers.get(name)
        place = self._next_place if known is None else known.place
        if known is not None and known.session != session:
            log.warning(
                "%s %s restarted; what it held under %d ids is lost",
                self._kind,
                name,
                len(known.held),
            )
            lost = list(known.held)
            known = None
        if known is None:
            log.info("%s %s is there: capacity %d", self._kind, name, capacity)
            known = self._peers[name] = Peer(name, capacity, session, version, now, place)
            self._next_place = max(self._next_place, place + 1)
        known.capacity, known.version, known.heard_at = capacity, version, now
        known.is_held = is_held
        if version >= 0:
            known.fenced_at = None
        elif known.fenced_at is None:
            known.fenced_at = now
        self._index(known)
        return lost

    def _index(self, peer: Peer) -> None:
        """Find it by its room from now on; call after every change."""
        self._rooms.put(
            peer.name,
            version=peer.version,
            is_apart=peer.name in self._apart,
            room=peer.room,
            place=peer.place,
        )

    def limit(self, name: str, items: int | None) -> None:
        """Let a peer hold at most so many items; None: its capacity. Harmless when it is gone."""
        peer = self._peers.get(name)
        if peer is not None and peer.limit != items:
            peer.limit = items
            self._index(peer)

    def hear(self, name: str, now: float) -> None:
        """Note a sign of life."""
        if name in self._peers:
            self._peers[name].heard_at = now

    def drop(self, name: str) -> list[int]:
        """Forget a peer that is gone; returns the ids that it held."""
        peer = self._peers.pop(name, None)
        self._rooms.remove(name)
        return list(peer.held) if peer else []

    def drop_silent(self, now: float, timeout_s: float) -> list[int]:
        """Forget the peers that were silent for too long; returns the ids that they held."""
        lost: list[int] = []
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at > timeout_s:
                log.warning(
                    "%s %s was silent for %.1f s; what it held under %d ids goes to others",
                    self._kind,
                    name,
                    now - peer.heard_at,
                    len(peer.held),
                )
                lost += self.drop(name)
        return lost

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def __getitem__(self, name: str) -> Peer:
        return self._peers[name]

    @property
    def all(self) -> list[Peer]:
        """The live peers, in the order in which they came."""
        return list(self._peers.values())

    def set_apart(self, names: frozenset[str]) -> None:
        """From now on `select` can tell these from the others, whether they are there or not."""
        if names != self._apart:
            changed, self._apart = names ^ self._apart, names
            for name in changed & self._peers.keys():
                self._index(self._peers[name])

    def select(self, min_version: int = -1, *, is_apart: bool | None = None) -> Selection:
        """Peers that hold that version or a later one. is_apart: those set apart, or the others."""
        return self._rooms.select(min_version, is_apart=is_apart)

    def find_room(self, min_version: int = -1) -> Peer | None:
        """The peer with most room for further items; None when all are full."""
        name = self.select(min_version).find_roomiest()
        return None if name is None else self._peers[name]

    @property
    def rooms(self) -> dict[str, int]:
        """Free room of each peer."""
        return {peer.name: peer.room for peer in self._peers.values()}

    def hand_out(self, name: str, item_id: int, items: int) -> None:
        """Count items of a new id against a peer's room."""
        peer = self._peers[name]
        peer.held[item_id] = items
        peer.outstanding += items
        self._index(peer)

    def give_back(self, name: str, item_id: int, items: int = 1) -> None:
        """Free the room of items of one id; harmless when the peer is gone."""
        peer = self._peers.get(name)
        if peer is None or item_id not in peer.held:
            return
        left = peer.held[item_id] - items
        peer.outstanding -= peer.held[item_id] - max(0, left)
        peer.held[item_id] = left
        if left <= 0:
            del peer.held[item_id]
        self._index(peer)

    @property
    def outstanding(self) -> int:
        """Items handed out to all peers and not returned."""
        return sum(peer.outstanding for peer in self._peers.values())

    @property
    def names(self) -> list[str]:
        """Names of the live peers."""
        return list(self._peers)

    def describe(self, now: float) -> str:
        """One line: each peer with its load and the age of its last sign of life."""
        if not self._peers:
            return f"no {self._kind}"
        return ", ".join(
            f"{peer.name} ({peer.outstanding}/{peer.capacity} busy, version {peer.version}, "
            f"heard {now - peer.heard_at:.1f} s ago)"
            for peer in self._peers.values()
        )
