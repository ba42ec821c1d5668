"""Progress of the generators of one weight sync, for generators that wait for each other.

Read and written by `generator_sync.py` on rank 0, in one thread.
"""

from collections.abc import Mapping, Set

from megatron_rl.weights.sync.relays import COPY


class SyncProgress:
    """The generators of one weight sync."""

    def __init__(self, sources: Mapping[str, str], groups: Mapping[str, str]) -> None:
        """sources: generator -> its source, in the order of service.

        groups: name of each generator's group.
        """
        self._sources, self._groups = sources, groups
        self._served: set[str] = set()
        self._holds: set[str] = set()
        self._lost: set[str] = set()

    @property
    def size(self) -> int:
        """Number of generators."""
        return len(self._sources)

    def served_by(self, name: str) -> list[str]:
        """Generators that get their weights from this one, in order."""
        return [each for each, source in self._sources.items() if source == name]

    def groups_of(self, name: str) -> list[str]:
        """Groups of those that get their weights from it."""
        return [self._groups[each] for each in self.served_by(name)]

    def is_turn(self, name: str) -> bool:
        """Whether its source has ended its own transfer and those before this one."""
        source = self._sources[name]
        if source == COPY:
            return True
        others = self.served_by(source)
        return {source, *others[: others.index(name)]} <= self._served

    def has_passed_on(self, name: str) -> bool:
        """Whether the generators it relays to have the version, or have failed."""
        return set(self.served_by(name)) <= self._served

    def are_late(self, names: Set[str]) -> list[str]:
        """Generators that wait neither for their source nor for generators they relay to."""
        return [
            name
            for name in sorted(names)
            if self.is_turn(name) and (self.has_passed_on(name) or name not in self._holds)
        ]

    def holds(self, name: str) -> bool:
        """Whether it holds the version and can still relay it."""
        return name in self._holds - self._lost

    def is_lost(self, name: str) -> bool:
        """Whether it failed, before or after it took the version."""
        return name in self._lost

    def note_held(self, name: str) -> None:
        """Note that it has taken the version."""
        self._holds.add(name)
        self._served.add(name)

    def note_failed(self, name: str) -> None:
        """Note that it has not taken the version, or has been lost since."""
        self._lost.add(name)
        self._served.add(name)
