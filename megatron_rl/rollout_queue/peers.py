"""Tables of live generators and verifiers, their work and their room.

Used by the rollout queue. Room is the announced capacity minus the items that the queue handed out
and did not get back. An index finds the peer with most room among thousands.
"""

import bisect
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from megatron_rl.config.reward import WORKER_POOLS
from megatron_rl.protocol.types import VerifierReady
from megatron_rl.protocol.wire import WireError

log = logging.getLogger(__name__)

ABSENT_S = 5.0
"""A lease or request is lost if the heartbeats of its peer do not name it for this long."""


class _Entry(NamedTuple):
    """Sorts peers: most room first, then the earliest place."""

    minus_room: int
    place: int
    name: str


@dataclasses.dataclass
class _Class:
    """Peers with the same policy version and the same role (evaluator or not)."""

    names: set[str] = dataclasses.field(default_factory=set)
    roomy: set[str] = dataclasses.field(default_factory=set)
    """Peers with room."""
    entries: list[_Entry] = dataclasses.field(default_factory=list)
    """Sorted entries of the peers with room."""


class PeerSelection:
    """A live view of the peers that may take an item."""

    def __init__(self, classes: Sequence[_Class]) -> None:
        self._classes = classes

    def __contains__(self, name: str) -> bool:
        return any(name in one.names for one in self._classes)

    def __len__(self) -> int:
        return sum(len(one.names) for one in self._classes)

    @property
    def has_room(self) -> bool:
        return any(one.entries for one in self._classes)

    def has_other(self, avoided: Collection[str]) -> bool:
        """Whether a selected peer, full or not, is not avoided."""
        return len(self) > sum(name in self for name in avoided)

    def find_roomiest(self, avoided: Collection[str] = ()) -> str | None:
        """The peer with most room, the earliest of equals; None when all are full.

        avoided: peers to skip, unless all selected peers are avoided.
        """
        if avoided and not self.has_other(avoided):
            avoided = ()
        reach = len(avoided) + 1
        firsts = (
            next((entry for entry in one.entries[:reach] if entry.name not in avoided), None)
            for one in self._classes
        )
        first = min(filter(None, firsts), default=None)
        return None if first is None else first.name

    def with_room(self, names: Iterable[str]) -> set[str]:
        wanted = set(names)
        return set().union(*(wanted & one.roomy for one in self._classes))

    def missing(self, names: Iterable[str]) -> set[str]:
        return set(names).difference(*(one.names for one in self._classes))


