"""Who is there to grade, with how much room in each worker pool.

Used by the rollout queue. A request takes up room in every worker pool that its steps may need,
with the same verifier: it is counted here as the verifier counts it.
"""

from collections.abc import Iterable

from megatron_rl.config.reward import WORKER_POOLS
from megatron_rl.protocol.types import VerifierReady
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.peers import Peers


class Verifiers:
    """The live verifiers and the requests that each has.

    A request is in the tables of several worker pools: what is lost or named is told once all the
    same.
    """

    def __init__(self) -> None:
        self._pools = {pool: Peers("verifier") for pool in WORKER_POOLS}
        """By worker pool: who is there, with how much room in that worker pool."""

    def announce(self, name: str, ready: VerifierReady, now: float) -> list[int]:
        """Take in a verifier's state; the requests that an earlier session of it lost.

        Raises WireError.
        """
        if unknown := sorted(ready.capacity.keys() - self._pools.keys()):
            raise WireError(
                f"{name} grades in worker pools {unknown}; there are {sorted(self._pools)}"
            )
        lost: list[int] = []
        for pool, capacity in ready.capacity.items():
            lost += self._pools[pool].announce(
                name, capacity=capacity, session=ready.session, version=-1, now=now
            )
        return list(dict.fromkeys(lost))

    def find_room(self, pools: Iterable[str], failed: frozenset[str] = frozenset()) -> str | None:
        """The verifier with most room for a request that needs these worker pools; None when all
        wait.

        failed: verifiers that have failed the request before. It waits for another one, if there
        is any that grades in all of these worker pools.
        """
        rooms = [self._pools[pool].rooms for pool in pools]
        everywhere = set.intersection(*map(set, rooms))
        # A verifier has as much room as in the fullest of the worker pools.
        by_name = {n: min(room[n] for room in rooms) for n in rooms[0] if n in everywhere}
        by_name = {n: room for n, room in by_name.items() if n not in failed} or by_name
        name = max(by_name, key=by_name.__getitem__, default=None)
        return name if name is not None and by_name[name] > 0 else None

    def hand_out(self, name: str, request_id: int, pools: Iterable[str]) -> None:
        """Count a request against a verifier's room."""
        for pool in pools:
            self._pools[pool].hand_out(name, request_id, 1)

    def give_back(self, name: str, request_id: int) -> None:
        """Free the room of a request; harmless when the verifier is gone."""
        for peers in self._pools.values():
            peers.give_back(name, request_id)

    def hear(self, name: str, now: float) -> None:
        """Note a sign of life."""
        for peers in self._pools.values():
            peers.hear(name, now)

    def drop(self, name: str) -> list[int]:
        """Forget a verifier that is gone; its requests."""
        lost = [id_ for peers in self._pools.values() for id_ in peers.drop(name)]
        return list(dict.fromkeys(lost))

    def drop_silent(self, now: float, timeout_s: float) -> list[int]:
        """Forget the verifiers that were silent for too long; their requests."""
        lost = [id_ for peers in self._pools.values() for id_ in peers.drop_silent(now, timeout_s)]
        return list(dict.fromkeys(lost))

    @property
    def names(self) -> list[str]:
        """Names of the live verifiers."""
        return list(dict.fromkeys(n for peers in self._pools.values() for n in peers.names))

    def describe(self, now: float) -> str:
        """The worker pools with work, each with its verifiers; if none has work, all verifiers."""
        busy = ", ".join(
            f"{pool}: {peers.describe(now)}"
            for pool, peers in self._pools.items()
            if peers.outstanding
        )
        return busy or ", ".join(self.names) or "no verifier"
