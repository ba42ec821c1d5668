"""Endless shuffled epochs: each item once before any twice. Pure; used by the rollout queue."""

import random


class ShuffledEpochs:
    """Which item comes n-th; it depends on the count of items, the name and n alone."""

    def __init__(self, count: int, name: str) -> None:
        """name: what the shuffling is seeded with, before the number of the epoch."""
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
