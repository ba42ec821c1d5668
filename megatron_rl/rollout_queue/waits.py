"""What each process does or waits for, and since when, as the queue sees it. Pure.

Used by the rollout queue, which writes it into its rows about generators; the live view and
`megatron-rl status` show the latest one. Work that moves does not age: a generator's time begins
anew with each completion, a verifier's with each verdict.
"""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.peer_rows import Row
from megatron_rl.rollout_queue.scoring import Scoring
from megatron_rl.rollout_queue.trainer_requests import BatchRequests

WAITS = "peers/waits"


class _Wait(NamedTuple):
    what: str
    progress: Hashable
    """Changes when work moves."""
    since: float


class Wait(NamedTuple):
    """What a process does or waits for."""

    role: str
    what: str
    since_s: float
    """Unix seconds since when it does, without any progress."""


class Waits:
    """Remembers since when each process does or waits for the same."""

    def __init__(self, leases: Leases, scoring: Scoring, requests: BatchRequests) -> None:
        self._leases, self._scoring, self._requests = leases, scoring, requests
        self._waits: dict[str, _Wait] = {}

    def look(self, now: float) -> None:
        """Note what has changed. Call it about once a second."""
        known, self._waits = self._waits, {}
        for role, what, progress in self._find():
            was = known.get(role)
            is_same = was is not None and (was.what, was.progress) == (what, progress)
            since = was.since if was is not None and is_same else now
            self._waits[role] = _Wait(what, progress, since)

    def describe(self, now: float) -> str:
        """One line: leases, requests to verifiers, requests of ranks."""
        ranks = f"batch asked for by data-parallel ranks {self._requests.waiting_ranks}"
        return f"{self._leases.describe(now)}; {self._scoring.describe(now)}; {ranks}"

    def row(self, now: float) -> Row:
        """Columns of a metrics row, for `read_waits`."""
        waits = self._waits.items()
        return {WAITS: "; ".join(f"{role} {now - one.since:.0f} {one.what}" for role, one in waits)}

    def _find(self) -> Iterator[tuple[str, str, Hashable]]:
        """(role, what it does or waits for, its progress)."""
        yield from ((role, what, None) for role, what in self._requests.waits)
        for peer in self._leases.peers:
            if peer.version < 0:
                yield peer.name, "waits for weights", None
            elif not peer.outstanding:
                yield peer.name, "waits for a lease", None
            else:
                yield peer.name, "generates", (peer.outstanding, max(peer.handed_out))
        for peer in self._scoring.peers:
            what = "grades" if peer.outstanding else "waits for completions"
            yield peer.name, what, (peer.outstanding, max(peer.handed_out, default=-1))


def read_waits(row: Row) -> list[Wait]:
    """The waits of a metrics row with WAITS."""
    found = []
    for text in filter(None, str(row[WAITS]).split("; ")):
        role, seconds, what = text.split(" ", 2)
        found.append(Wait(role, what, float(row["time"]) - float(seconds)))
    return found
