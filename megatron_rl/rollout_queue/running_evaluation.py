"""Generators that keep the version which an evaluation measures, while training goes on elsewhere.

Used by the rollout queue. An evaluator is told to hold its version; the trainer's syncer then
passes it by until it is told to let go, and gives it a late weight sync. Until all evaluators say
that they hold it, no batch that would make another version is formed.
"""

import logging
from collections.abc import Iterable

from megatron_rl.protocol.generator_messages import Hold
from megatron_rl.rollout_queue.peers import Peer

log = logging.getLogger(__name__)


class Evaluators:
    """Who evaluates, if not all do."""

    def __init__(self, wanted: int) -> None:
        """wanted: evaluators of an evaluation beside training; 0: every generator evaluates."""
        self._wanted = wanted
        self._held: set[str] = set()
        self._orders: list[tuple[str, Hold]] = []
        self.names: frozenset[str] = frozenset()
        """Those of the evaluations of a version; they take nothing else. None: all generators."""
        self.version = -1
        """What they hold."""
        self.are_lost = False
        """The last one is gone: nobody holds the version any more."""

    def choose(self, generators: Iterable[Peer], version: int) -> None:
        """Choose evaluators of a version among live generators, if others are left to train."""
        able = sorted((p.name for p in generators if p.version == version), reverse=True)
        self.are_lost = False
        if not self._wanted or len(able) <= self._wanted:
            return
        self.names, self.version = frozenset(able[: self._wanted]), version
        self._orders += [(name, Hold(is_held=True)) for name in sorted(self.names)]
        log.info("version %d is measured by %s alone", version, ", ".join(sorted(self.names)))

    def correct(self, name: str, *, is_held: bool) -> None:
        """Repeat an order that a generator's state contradicts: it may have been lost."""
        if is_held != (name in self.names):
            self._orders.append((name, Hold(is_held=name in self.names)))

    def note(self, generators: Iterable[Peer]) -> None:
        """Take in the state of all live generators."""
        live = {peer.name: peer for peer in generators}
        for name in sorted(self.names):
            peer = live.get(name)
            if peer is not None and peer.is_held and peer.version == self.version:
                self._held.add(name)
            elif peer is None or name in self._held or peer.version != self.version:
                self._lose(name, "is gone" if peer is None else "holds its version no more")

    def _lose(self, name: str, why: str) -> None:
        log.warning("evaluator %s %s", name, why)
        self.names -= {name}
        self._held.discard(name)
        # It may live on, and would never get a weight sync again.
        self._orders.append((name, Hold(is_held=False)))
        self.are_lost = not self.names

    def release(self) -> None:
        """The version is measured: let them go."""
        self._orders += [(name, Hold(is_held=False)) for name in sorted(self.names)]
        self.names, self.version, self.are_lost = frozenset(), -1, False
        self._held.clear()

    @property
    def hold_all(self) -> bool:
        """Whether there are evaluators, and all of them hold the version."""
        return bool(self.names) and self._held == self.names

    def pop_orders(self) -> list[tuple[str, Hold]]:
        """What to tell generators since the last call."""
        orders, self._orders = self._orders, []
        return orders
