"""Endless shuffled epochs: each item once before any twice. Pure; used by the rollout queue."""

import random


class ShuffledEpochs:
    """Index of the n-th item; it depends only on the count of items, the name and n."""

    def __init__(self, count: int, name: str) -> None:
        """name: first part of the seed of an epoch's shuffle."""
        self._count, self._name = count, name
        self._known: tuple[int, list[int]] = (-1, [])

    def at(self, position: int) -> int:
        """Index of the item at a position, from 0."""
        epoch, place = divmod(position, self._count)
        known_epoch, order = self._known
        if known_epoch != epoch:
            order = list(range(self._count))
            random.Random(f"{self._name}/{epoch}").shuffle(order)
            self._known = epoch, order
        return order[place]
