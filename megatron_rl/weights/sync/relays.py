"""Which generator gets its weights from another one instead of the trainer.

Pure; every trainer rank finds the same. The generators of each copy of the model stand in a tree,
whose root is the copy: see `relay_tree.py`.
"""

from collections.abc import Hashable, Mapping, Sequence

from megatron_rl.weights.layout.relay_tree import source_of

COPY = ""
"""In place of a generator's name: the copy of the model to which it is bound."""


class Relays:
    """Places in the trees, which a generator keeps as long as it is there."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        """Generator -> (copy, place)."""
        self._direct: set[str] = set()

    def order(self, names: Sequence[str], copy_of: Mapping[str, int]) -> list[str]:
        """The names as their sources serve them; those that are new get the first free places."""
        for name in names:
            if self._places.get(name, (-1, 0))[0] != copy_of[name]:
                self._places.pop(name, None)
                self._places[name] = copy_of[name], self._free(copy_of[name])
        return sorted(names, key=lambda name: self._places[name])

    def _free(self, copy: int) -> int:
        taken = {place for at, place in self._places.values() if at == copy}
        return next(n for n in range(1, len(taken) + 2) if n not in taken)

    def sources(self, kinds: Mapping[str, Hashable]) -> dict[str, str]:
        """Who serves each of those that are served now: a generator, or COPY.

        kinds: of all that are served, which `order` has seen. Above an empty place, one that is not
        served now or holds another kind of slices, whoever serves that one is the source.
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
        """From now on by its copy."""
        self._direct.add(name)

    def forget(self, name: str) -> None:
        """A generator is gone."""
        self._places.pop(name, None)
        self._direct.discard(name)
