"""The source of each generator's weights: a copy of the model, or another generator that relays.

Pure; every trainer rank finds the same. The generators of each copy form a tree, whose root is the
copy: see `layout/copies.py`.
"""

from collections.abc import Hashable, Mapping, Sequence

from megatron_rl.weights.layout.copies import source_of


class Bindings:
    """Assigns generators evenly to copies; a generator moves only if the assignment is uneven."""

    def __init__(self, copies: int) -> None:
        """copies: number of model copies."""
        self._copies = copies
        self.of: dict[str, int] = {}
        """Generator -> number of its copy."""

    def bind(self, names: Sequence[str]) -> list[str]:
        """Bind generators without a copy; return those that must move to another copy.

        names: generators served now, in the same order on every rank. Only they move, and only from
        a copy with at least two generators more than another: each move forms a new group.
        """
        counts = [0] * self._copies
        for copy in self.of.values():
            counts[copy] += 1
        for name in names:
            if name not in self.of:
                self._put(name, counts.index(min(counts)), counts)
        moved = []
        # From the end: the latest generator moves first.
        for name in reversed(names):
            copy, emptiest = self.of[name], counts.index(min(counts))
            if counts[copy] >= counts[emptiest] + 2:
                counts[copy] -= 1
                self._put(name, emptiest, counts)
                moved.append(name)
        return moved

    def _put(self, name: str, copy: int, counts: list[int]) -> None:
        self.of[name] = copy
        counts[copy] += 1

    def forget(self, name: str) -> None:
        """Remove a generator."""
        self.of.pop(name, None)


COPY = ""
"""Source that is no generator: the model copy to which the generator is bound."""


class Relays:
    """Places in the trees; a generator keeps its place until it is forgotten."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        """Generator -> (copy, place)."""
        self._direct: set[str] = set()

    def order(self, names: Sequence[str], copy_of: Mapping[str, int]) -> list[str]:
        """Return the names in the order of service; new generators get the first free places."""
        for name in names:
            if self._places.get(name, (-1, 0))[0] != copy_of[name]:
                self._places.pop(name, None)
                self._places[name] = copy_of[name], self._free(copy_of[name])
        return sorted(names, key=lambda name: self._places[name])

    def _free(self, copy: int) -> int:
        taken = {place for at, place in self._places.values() if at == copy}
        return next(n for n in range(1, len(taken) + 2) if n not in taken)

    def sources(self, kinds: Mapping[str, Hashable]) -> dict[str, str]:
        """Return the source of each generator that is served now: a generator, or COPY.

        kinds: of all generators served now, which `order` has seen. A parent that is missing, not
        served now or of another kind of slices is skipped: its own source takes its place.
        """
        at = {self._places[name]: name for name in kinds}
        found = {}
        for name, kind in kinds.items():
            copy, place = self._places[name]
            source = source_of(place)
            while source and kinds.get(at.get((copy, source), COPY)) != kind:
                source = source_of(source)
            is_direct = not source or name in self._direct
            found[name] = COPY if is_direct else at[copy, source]
        return found

    def serve_directly(self, name: str) -> None:
        """Serve a generator from its copy from now on."""
        self._direct.add(name)

    def forget(self, name: str) -> None:
        """A generator is gone."""
        self._places.pop(name, None)
        self._direct.discard(name)
