"""Whether all rehearsed ranks issue the same collectives, and none waits for ever. Pure.

Each rank's events are played in its order. A collective ends when every rehearsed rank of its group
has come to it. A batch of sends and receives ends when each has its counterpart, because NCCL makes
it one kernel. A receive outside a batch ends when its counterpart was sent, and a send at once.
Ranks that were not rehearsed are taken to do their part.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.rehearsal.events import Event, Trace

MAX_FINDINGS = 20
_SHOWN_FRAMES = 6


@dataclass(eq=False)
class _Player:
    """A rank, and how far it has come."""

    trace: Trace
    at: int = 0
    done: set[int] = field(default_factory=set)
    """Events of the batch that it has come to which have their counterparts."""
    posted: set[int] = field(default_factory=set)
    """Sends of the batch that their receivers may take."""
    sources: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of its receives that are done: (rank, place) of the send."""
    has_begun: bool = False
    """The watcher was told that the rank has reached its batch."""

    @property
    def event(self) -> Event | None:
        events = self.trace.events
        return events[self.at] if self.at < len(events) else None

    def batch(self) -> range:
        """Places of the events that are issued at once with the next one."""
        events, end = self.trace.events, self.at + 1
        number = events[self.at].batch
        while number and end < len(events) and events[end].batch == number:
            end += 1
        return range(self.at, end)


class Watcher:
    """Hears how a step goes on, in an order in which causes come before effects. Does nothing.

    A rank is that of a trace; a place is an index into its events.
    """

    def met(self, members: Sequence[int], places: Sequence[int]) -> None:
        """Ranks have ended a collective together."""

    def exchanged(self, rank: int, places: range, sources: Mapping[int, tuple[int, int]]) -> None:
        """A rank has ended a batch. sources: of each receive, (rank, place) of its send."""

    def reached(self, rank: int, places: range) -> None:
        """A rank has come to a batch of sends and receives."""


def find_faults(traces: Sequence[Trace], watcher: Watcher | None = None) -> list[str]:
    """Every difference among the ranks, for people; empty: a step of theirs ends."""
    game = _Game(traces, watcher or Watcher())
    game.play()
    return [*_counts(traces), *game.findings]


def _counts(traces: Sequence[Trace]) -> Iterator[str]:
    """Trainer ranks that take another number of microbatches than the first."""
    for trace in traces[1:]:
        if trace.microbatches not in (None, traces[0].microbatches):
            yield (
                f"{trace.name} takes {trace.microbatches} microbatches, and {traces[0].name} "
                f"takes {traces[0].microbatches}: every rank needs as many"
            )