class _RoomIndex:
    """Peers by class and room. There are at most two classes per policy version in use."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, bool], _Class] = {}
        self._known: dict[str, tuple[tuple[int, bool], _Entry]] = {}

    def put(self, name: str, key: tuple[int, bool], *, room: int, place: int) -> None:
        """Note the state of a peer. key: (version, is evaluator). place: sorts equal room."""
        entry = _Entry(-room, place, name)
        if self._known.get(name) == (key, entry):
            return
        self.remove(name)
        self._known[name] = key, entry
        mine = self._classes.setdefault(key, _Class())
        mine.names.add(name)
        if room:
            mine.roomy.add(name)
            bisect.insort(mine.entries, entry)

    def remove(self, name: str) -> None:
        if name not in self._known:
            return
        key, entry = self._known.pop(name)
        mine = self._classes[key]
        mine.names.remove(name)
        if entry.minus_room:
            mine.roomy.remove(name)
            del mine.entries[bisect.bisect_left(mine.entries, entry)]
        if not mine.names:
            del self._classes[key]

    def select(self, min_version: int, is_evaluator: bool | None) -> PeerSelection:
        return PeerSelection([
            one
            for (version, evaluates), one in self._classes.items()
            if version >= min_version and is_evaluator in (None, evaluates)
        ])  # fmt: skip


@dataclasses.dataclass
class Peer:
    """One generator or verifier. Times are monotonic seconds."""

    name: str
    capacity: int
    session: int
    version: int
    heard_at: float
    place: int = 0
    """Order of arrival; a peer that restarts keeps its place."""
    is_held: bool = False
    """The generator keeps its version."""
    handed_out: dict[int, int] = dataclasses.field(default_factory=dict)
    """Id of a lease or request -> items that did not come back."""
    absent_since: dict[int, float] = dataclasses.field(default_factory=dict)
    """Id of a lease or request -> time since when heartbeats do not name it."""
    outstanding: int = 0
    """The sum of `handed_out`."""
    limit: int | None = None
    """Maximum number of items, if lower than the capacity."""
    fenced_at: float | None = None
    """Time since when a generator has no weights; None: it has weights."""
    pools: dict[str, int] = dataclasses.field(default_factory=dict)
    """Capacity of a verifier by worker pool."""
    busy: Counter[str] = dataclasses.field(default_factory=Counter)
    """Requests of a verifier by worker pool."""

    @property
    def room(self) -> int:
        """Number of items it can take; at least 0, even if its capacity shrank."""
        allowed = self.capacity if self.limit is None else min(self.limit, self.capacity)
        return max(0, allowed - self.outstanding)


class Peers:
    """Table of live peers of one kind. Methods accept the names of peers that are gone."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._peers: dict[str, Peer] = {}
        self._index = _RoomIndex()
        self._evaluators: frozenset[str] = frozenset()
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
        """Update a peer's state; returns the ids that an earlier session lost."""
        lost: list[int] = []
        known = self._peers.get(name)
        place = self._next_place if known is None else known.place
        if known is not None and known.session != session:
            lost = list(known.handed_out)
            log.warning("%s %s restarted and lost %d ids", self._kind, name, len(lost))
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
        self._update(known)
        return lost

    def find_lost(self, name: str, reported: Collection[int], now: float) -> list[int]:
        """Ids that were lost on the way to a peer. reported: ids that its heartbeat names."""
        peer = self._peers[name]
        absent = peer.handed_out.keys() - reported
        # At first the lease or request may still be on its way.
        peer.absent_since = {id_: peer.absent_since.get(id_, now) for id_ in sorted(absent)}
        return [id_ for id_, since in peer.absent_since.items() if now - since >= ABSENT_S]

    def _update(self, peer: Peer) -> None:
        """Index a peer; call after every change."""
        key = peer.version, peer.name in self._evaluators
        self._index.put(peer.name, key, room=peer.room, place=peer.place)

    def limit(self, name: str, items: int | None) -> None:
        """Limit the items of a peer; None: to its capacity."""
        peer = self._peers.get(name)
        if peer is not None and peer.limit != items:
            peer.limit = items
            self._update(peer)

    def hear(self, name: str, now: float) -> None:
        if name in self._peers:
            self._peers[name].heard_at = now

    def drop(self, name: str) -> list[int]:
        """Forget a peer that is gone; returns its ids."""
        peer = self._peers.pop(name, None)
        self._index.remove(name)
        return list(peer.handed_out) if peer else []

    def drop_silent(self, now: float, timeout_s: float) -> list[int]:
        """Forget the peers that were silent for too long; returns their ids."""
        lost: list[int] = []
        for name, peer in list(self._peers.items()):
            silent_s = now - peer.heard_at
            if silent_s > timeout_s:
                log.warning(
                    "%s %s was silent for %.1f s: %d ids go to others",
                    self._kind, name, silent_s, len(peer.handed_out),
                )  # fmt: skip
                lost += self.drop(name)
        return lost

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def __getitem__(self, name: str) -> Peer:
        return self._peers[name]

    @property
    def all(self) -> list[Peer]:
        """The live peers, in order of arrival."""
        return list(self._peers.values())

    def set_evaluators(self, names: frozenset[str]) -> None:
        """Set the names of the evaluators, alive or not, for `select`."""
        if names != self._evaluators:
            changed, self._evaluators = names ^ self._evaluators, names
            for name in changed & self._peers.keys():
                self._update(self._peers[name])

    def select(self, min_version: int = -1, *, is_evaluator: bool | None = None) -> PeerSelection:
        """Peers with at least that version. is_evaluator: only evaluators, or only others."""
        return self._index.select(min_version, is_evaluator)

    def hand_out(self, name: str, item_id: int, items: int) -> None:
        """Count the items of a new id against a peer's room."""
        peer = self._peers[name]
        peer.handed_out[item_id] = items
        peer.outstanding += items
        self._update(peer)

    def give_back(self, name: str, item_id: int, items: int = 1) -> None:
        peer = self._peers.get(name)
        if peer is None or item_id not in peer.handed_out:
            return
        before = peer.handed_out[item_id]
        left = peer.handed_out[item_id] = max(0, before - items)
        peer.outstanding -= before - left
        if not left:
            del peer.handed_out[item_id]
        self._update(peer)

    @property
    def names(self) -> list[str]:
        return list(self._peers)

    def describe(self, now: float) -> str:
        """One line: each peer with its load and the age of its last message."""
        if not self._peers:
            return f"no {self._kind}"
        return ", ".join(
            f"{peer.name} ({peer.outstanding}/{peer.capacity} busy, version {peer.version}, "
            f"heard {now - peer.heard_at:.1f} s ago)"
            for peer in self._peers.values()
        )


