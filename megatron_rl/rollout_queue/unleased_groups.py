"""Groups with completions that no generator has, and which of them a free slot gets.

Used by the rollout queue's leases. The choice is that of a walk through all groups by turn; groups
are also kept by home, so that it takes no such walk where many groups wait for their own home's
slots and many generators are there.
"""

import bisect
import collections
import dataclasses
from typing import NamedTuple

from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.peer_capacity import Selection

_Turn = tuple[bool, int, int]


@dataclasses.dataclass(eq=False)
class LeasedGroup:
    """A group whose completions are not all returned."""

    group: Group
    unleased: list[int]
    """Indices that no generator has."""
    unreturned: int
    attempts: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Times an index was leased, those not counted that its generator lost. By index."""
    losses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Times a generator lost it by no fault of the completion: silence, restart. By index."""
    lease_ids: set[int] = dataclasses.field(default_factory=set)
    """Of its open leases."""
    home: str = ""
    """The generator that got completions of it first; empty before. `UnleasedGroups` sets it."""
    shunned: frozenset[str] = frozenset()
    """The generators that failed one; others get it, if there are any. Likewise."""
    is_waiting: bool = False
    """`UnleasedGroups` has it."""

    @property
    def turn(self) -> _Turn:
        """Sorts groups by their turn: evaluations first, then as they are trained on."""
        return (not self.group.evaluation, self.group.opened_version, self.group.number)


class Eligible(NamedTuple):
    """Generators that may take completions as things stand."""

    training: Selection
    evaluation: Selection

    def of(self, group: Group) -> Selection:
        """Those that may take completions of a group."""
        return self.evaluation if group.evaluation else self.training


def _turn_of(held: LeasedGroup) -> _Turn:
    return held.turn


class UnleasedGroups:
    """Those with unleased indices, by turn."""

    def __init__(self) -> None:
        self._queue: list[LeasedGroup] = []
        self._by_home: dict[str, list[LeasedGroup]] = {}
        """Those to train on that shun nobody, by turn."""
        self._shunning: list[LeasedGroup] = []
        """The others to train on, by turn."""

    def add(self, held: LeasedGroup) -> None:
        """Queue a group that is not there."""
        bisect.insort(self._queue, held, key=_turn_of)
        held.is_waiting = True
        self._file(held)

    def remove(self, held: LeasedGroup) -> None:
        """Take a group out that is there."""
        self._unfile(held)
        held.is_waiting = False
        _remove(self._queue, held)

    def settle(self, held: LeasedGroup, home: str) -> None:
        """Set the home of a group, queued or not."""
        self._unfile(held)
        held.home = home
        self._file(held)

    def shun(self, held: LeasedGroup, generator: str) -> None:
        """Let a group shun one more generator, queued or not."""
        self._unfile(held)
        held.shunned |= {generator}
        self._file(held)

    def choose(
        self, rules: LeaseRules, able: Eligible, *, anywhere: bool
    ) -> tuple[LeasedGroup, str] | None:
        """The first group by turn that a generator has room for, and that generator; else None.

        anywhere: also for a group whose home is full, as for urgent ones (`find_generator`).
        """
        first_training = bisect.bisect_left(self._queue, (True,), key=_turn_of)
        evaluations = self._walk(0, first_training, able.evaluation)
        if evaluations is not None or not able.training.has_room:
            return evaluations
        first_calm = len(self._queue)
        if not anywhere:
            first_calm = bisect.bisect_left(self._queue, (True, rules.synced), key=_turn_of)
        return self._walk(first_training, first_calm, able.training) or (
            None if anywhere else self._choose_at_home(able.training, first_calm)
        )

    def _walk(self, begin: int, end: int, able: Selection) -> tuple[LeasedGroup, str] | None:
        """The first of a part of the queue, anywhere."""
        if not able.has_room:
            return None
        # Only who shuns all generators with room is passed over.
        for place in range(begin, end):
            held = self._queue[place]
            generator = find_generator(held, able, anywhere=True)
            if generator is not None:
                return held, generator
        return None

    def _choose_at_home(self, able: Selection, first_calm: int) -> tuple[LeasedGroup, str] | None:
        """The first of the groups that are not urgent.

        Each urgent one in `_by_home` would have been chosen, as somebody has room.
        """
        if first_calm == len(self._queue):
            return None
        # The home of a group may be gone, or not be able: then anybody gets it.
        homes = able.with_room(self._by_home) | able.missing(self._by_home)
        found = [self._by_home[home][0] for home in homes]
        begin = self._queue[first_calm].turn
        for held in self._shunning:
            if held.turn >= begin and find_generator(held, able, anywhere=False) is not None:
                found.append(held)
                break
        first = min(found, key=_turn_of, default=None)
        if first is None:
            return None
        generator = find_generator(first, able, anywhere=False)
        assert generator is not None
        return first, generator

    def _file(self, held: LeasedGroup) -> None:
        if held.is_waiting and not held.group.evaluation:
            line = self._shunning if held.shunned else self._by_home.setdefault(held.home, [])
            bisect.insort(line, held, key=_turn_of)

    def _unfile(self, held: LeasedGroup) -> None:
        if not held.is_waiting or held.group.evaluation:
            return
        if held.shunned:
            _remove(self._shunning, held)
            return
        line = self._by_home[held.home]
        _remove(line, held)
        if not line:
            del self._by_home[held.home]

    @property
    def completions(self) -> int:
        """That wait."""
        return sum(len(held.unleased) for held in self._queue)


def _remove(line: list[LeasedGroup], held: LeasedGroup) -> None:
    place = bisect.bisect_left(line, held.turn, key=_turn_of)
    while line[place] is not held:
        place += 1
    del line[place]


def find_generator(held: LeasedGroup, able: Selection, *, anywhere: bool) -> str | None:
    """The generator that gets completions of a group now; None: it waits.

    Its home, if that has room; the roomiest, where it has no home any more, or anywhere is set.
    None that it shuns, unless there is no other.
    """
    home = held.home if held.home in able else ""
    if home in held.shunned and able.has_other(held.shunned):
        home = ""
    if home and able.with_room((home,)):
        return home
    if home and not anywhere:
        return None
    return able.find_roomiest(held.shunned)
