"""When each rank of a rehearsed step computes, exchanges and waits: an estimate, and its trace.

Products take their FLOPs over a share of the peak. Collectives take a ring's bytes over a rate, and
hide behind nothing; sends do. All ranks of a node have the faster rate.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.gpus import HOST_GPUS
from megatron_rl.rehearsal.events import Event, Trace
from megatron_rl.rehearsal.match import Watcher

EFFICIENCY = 0.6
"""Share of the peak that products reach. An assumption."""
NODE_BYTES_PER_S = 250e9
NETWORK_BYTES_PER_S = 25e9
"""Rate of a rank among GPUs of one node, and between nodes. Assumptions."""


@dataclass
class Rank:
    """One rank's time, in seconds of the step."""

    now: float = 0.0
    flops: int = 0
    computes: float = 0.0
    exchanges: float = 0.0
    waits: float = 0.0
    slices: list[tuple[str, float, float]] = field(default_factory=list)
    """(name, begin, end)."""

    def spend(self, name: str, end: float) -> float:
        """Until `end` by this name; returns the seconds."""
        took = end - self.now
        if took > 0:
            self.slices.append((name, self.now, end))
        self.now = max(self.now, end)
        return max(0.0, took)


class Clock(Watcher):
    """Gives each event its time."""

    def __init__(self, traces: Sequence[Trace], peak_flops: float) -> None:
        """peak_flops: of a GPU, per second."""
        self.ranks = {trace.rank: Rank() for trace in traces}
        self.names = {trace.rank: trace.name for trace in traces}
        self._traces = {trace.rank: trace for trace in traces}
        self._rate = peak_flops * EFFICIENCY
        self._sent: dict[tuple[int, int], float] = {}

    def met(self, members: Sequence[int], places: Sequence[int]) -> None:
        """As in `Watcher`: all wait for the last."""
        events = [self._traces[r].events[p] for r, p in zip(members, places, strict=True)]
        for member, event in zip(members, events, strict=True):
            self._compute(member, event.flops)
        begin = max(self.ranks[member].now for member in members)
        for member, event in zip(members, events, strict=True):
            rank = self.ranks[member]
            rank.waits += rank.spend("wait", begin)
            rank.exchanges += rank.spend(event.kind, begin + self._seconds(member, event))

    def reached(self, rank: int, places: range) -> None:
        """As in `Watcher`: sends begin."""
        events = self._traces[rank].events
        self._compute(rank, events[places.start].flops)
        for place in places:
            self._sent[rank, place] = self.ranks[rank].now

    def exchanged(self, rank: int, places: range, sources: Mapping[int, tuple[int, int]]) -> None:
        """As in `Watcher`: a receive ends when its bytes have arrived."""
        own, events = self.ranks[rank], self._traces[rank].events
        if sources:
            begin = max(self._sent[source] for source in sources.values())
            own.waits += own.spend("wait", begin)
            took = max(self._seconds(rank, events[place]) for place in sources)
            own.exchanges += own.spend("recv", own.now + took)

    def end(self) -> None:
        """Compute what follows the last events."""
        for number, trace in self._traces.items():
            self._compute(number, trace.flops)
        last = self.seconds
        for rank in self.ranks.values():
            rank.waits += rank.spend("wait", last)

    @property
    def seconds(self) -> float:
        """Of the step, up to now; 0 when every rank has failed."""
        return max((rank.now for rank in self.ranks.values()), default=0.0)

    def _compute(self, number: int, flops: int) -> None:
        rank = self.ranks[number]
        rank.computes += rank.spend("compute", rank.now + (flops - rank.flops) / self._rate)
        rank.flops = flops

    def _seconds(self, rank: int, event: Event) -> float:
        """Of an exchange: bytes of a ring over the rate of its slowest link."""
        ranks = self._traces[rank].groups[event.group] if event.peer < 0 else [rank, event.peer]
        is_in_node = len({each // HOST_GPUS for each in ranks}) == 1
        rate = NODE_BYTES_PER_S if is_in_node else NETWORK_BYTES_PER_S
        return event.bytes * _rounds(event.kind, len(ranks)) / rate


def _rounds(kind: str, ranks: int) -> float:
    """Bytes through a rank's link over those that it gives, by a ring."""
    match kind:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather":
            return ranks - 1
        case "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
    return float(ranks > 1)


def as_perfetto(clock: Clock) -> str:
    """The format that ui.perfetto.dev and chrome://tracing open, in microseconds."""
    events = [
        {"name": name, "ph": "X", "pid": 0, "tid": number, "ts": begin * 1e6,
         "dur": (end - begin) * 1e6}
        for number, rank in clock.ranks.items()
        for name, begin, end in rank.slices
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number,
         "args": {"name": name}}
        for number, name in clock.names.items()
    ]  # fmt: skip
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})
