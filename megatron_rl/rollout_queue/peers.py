"""Who is there to take work, with how much room: generators, and likewise verifiers.

Used by the rollout queue. Capacity is kept here: free room = announced capacity - work handed out
and not returned.
"""

import dataclasses
import logging

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
    work: dict[int, int] = dataclasses.field(default_factory=dict)
    """Work id -> items of it still out."""

    @property
    def outstanding(self) -> int:
        """Items handed out and not returned."""
        return sum(self.work.values())


class Peers:
    """Table of live peers of one kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._peers: dict[str, Peer] = {}

    def announce(
        self, name: str, *, capacity: int, session: int, version: int, now: float
    ) -> list[int]:
        """Take in a peer's state; returns the ids of the work that an earlier session lost."""
        lost: list[int] = []
        known = self._peers.get(name)
        if known is not None and known.session != session:
            log.warning(
                "%s %s restarted; %d pieces of its work are lost",
                self._kind,
                name,
                len(known.work),
            )
            lost = list(known.work)
            known = None
        if known is None:
            log.info("%s %s is there: capacity %d", self._kind, name, capacity)
            known = self._peers[name] = Peer(name, capacity, session, version, now)
        known.capacity, known.version, known.heard_at = capacity, version, now
        return lost

    def hear(self, name: str, now: float) -> None:
        """Note a sign of life."""
        if name in self._peers:
            self._peers[name].heard_at = now

    def drop(self, name: str) -> list[int]:
        """Forget a peer that is gone; returns the ids of its work."""
        peer = self._peers.pop(name, None)
        return list(peer.work) if peer else []

    def drop_silent(self, now: float, timeout_s: float) -> list[int]:
        """Forget the peers that were silent for too long; returns the ids of their work."""
        lost: list[int] = []
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at > timeout_s:
                log.warning(
                    "%s %s was silent for %.1f s; %d pieces of its work go to others",
                    self._kind,
                    name,
                    now - peer.heard_at,
                    len(peer.work),
                )
                lost += self.drop(name)
        return lost

    def find_room(self, items: int, min_version: int = -1) -> tuple[Peer, int] | None:
        """The peer with most room, and how many of `items` it can take; None when all must wait.

        Work is split only where no peer could ever hold it whole.
        """
        peers = [peer for peer in self._peers.values() if peer.version >= min_version]
        if not peers:
            return None
        items = min(items, max(peer.capacity for peer in peers))
        roomiest = max(peers, key=lambda peer: peer.capacity - peer.outstanding)
        has_room = items > 0 and roomiest.capacity - roomiest.outstanding >= items
        return (roomiest, items) if has_room else None

    @property
    def rooms(self) -> dict[str, int]:
        """Free room of each peer."""
        return {peer.name: peer.capacity - peer.outstanding for peer in self._peers.values()}

    def hand_out(self, name: str, work_id: int, items: int) -> None:
        """Count work against a peer's room."""
        self._peers[name].work[work_id] = items

    def give_back(self, name: str, work_id: int, items: int = 1) -> None:
        """Free the room of `items` of a piece of work; harmless when the peer is gone."""
        peer = self._peers.get(name)
        if peer is None or work_id not in peer.work:
            return
        peer.work[work_id] -= items
        if peer.work[work_id] <= 0:
            del peer.work[work_id]

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
