"""Peers by how much room they have, so that the roomiest is found without looking at all of them.

Used by the rollout queue, for thousands of generators. Peers stand in classes by their policy
version and by whether they are set apart (to evaluate); there are as many classes as versions live.
"""

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class _Entry(NamedTuple):
    """Sorts peers: most room first, then who came first."""

    minus_room: int
    place: int
    name: str


@dataclasses.dataclass
class _Class:
    names: set[str] = dataclasses.field(default_factory=set)
    roomy: set[str] = dataclasses.field(default_factory=set)
    """Those with room."""
    entries: list[_Entry] = dataclasses.field(default_factory=list)
    """Theirs, sorted."""


class Selection:
    """Peers that may take something; it changes with them."""

    def __init__(self, classes: Sequence[_Class]) -> None:
        self._classes = classes

    def __contains__(self, name: str) -> bool:
        return any(name in one.names for one in self._classes)

    def __len__(self) -> int:
        return sum(len(one.names) for one in self._classes)

    @property
    def has_room(self) -> bool:
        """Whether any of them can take an item."""
        return any(one.entries for one in self._classes)

    def has_other(self, shunned: Collection[str]) -> bool:
        """Whether any of them is not shunned, full or not."""
        return len(self) > sum(name in self for name in shunned)

    def find_roomiest(self, shunned: Collection[str] = ()) -> str | None:
        """Who has most room, the earliest of equals; None when all are full.

        shunned: none of these, unless there is no other, full or not.
        """
        if shunned and not self.has_other(shunned):
            shunned = ()
        reach = len(shunned) + 1
        firsts = (
            next((entry for entry in one.entries[:reach] if entry.name not in shunned), None)
            for one in self._classes
        )
        first = min(filter(None, firsts), default=None)
        return None if first is None else first.name

    def with_room(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are selected and have room."""
        wanted = set(names)
        return set().union(*(wanted & one.roomy for one in self._classes))

    def missing(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are not selected."""
        return set(names).difference(*(one.names for one in self._classes))


class PeerCapacity:
    """The index; names are known by who puts them in."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, bool], _Class] = {}
        self._kept: dict[str, tuple[tuple[int, bool], _Entry]] = {}
        """By name: where it is."""

    def put(self, name: str, *, version: int, is_apart: bool, room: int, place: int) -> None:
        """Note the state of a peer. place: sorts those with as much room."""
        key, entry = (version, is_apart), _Entry(-room, place, name)
        if self._kept.get(name) == (key, entry):
            return
        self.remove(name)
        self._kept[name] = key, entry
        mine = self._classes.setdefault(key, _Class())
        mine.names.add(name)
        if room:
            mine.roomy.add(name)
            bisect.insort(mine.entries, entry)

    def remove(self, name: str) -> None:
        """Forget a peer; harmless when it is not known."""
        if name not in self._kept:
            return
        key, entry = self._kept.pop(name)
        mine = self._classes[key]
        mine.names.remove(name)
        if entry.minus_room:
            mine.roomy.remove(name)
            del mine.entries[bisect.bisect_left(mine.entries, entry)]
        if not mine.names:
            del self._classes[key]

    def select(self, min_version: int = -1, *, is_apart: bool | None = None) -> Selection:
        """Peers of that version or a later one. is_apart: of these or the others alone."""
        return Selection([
            one
            for (version, apart), one in self._classes.items()
            if version >= min_version and is_apart in (None, apart)
        ])  # fmt: skip
