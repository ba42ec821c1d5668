"""Groups with unleased completions, and the choice of a group for a free slot.

Used by the rollout queue's leases. The choice equals that of a walk through all groups in order; an
index by home avoids the walk when many groups wait for slots of their home.
"""

import bisect
import collections
import dataclasses
import operator
from typing import NamedTuple

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import Rollout
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.drop_reasons import (
    ATTEMPTS_EXHAUSTED,
    LOSSES_EXHAUSTED,
    GroupFailure,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.peers import PeerSelection

_Position = tuple[bool, int, int]


@dataclasses.dataclass(eq=False)
class PendingGroup:
    """A group with unreturned completions. `UnleasedGroups` sets the last three fields."""

    group: Group
    unleased: list[int]
    """Indices without a lease."""
    unreturned: int
    attempts: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """By index: number of leases without losses."""
    losses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """By index: times that a generator lost it by silence, restart or the like."""
    lease_ids: set[int] = dataclasses.field(default_factory=set)
    """Ids of its open leases."""
    home: str = ""
    """The generator of its first completions; empty before."""
    avoided: frozenset[str] = frozenset()
    """Generators that failed a completion of the group, avoided while there are others."""
    is_waiting: bool = False
    """Whether it is in `UnleasedGroups`."""

    @property
    def position(self) -> _Position:
        """Sorts groups: evaluations first, then in the order of training."""
        return (not self.group.evaluation, self.group.opened_version, self.group.number)

    def count_as_lost(self, indices: list[int]) -> None:
        """Count the latest attempts of completions as losses."""
        self.attempts.subtract(indices)
        self.losses.update(indices)


def find_exhausted(
    pending: PendingGroup, indices: list[int], config: QueueConfig, why: str
) -> GroupFailure | None:
    """The end of a group whose completions failed or got lost too often. why: the last time."""
    attempts = max(pending.attempts[index] for index in indices)
    losses = max(pending.losses[index] for index in indices)
    if attempts >= config.max_attempts:
        tried = f"completions {indices} were tried {attempts} times (expert.queue.max_attempts)"
        return GroupFailure(pending.group, ATTEMPTS_EXHAUSTED, f"{tried}; last: {why}")
    if losses >= config.max_lost_attempts:
        lost = f"completions {indices} got lost {losses} times (expert.queue.max_lost_attempts)"
        return GroupFailure(pending.group, LOSSES_EXHAUSTED, f"{lost}; last: {why}")
    return None


@dataclasses.dataclass
class OpenLease:
    """A lease with unreturned completions. Times are monotonic seconds."""

    pending: PendingGroup
    missing: set[int]
    generator: str
    leased_at: float
    active_at: float

    @property
    def most_tokens(self) -> int:
        return self.pending.group.sampling.max_new_tokens

    def is_mixed(self, rollout: Rollout) -> bool:
        """Whether a rollout of an evaluation has tokens of a version that is not measured."""
        group = self.pending.group
        return bool(group.evaluation) and any(
            span.version != group.opened_version for span in rollout.spans
        )


class Eligible(NamedTuple):
    """Generators that may take completions now."""

    training: PeerSelection
    evaluation: PeerSelection

    def of(self, group: Group) -> PeerSelection:
        return self.evaluation if group.evaluation else self.training


_position_of = operator.attrgetter("position")


class UnleasedGroups:
    """Groups with unleased indices, by position."""

    def __init__(self) -> None:
        self._queue: list[PendingGroup] = []
        self._by_home: dict[str, list[PendingGroup]] = {}
        """Training groups that avoid no generator, by position."""
        self._avoiding: list[PendingGroup] = []
        """The other training groups, by position."""
        self._held: dict[str, list[PendingGroup]] = {}
        """By task whose environment fails: its groups, which `choose` does not see."""

    def add(self, pending: PendingGroup) -> None:
        pending.is_waiting = True
        if (held := self._held.get(pending.group.prompt.task)) is not None:
            held.append(pending)
            return
        bisect.insort(self._queue, pending, key=_position_of)
        self._file(pending)

    def remove(self, pending: PendingGroup) -> None:
        if (held := self._held.get(pending.group.prompt.task)) is not None:
            held.remove(pending)
        else:
            self._unfile(pending)
            _remove(self._queue, pending)
        pending.is_waiting = False

    def hold(self, task: str) -> None:
        """Keep the task's groups, and those that come, from `choose`."""
        found = [pending for pending in self._queue if pending.group.prompt.task == task]
        for pending in found:
            self.remove(pending)
        self._held[task] = []
        for pending in found:
            self.add(pending)

    def release(self, task: str) -> None:
        """Let `choose` see the task's groups again."""
        for pending in self._held.pop(task):
            self.add(pending)

    def choose_held(self, task: str, eligible: Eligible) -> tuple[PendingGroup, str] | None:
        """A held group of the task, another one each time, and a generator with room for it."""
        held = self._held[task]
        for place, pending in enumerate(held):
            name = find_generator(pending, eligible.of(pending.group), anywhere=True)
            if name is not None:
                held.append(held.pop(place))
                return pending, name
        return None

    def set_home(self, pending: PendingGroup, home: str) -> None:
        """Set the home of a group, queued or not."""
        self._unfile(pending)
        pending.home = home
        self._file(pending)

    def avoid(self, pending: PendingGroup, generator: str) -> None:
        """Make a group, queued or not, avoid a generator."""
        self._unfile(pending)
        pending.avoided |= {generator}
        self._file(pending)

    def choose(
        self, rules: LeaseRules, eligible: Eligible, *, anywhere: bool
    ) -> tuple[PendingGroup, str] | None:
        """The first group by position that a generator has room for, and the generator.

        anywhere: ignore full homes, as for urgent groups (`find_generator`).
        """
        first_training = bisect.bisect_left(self._queue, (True,), key=_position_of)
        evaluations = self._walk(0, first_training, eligible.evaluation)
        if evaluations is not None or not eligible.training.has_room:
            return evaluations
        first_calm = len(self._queue)
        if not anywhere:
            first_calm = bisect.bisect_left(self._queue, (True, rules.synced), key=_position_of)
        return self._walk(first_training, first_calm, eligible.training) or (
            None if anywhere else self._choose_at_home(eligible.training, first_calm)
        )

    def _walk(
        self, begin: int, end: int, eligible: PeerSelection
    ) -> tuple[PendingGroup, str] | None:
        """The first group of a part of the queue that any generator can take."""
        if not eligible.has_room:
            return None
        # Skips only groups that avoid all generators with room.
        for place in range(begin, end):
            pending = self._queue[place]
            generator = find_generator(pending, eligible, anywhere=True)
            if generator is not None:
                return pending, generator
        return None

    def _choose_at_home(
        self, eligible: PeerSelection, first_calm: int
    ) -> tuple[PendingGroup, str] | None:
        """The first group that is not urgent and whose home has room.

        `_by_home` has no urgent group, as `_walk` would have chosen it.
        """
        if first_calm == len(self._queue):
            return None
        # If the home of a group is gone or not eligible, any generator gets the group.
        homes = eligible.with_room(self._by_home) | eligible.missing(self._by_home)
        found = [self._by_home[home][0] for home in homes]
        begin = self._queue[first_calm].position
        for pending in self._avoiding:
            if pending.position >= begin and find_generator(pending, eligible, anywhere=False):
                found.append(pending)
                break
        first = min(found, key=_position_of, default=None)
        if first is None:
            return None
        generator = find_generator(first, eligible, anywhere=False)
        assert generator is not None
        return first, generator

    def _has_line(self, pending: PendingGroup) -> bool:
        """Whether it is in `_by_home` or `_avoiding`."""
        is_held = pending.group.prompt.task in self._held
        return pending.is_waiting and not is_held and not pending.group.evaluation

    def _file(self, pending: PendingGroup) -> None:
        if self._has_line(pending):
            line = self._avoiding if pending.avoided else self._by_home.setdefault(pending.home, [])
            bisect.insort(line, pending, key=_position_of)

    def _unfile(self, pending: PendingGroup) -> None:
        if not self._has_line(pending):
            return
        if pending.avoided:
            _remove(self._avoiding, pending)
            return
        line = self._by_home[pending.home]
        _remove(line, pending)
        if not line:
            del self._by_home[pending.home]

    @property
    def completions(self) -> int:
        return sum(len(one.unleased) for one in self._queue) + self.held_completions

    @property
    def held_completions(self) -> int:
        """Unleased completions of tasks whose environment fails."""
        return sum(len(one.unleased) for held in self._held.values() for one in held)


def _remove(line: list[PendingGroup], pending: PendingGroup) -> None:
    place = bisect.bisect_left(line, pending.position, key=_position_of)
    while line[place] is not pending:
        place += 1
    del line[place]


def find_generator(pending: PendingGroup, eligible: PeerSelection, *, anywhere: bool) -> str | None:
    """The generator that gets completions of a group now; None: the group waits.

    Its home, if that has room; or the roomiest generator, if the home is gone or anywhere is set.
    The group avoids generators only while there are others.
    """
    home = pending.home if pending.home in eligible else ""
    if home in pending.avoided and eligible.has_other(pending.avoided):
        home = ""
    if home and eligible.with_room((home,)):
        return home
    if home and not anywhere:
        return None
    return eligible.find_roomiest(pending.avoided)