class _Game:
    def __init__(self, traces: Sequence[Trace], watcher: Watcher) -> None:
        self.findings: list[str] = []
        self._watcher = watcher
        self._players = {trace.rank: _Player(trace) for trace in traces}
        self._groups: dict[str, list[int]] = {}
        for trace in traces:
            for name, ranks in trace.groups.items():
                self._groups[name] = [rank for rank in ranks if rank in self._players]
        # Sends under way: (from, to, group) -> places in the sender's events.
        self._sent: Mapping[tuple[int, int, str], list[int]] = defaultdict(list)

    def play(self) -> None:
        """To the end, or until nobody can move."""
        has_moved = True
        while has_moved:
            has_moved = False
            for player in self._players.values():
                while self._move(player):
                    has_moved = True
                    if len(self.findings) >= MAX_FINDINGS:
                        return
        stuck = [player for player in self._players.values() if player.event is not None]
        if stuck:
            self.findings.append(self._describe_deadlock(stuck))
        for (sender, receiver, group), places in sorted(self._sent.items()):
            if places:
                event = self._players[sender].trace.events[places[0]]
                self.findings.append(
                    f"{self._name(sender)} sends {len(places)} times to {self._name(receiver)} in "
                    f"{group}, which never receives it\n{self._stack(sender, event)}"
                )

    def _move(self, player: _Player) -> bool:
        event = player.event
        if event is None:
            return False
        if event.kind in ("send", "recv"):
            return self._move_pairs(player)
        return self._move_group(player, event)

    # --- collectives ----------------------------------------------------------------------------

    def _move_group(self, player: _Player, event: Event) -> bool:
        members = [self._players[rank] for rank in self._groups[event.group]]
        theirs = [other.event for other in members]
        if not all(_has_come_to(other, event.group) for other in theirs):
            return False
        for other, its in zip(members, theirs, strict=True):
            assert its is not None
            if _signature(its) != _signature(event):
                self.findings.append(
                    f"{player.trace.name} and {other.trace.name} disagree on what "
                    f"{event.group} does next: {self._words(event)}, {self._words(its)}\n"
                    + self._both_stacks((player.trace.rank, event), (other.trace.rank, its))
                )
                break
        self._watcher.met([m.trace.rank for m in members], [m.at for m in members])
        for other in members:
            other.at += 1
        return True

    # --- sends and receives ---------------------------------------------------------------------

    def _move_pairs(self, player: _Player) -> bool:
        """Complete those sends and receives of the rank's batch whose counterparts are there."""
        places, has_moved = player.batch(), False
        if not player.has_begun:
            player.has_begun = True
            self._watcher.reached(player.trace.rank, places)
        for place in places:
            if place in player.done:
                continue
            is_send = player.trace.events[place].kind == "send"
            if is_send and place not in player.posted:
                self._post(player, place)
                has_moved = True
            elif is_send or not self._receive(player, place):
                continue
            else:
                player.done.add(place)
                has_moved = True
        if player.done.issuperset(places):
            self._watcher.exchanged(player.trace.rank, places, player.sources)
            player.at, player.has_begun = places.stop, False
            player.done.clear()
            player.posted.clear()
            player.sources.clear()
            return True
        return has_moved

    def _post(self, player: _Player, place: int) -> None:
        """Let the receiver take a send. That ends it, if it is one of a batch."""
        event = player.trace.events[place]
        is_awaited = event.peer in self._players
        if is_awaited:
            self._sent[player.trace.rank, event.peer, event.group].append(place)
        player.posted.add(place)
        if not (is_awaited and event.batch):
            player.done.add(place)

    def _receive(self, player: _Player, place: int) -> bool:
        event = player.trace.events[place]
        if event.peer not in self._players:
            return True
        waiting = self._sent[event.peer, player.trace.rank, event.group]
        if not waiting:
            return False
        source = waiting.pop(0)
        player.sources[place] = event.peer, source
        sender = self._players[event.peer]
        sent = sender.trace.events[source]
        if sent.batch:
            sender.done.add(source)
        if (sent.bytes, sent.dtype) != (event.bytes, event.dtype):
            self.findings.append(
                f"{sender.trace.name} sends {self._words(sent)}, and {player.trace.name} receives "
                f"{self._words(event)}\n"
                + self._both_stacks((event.peer, sent), (player.trace.rank, event))
            )
        return True

    # --- for people -----------------------------------------------------------------------------

    def _describe_deadlock(self, stuck: Sequence[_Player]) -> str:
        """Two ranks that wait, the first of them for the second."""
        one, other = stuck[0], self._awaited(stuck[0])
        seen = [one]
        while other is not None and other.event is not None and other not in seen:
            seen.append(other)
            one, other = other, self._awaited(other)
        # Now it waits for one of those before, or for one that has ended.
        assert other is not None, "a rank that waits for nobody moves"
        waits = one.event
        assert waits is not None
        theirs = other.event
        if theirs is None:
            return (
                f"{one.trace.name} waits in {self._words(waits)} of {waits.group} for "
                f"{other.trace.name}, which has ended its step\n"
                + self._stack(one.trace.rank, waits)
            )
        return (
            f"deadlock: {one.trace.name} waits in {self._words(waits)} of {waits.group}, and "
            f"{other.trace.name} in {self._words(theirs)} of {theirs.group}\n"
            + self._both_stacks((one.trace.rank, waits), (other.trace.rank, theirs))
        )

    def _awaited(self, player: _Player) -> _Player | None:
        """A rank without which this one cannot go on."""
        event = player.event
        if event is None:
            return None
        if event.kind in ("send", "recv"):
            left = [
                player.trace.events[place] for place in player.batch() if place not in player.done
            ]
            return self._players[left[0].peer]
        for rank in self._groups[event.group]:
            other = self._players[rank]
            if not _has_come_to(other.event, event.group):
                return other
        return None

    def _name(self, rank: int) -> str:
        """Only rehearsed ranks are spoken of."""
        return self._players[rank].trace.name

    def _words(self, event: Event) -> str:
        peer = f" with {self._name(event.peer)}" if event.peer >= 0 else ""
        detail = f" ({event.detail})" if event.detail else ""
        return f"{event.kind}{detail} of {event.bytes} bytes of {event.dtype or 'nothing'}{peer}"

    def _stack(self, rank: int, event: Event) -> str:
        frames = self._players[rank].trace.stack_of(event)[:_SHOWN_FRAMES]
        return "\n".join(f"    {frame}" for frame in frames)

    def _both_stacks(self, one: tuple[int, Event], other: tuple[int, Event]) -> str:
        """Side by side."""
        left = [self._name(one[0]), *self._players[one[0]].trace.stack_of(one[1])[:_SHOWN_FRAMES]]
        right = [
            self._name(other[0]),
            *self._players[other[0]].trace.stack_of(other[1])[:_SHOWN_FRAMES],
        ]
        width = max(map(len, left)) + 2
        rows = max(len(left), len(right))
        left += [""] * (rows - len(left))
        right += [""] * (rows - len(right))
        return "\n".join(f"    {a:<{width}}{b}" for a, b in zip(left, right, strict=True))


def _has_come_to(event: Event | None, group: str) -> bool:
    """Whether a rank whose next event it is takes part in the group's next collective."""
    return event is not None and event.group == group and event.kind not in ("send", "recv")


def _signature(event: Event) -> tuple[str, int, str, str]:
    return event.kind, event.bytes, event.dtype, event.detail
