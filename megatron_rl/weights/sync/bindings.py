"""Which copy of the model serves which generator. Pure; every trainer rank finds the same."""

from collections.abc import Sequence


class Bindings:
    """Generators, spread evenly over the copies; a binding lasts as long as that holds."""

    def __init__(self, copies: int) -> None:
        """copies: how many there are."""
        self._copies = copies
        self.of: dict[str, int] = {}
        """Generator -> number of its copy."""

    def bind(self, names: Sequence[str]) -> list[str]:
        """Bind those that have no copy; who of the others must change to another one.

        names: who is served now, in the same order on every rank. Nobody else is moved, and they
        only where a copy has two generators more than another: each move forms a group anew.
        """
        counts = [0] * self._copies
        for copy in self.of.values():
            counts[copy] += 1
        for name in names:
            if name not in self.of:
                self._put(name, counts.index(min(counts)), counts)
        moved = []
        # From the end: who came last moves first.
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
        """A generator is gone."""
        self.of.pop(name, None)
