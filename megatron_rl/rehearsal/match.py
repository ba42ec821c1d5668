"""Whether all rehearsed ranks issue the same collectives, and none waits for ever. Pure.

Each rank's events are played in its order. A collective ends when every rehearsed rank of its group
has come to it. A batch of sends and receives ends when each has its counterpart, because NCCL makes
it one kernel. A rank waits for both before its next event.

A send or receive outside a batch ends with its counterpart too. Until then the rank continues, but
not in the same group: groups bound to a device (`device_id`) run one operation after the other. Nor
does it continue beyond the place where it waits for the operation. A send to memory that processes
share ends at once. Ranks that were not rehearsed are taken to do their part.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.rehearsal.events import Event, Trace

MAX_FINDINGS = 20
_SHOWN_FRAMES = 6
_PAIRS = ("send", "recv")


@dataclass(eq=False)
class _Player:
    """A rank, and how far it has come."""

    trace: Trace
    at: int = 0
    pending: list[int] = field(default_factory=list)
    """Sends and receives outside of batches that have not ended, in the order of their issue."""
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of receives outside of batches that have ended before a wait: (rank, place) of the send."""
    done: set[int] = field(default_factory=set)
    """Events of the batch that it has come to which have their counterparts."""
    posted: set[int] = field(default_factory=set)
    """Sends that their receivers may take."""
    sources: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of the batch's receives that are done: (rank, place) of the send."""
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

    def obstacle(self) -> Event | None:
        """A send or receive outside a batch that must end before the next event begins."""
        events, groups = self.trace.events, set()
        if self.event is not None and not _is_single(self.event):
            groups = {events[place].group for place in self.batch()}
        for place in self.pending:
            if self.is_due(place) or events[place].group in groups:
                return next(e for e in map(events.__getitem__, self.pending)
                            if e.group == events[place].group)  # fmt: skip
        return None

    def is_due(self, place: int) -> bool:
        """Whether the rank waits for this event before the next one."""
        event = self.trace.events[place]
        return self.event is None or self.is_shared(event) or 0 < event.waited <= self.at

    def is_shared(self, event: Event) -> bool:
        """Whether it goes through memory of the host, which has no group of ranks."""
        return not self.trace.groups[event.group]


class Watcher:
    """Hears how a step goes on, in an order in which causes come before effects. Does nothing.

    A rank is that of a trace; a place is an index into its events.
    """

    def met(self, members: Sequence[int], places: Sequence[int]) -> None:
        """Ranks have ended a collective together."""

    def exchanged(self, rank: int, places: range, sources: Mapping[int, tuple[int, int]]) -> None:
        """A rank has waited for a batch, or for one receive.

        sources: of each receive, (rank, place) of its send.
        """

    def reached(self, rank: int, places: range) -> None:
        """A rank issues a batch of sends and receives, or one of them alone."""


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
        stuck = [player for player in self._players.values() if _is_stuck(player)]
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
        has_moved, event = self._settle(player), player.event
        if player.obstacle() is not None:
            return has_moved
        self._tell_arrivals(player)
        if event is None:
            return has_moved
        if _is_single(event):
            self._watcher.reached(player.trace.rank, player.batch())
            player.pending.append(player.at)
            player.at += 1
            return True
        if event.kind in _PAIRS:
            return self._move_pairs(player) or has_moved
        return self._move_group(player, event) or has_moved

    # --- collectives ----------------------------------------------------------------------------

    def _move_group(self, player: _Player, event: Event) -> bool:
        members = [self._players[rank] for rank in self._groups[event.group]]
        theirs = [other.event for other in members]
        if not all(_has_come_to(other, event.group) for other in members):
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
        for other in members:
            self._tell_arrivals(other)
        self._watcher.met([m.trace.rank for m in members], [m.at for m in members])
        for other in members:
            other.at += 1
        return True

    # --- sends and receives ---------------------------------------------------------------------

    def _settle(self, player: _Player) -> bool:
        """Complete what is pending in the rank, the first of each group before the next."""
        has_moved, busy = False, set()
        for place in list(player.pending):
            event = player.trace.events[place]
            if event.group in busy:
                continue
            if event.kind == "send" and place not in player.posted:
                self._post(player, place)
                has_moved = True
            elif event.kind == "recv" and self._receive(player, place):
                self._end(player, place)
                has_moved = True
            if place in player.pending:
                busy.add(event.group)
        return has_moved

    def _tell_arrivals(self, player: _Player) -> None:
        """Tell the watcher of receives that the rank has waited for."""
        for place in [each for each in player.arrived if player.is_due(each)]:
            source = {place: player.arrived.pop(place)}
            self._watcher.exchanged(player.trace.rank, range(place, place + 1), source)

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
            player.posted.difference_update(places)
            player.sources.clear()
            return True
        return has_moved

    def _post(self, player: _Player, place: int) -> None:
        """Let the receiver take a send, which ends it."""
        event = player.trace.events[place]
        is_awaited = event.peer in self._players
        if is_awaited:
            self._sent[player.trace.rank, event.peer, event.group].append(place)
        player.posted.add(place)
        if not is_awaited or player.is_shared(event):
            self._end(player, place)

    def _end(self, player: _Player, place: int) -> None:
        if player.trace.events[place].batch:
            player.done.add(place)
        elif place in player.pending:
            player.pending.remove(place)

    def _receive(self, player: _Player, place: int) -> bool:
        event = player.trace.events[place]
        if event.peer not in self._players:
            return True
        waiting = self._sent[event.peer, player.trace.rank, event.group]
        if not waiting:
            return False
        source = waiting.pop(0)
        sources = player.sources if event.batch else player.arrived
        sources[place] = event.peer, source
        sender = self._players[event.peer]
        sent = sender.trace.events[source]
        self._end(sender, source)
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
        while other is not None and _stops_at(other) is not None and other not in seen:
            seen.append(other)
            one, other = other, self._awaited(other)
        # Now it waits for one of those before, or for one that has ended.
        assert other is not None, "a rank that waits for nobody moves"
        waits, theirs = _stops_at(one), _stops_at(other)
        assert waits is not None
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
        obstacle, event = player.obstacle(), player.event
        if obstacle is not None:
            return self._players[obstacle.peer]
        if event is None:
            return None
        if event.kind in _PAIRS:
            left = [
                player.trace.events[place] for place in player.batch() if place not in player.done
            ]
            return self._players[left[0].peer]
        for rank in self._groups[event.group]:
            other = self._players[rank]
            if not _has_come_to(other, event.group):
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


def _is_single(event: Event) -> bool:
    """Whether it is a send or receive outside a batch."""
    return event.kind in _PAIRS and not event.batch


def _is_stuck(player: _Player) -> bool:
    """Whether its step does not end, for another reason than a send that nobody receives."""
    left = [player.trace.events[place].kind for place in player.pending]
    return player.event is not None or "recv" in left


def _stops_at(player: _Player) -> Event | None:
    return player.obstacle() or player.event


def _has_come_to(player: _Player, group: str) -> bool:
    """Whether a rank takes part in the group's next collective now."""
    event = player.event
    if event is None or event.group != group or event.kind in _PAIRS:
        return False
    return player.obstacle() is None


def _signature(event: Event) -> tuple[str, int, str, str]:
    return event.kind, event.bytes, event.dtype, event.detail