class Verifiers(Peers):
    """The live verifiers and their requests.

    A request takes room in every worker pool that its steps may need, as the verifier counts.
    """

    def __init__(self) -> None:
        super().__init__("verifier")

    def note_ready(self, name: str, ready: VerifierReady, now: float) -> list[int]:
        """Update a verifier's state; returns the requests that an earlier session lost.

        Raises WireError for an unknown worker pool.
        """
        if unknown := sorted(ready.capacity.keys() - set(WORKER_POOLS)):
            raise WireError(
                f"{name} grades in worker pools {unknown}; there are {sorted(WORKER_POOLS)}"
            )
        total = sum(ready.capacity.values())
        lost = self.announce(name, capacity=total, session=ready.session, version=-1, now=now)
        self._peers[name].pools |= ready.capacity
        return lost

    def find_room(self, pools: frozenset[str], failed: frozenset[str] = frozenset()) -> str | None:
        """The verifier with most room for a request that needs these pools; None when all are full.

        failed: verifiers that failed the request before. They are skipped, if another verifier has
        all these worker pools.
        """
        # The fullest worker pool decides how much room a verifier has.
        rooms = {
            peer.name: min(peer.pools[pool] - peer.busy[pool] for pool in pools)
            for peer in self._peers.values()
            if pools <= peer.pools.keys()
        }
        rooms = {name: room for name, room in rooms.items() if name not in failed} or rooms
        name = max(rooms, key=rooms.__getitem__, default=None)
        return name if name is not None and rooms[name] > 0 else None

    def take(self, name: str, request_id: int, pools: frozenset[str]) -> None:
        self.hand_out(name, request_id, 1)
        self._peers[name].busy.update(pools)

    def free(self, name: str, request_id: int, pools: frozenset[str]) -> None:
        peer = self._peers.get(name)
        if peer is not None and request_id in peer.handed_out:
            self.give_back(name, request_id)
            peer.busy.subtract(pools)

    def describe(self, now: float) -> str:
        """Each worker pool with work and its verifiers; if none has work, all verifiers."""
        busy = ", ".join(
            f"{pool}: {peer.name} ({peer.busy[pool]}/{peer.pools[pool]} busy, "
            f"heard {now - peer.heard_at:.1f} s ago)"
            for pool in WORKER_POOLS
            for peer in self._peers.values()
            if peer.busy[pool]
        )
        return busy or ", ".join(self.names) or "no verifier"
