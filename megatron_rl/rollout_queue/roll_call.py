"""Which generators and verifiers are there, as rows of the metrics.

Used by the rollout queue, the one process that hears all of them; the launcher and `status` read
the rows (`observe/run_state.py`). A row is written when something changes:

| value                      | meaning                                                    |
|----------------------------|------------------------------------------------------------|
| `peers/generators`         | generators that are there                                  |
| `peers/generators_wanted`  | generators that the run has                                |
| `peers/verifiers`          | verifiers that are there                                   |
| `peers/verifiers_wanted`   | most verifiers that ever were                              |
| `peers/missing`            | names of those that were there and are not, by a space     |
"""

from collections.abc import Iterable

GENERATORS, VERIFIERS = "peers/generators", "peers/verifiers"
MISSING = "peers/missing"
WANTED = "_wanted"

Row = dict[str, int | str]


class RollCall:
    """Remembers who was there. Pure."""

    def __init__(self, replicas: int) -> None:
        """replicas: generators of the run."""
        self._replicas = replicas
        self._generators: set[str] = set()
        self._verifiers: set[str] = set()
        """All that ever were there."""
        self._told: Row = {}

    def take_row(self, generators: Iterable[str], verifiers: Iterable[str]) -> Row | None:
        """A row about who is there now; None when nothing has changed."""
        now_generators, now_verifiers = set(generators), set(verifiers)
        self._generators |= now_generators
        self._verifiers |= now_verifiers
        missing = (self._generators - now_generators) | (self._verifiers - now_verifiers)
        row: Row = {
            GENERATORS: len(now_generators),
            GENERATORS + WANTED: max(self._replicas, len(self._generators)),
            VERIFIERS: len(now_verifiers),
            VERIFIERS + WANTED: len(self._verifiers),
            MISSING: " ".join(sorted(missing)),
        }
        is_known = row == self._told or not (self._generators or self._verifiers)
        self._told = row
        return None if is_known else row
