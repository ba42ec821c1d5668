"""Leases: which generator generates which completions of which group, and what is tried again.

Used by the rollout queue. A lease holds completions of one group: as many as its generator has room
for, down to a single one, so that no slot of an engine waits for the room of a whole group. The
first generator that holds some of a group is its home and gets the others as its slots come free:
there the prompt's keys and values are in the prefix cache.

A completion is leased again when its generator reports a failure, or returns nothing of the lease
for too long; after max_attempts tries its group fails. What a generator loses is no attempt: it
restarts (changed session), falls silent, is fenced for long, or its heartbeats do not name the
lease. Such losses have their own limit. Whoever generates what nobody waits for is told to stop.
"""

import dataclasses
import logging
from collections.abc import Callable

import msgspec

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import Cancel, GeneratorReady, Lease, Rollout, RolloutFailed
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.engine_breaker import EngineBreaker, Failed
from megatron_rl.rollout_queue.failures import (
    ATTEMPTS_EXHAUSTED,
    LOSSES_EXHAUSTED,
    GroupFailure,
    TooManyFailures,
)
from megatron_rl.rollout_queue.groups import Group, Origin, find_fault
from megatron_rl.rollout_queue.peer_capacity import Selection
from megatron_rl.rollout_queue.peers import Peer, Peers
from megatron_rl.rollout_queue.unleased_groups import Eligible, LeasedGroup, UnleasedGroups

log = logging.getLogger(__name__)

ABSENT_S = 5.0
"""A lease that heartbeats of its generator do not name for this long was lost on the way."""


@dataclasses.dataclass
class _OpenLease:
    holder: LeasedGroup
    missing: set[int]
    generator: str
    leased_at: float
    active_at: float
    absent_since: float | None = None
    """Since when heartbeats of its generator do not name it; None: they do."""


class Leases:
    """All leases, the generators that hold them, and the completions that wait for one."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self.fence_grace_s = config.lease_timeout_s
        """A generator without weights keeps its leases for this long."""
        self._breaker = EngineBreaker()
        self._last_failure = ""
        self._generators = Peers("generator")
        self._open: dict[int, _OpenLease] = {}
        self._groups: dict[int, LeasedGroup] = {}
        self._waiting = UnleasedGroups()
        self._next_id = 0
        self._cancels: list[tuple[str, Cancel]] = []
        self._failures: list[GroupFailure] = []
        self.late_rollouts = 0
        """Rollouts of leases that had been given up."""

    def announce(self, name: str, ready: GeneratorReady, now: float) -> None:
        """Take in a generator's state, and correct what it and the queue do not agree about."""
        if name in self._generators and self._generators[name].session != ready.session:
            self._breaker.forget(name)
        lost = self._generators.announce(
            name,
            capacity=ready.capacity,
            session=ready.session,
            version=ready.version,
            now=now,
            is_held=ready.is_held,
        )
        self._lose(lost, f"generator {name} restarted")
        if ready.leases is not None:
            self._reconcile(name, set(ready.leases), now)

    def _reconcile(self, name: str, reported: set[int], now: float) -> None:
        """Cancel what a generator works on in vain; lease again what it does not have."""
        held = self._generators[name].held
        self._cancels += [(name, Cancel(lease_id)) for lease_id in sorted(reported - held.keys())]
        absent = []
        for lease_id in held:
            lease = self._open[lease_id]
            if lease_id in reported:
                lease.absent_since = None
            elif lease.absent_since is None:
                # Perhaps the lease is on its way still.
                lease.absent_since = now
            elif now - lease.absent_since >= ABSENT_S:
                absent.append(lease_id)
        self._take_back(absent)
        self._lose(absent, f"a message of it was lost between {name} and the queue")

    # --- handing out ----------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """Queue all completions of a group."""
        held = LeasedGroup(group, list(range(group.size)), group.size)
        self._groups[group.number] = held
        self._waiting.add(held)

    def can_take(self, rules: LeaseRules, *, is_evaluation: bool) -> bool:
        """Whether a generator that may take completions of such a group has room for one."""
        return self._able(rules, is_evaluation=is_evaluation).has_room

    def _able(self, rules: LeaseRules, *, is_evaluation: bool) -> Selection:
        self._generators.set_apart(rules.evaluators)
        return self._generators.select(
            rules.oldest_version(is_evaluation=is_evaluation),
            is_apart=is_evaluation if rules.evaluators else None,
        )

    def _all_able(self, rules: LeaseRules) -> Eligible:
        return Eligible(*(self._able(rules, is_evaluation=asked) for asked in (False, True)))

    def issue(
        self, rules: LeaseRules, open_group: Callable[[], Group | None], now: float
    ) -> tuple[str, Lease] | None:
        """Lease completions of one group to a generator with room; None when nothing can be leased.

        A slot takes, in this order, what remains of a group whose home it is, or of an urgent one;
        a group that `open_group` opens; what remains of any group. So a group stays with its home
        where that costs nothing, and no slot idles while a completion waits. The groups that come
        before an older one are those of its own version, and no more than admission lets be opened.
        """
        self._limit_engines(now)
        if not self._generators.select().has_room:
            return None
        able = self._all_able(rules)
        choice = self._waiting.choose(rules, able, anywhere=False)
        if choice is None and (group := open_group()) is not None:
            self.add(group)
            choice = self._waiting.choose(rules, able, anywhere=False)
        choice = choice or self._waiting.choose(rules, able, anywhere=True)
        return self._lease(*choice, now) if choice is not None else None

    def _limit_engines(self, now: float) -> None:
        for name, limit in self._breaker.limits(now).items():
            self._generators.limit(name, limit)

    def _lease(self, held: LeasedGroup, name: str, now: float) -> tuple[str, Lease]:
        count = min(len(held.unleased), self._generators[name].room)
        indices, held.unleased = held.unleased[:count], held.unleased[count:]
        if not held.unleased:
            self._waiting.remove(held)
        if held.home in held.shunned or held.home not in self._generators:
            self._waiting.settle(held, name)
        held.attempts.update(indices)
        group = held.group
        # Programs' tests, which only verifiers need, can be long, and a group has many leases.
        prompt = msgspec.structs.replace(group.prompt, entry="")
        lease = Lease(self._next_id, prompt, indices, group.sampling)
        self._next_id += 1
        self._open[lease.lease_id] = _OpenLease(held, set(indices), name, now, now)
        held.lease_ids.add(lease.lease_id)
        self._generators.hand_out(name, lease.lease_id, count)
        return name, lease

    # --- coming back ----------------------------------------------------------------------------

    def take_rollout(self, name: str, rollout: Rollout, now: float) -> Group | None:
        """Group of a rollout that arrived; None when its lease was given up or it is faulty."""
        fault = find_fault(rollout)
        if fault:
            self.take_failure(name, RolloutFailed(rollout.lease_id, rollout.index, fault), now)
            return None
        if self._is_mixed(rollout):
            why = "its tokens are not all of the version that is measured"
            failure = RolloutFailed(rollout.lease_id, rollout.index, why)
            self.take_failure(name, failure, now, is_engine_fault=False)
            return None
        lease = self._return(name, rollout.lease_id, rollout.index, now)
        if lease is None:
            self.late_rollouts += 1
            return None
        if self._breaker.note_success(name):
            self._generators.limit(name, None)
        held = lease.holder
        held.group.origins[rollout.index] = Origin(name, lease.leased_at, now)
        held.unreturned -= 1
        if not held.unreturned:
            del self._groups[held.group.number]
        return held.group

    def _is_mixed(self, rollout: Rollout) -> bool:
        """Whether an evaluation would measure another version by it than its own."""
        lease = self._open.get(rollout.lease_id)
        if lease is None or not lease.holder.group.evaluation:
            return False
        return any(span.version != lease.holder.group.opened_version for span in rollout.spans)

    def take_failure(
        self, name: str, failure: RolloutFailed, now: float, *, is_engine_fault: bool = True
    ) -> None:
        """Queue a failed completion to be leased again, unless its group is to be dropped."""
        lease = self._return(name, failure.lease_id, failure.index, now)
        if lease is None:
            return
        held = lease.holder
        if failure.drop_as:
            self._fail(held, failure.drop_as, failure.reason)
            return
        self._waiting.shun(held, name)
        self._last_failure = f"{name} failed: {failure.reason}"
        if is_engine_fault:
            failed = Failed(held, failure.index)
            for forgiven in self._breaker.note_failure(name, failed, lease.leased_at, now):
                _count_as_lost(forgiven.holder, [forgiven.index])
        self._repeat(held, [failure.index], self._last_failure, is_lost=False)

    def expire(self, now: float) -> None:
        """Give up the leases of silent generators, and those that returned nothing for long.

        Raises TooManyFailures when every engine fails all that it gets.
        """
        if self._breaker.are_hopeless(self._generators.names):
            raise TooManyFailures(
                f"no generator can generate any more, the last failure: {self._last_failure!r}. "
                "Look into the logs of generators and of their engines"
            )
        config = self._config
        silent = self._generators.drop_silent(now, config.heartbeat_timeout_s)
        # It may live on behind a slow network, and hears this when it is back.
        self._take_back(silent)
        self._lose(silent, "its generator fell silent")
        for peer in self._generators.all:
            if peer.fenced_at is not None and now - peer.fenced_at > self.fence_grace_s:
                fenced = list(peer.held)
                self._take_back(fenced)
                self._lose(fenced, f"{peer.name} had no weights for {self.fence_grace_s:.0f} s")
        stuck = [
            lease_id
            for lease_id, lease in self._open.items()
            if now - lease.active_at > config.lease_timeout_s
        ]
        self._take_back(stuck)
        for lease_id in stuck:
            lease = self._open[lease_id]
            self._waiting.shun(lease.holder, lease.generator)
        self._lose(stuck, f"nothing came for {config.lease_timeout_s:.0f} s", is_lost=False)

    def drop_generator(self, name: str) -> None:
        """Forget a generator that cannot be reached."""
        self._lose(self._generators.drop(name), f"generator {name} is gone")

    def _return(self, name: str, lease_id: int, index: int, now: float) -> _OpenLease | None:
        self._generators.hear(name, now)
        lease = self._open.get(lease_id)
        if lease is None or lease.generator != name or index not in lease.missing:
            return None
        lease.missing.remove(index)
        lease.active_at = now
        self._generators.give_back(name, lease_id)
        if not lease.missing:
            self._close(lease_id)
        return lease

    def _close(self, lease_id: int) -> None:
        lease = self._open.pop(lease_id)
        lease.holder.lease_ids.remove(lease_id)

    def _lose(self, lease_ids: list[int], why: str, *, is_lost: bool = True) -> None:
        for lease_id in lease_ids:
            # A group that failed meanwhile took its other leases with it.
            lease = self._open.get(lease_id)
            if lease is not None:
                self._close(lease_id)
                self._repeat(lease.holder, sorted(lease.missing), why, is_lost=is_lost)

    def _repeat(self, held: LeasedGroup, indices: list[int], why: str, *, is_lost: bool) -> None:
        """Queue completions again; is_lost: by no fault of theirs, so that it was no attempt."""
        prompt_id = held.group.prompt.id
        if is_lost:
            _count_as_lost(held, indices)
        attempts = max(held.attempts[index] for index in indices)
        losses = max(held.losses[index] for index in indices)
        if attempts >= self._config.max_attempts:
            tried = f"completions {indices} were tried {attempts} times (expert.queue.max_attempts)"
            self._fail(held, ATTEMPTS_EXHAUSTED, f"{tried}; last: {why}")
            return
        if losses >= self._config.max_lost_attempts:
            lost = f"completions {indices} got lost {losses} times (expert.queue.max_lost_attempts)"
            self._fail(held, LOSSES_EXHAUSTED, f"{lost}; last: {why}")
            return
        log.warning("leasing completions %s of prompt %r again: %s", indices, prompt_id, why)
        self._put_back(held, indices)

    def _put_back(self, held: LeasedGroup, indices: list[int]) -> None:
        if not held.unleased:
            self._waiting.add(held)
        held.unleased = sorted([*held.unleased, *indices])

    def replace(self, group: Group, index: int) -> None:
        """Queue one more completion in the place of one that came back and is of no use."""
        held = self._groups.get(group.number)
        if held is None:
            held = self._groups[group.number] = LeasedGroup(group, [], 0)
        held.unreturned += 1
        del held.attempts[index], held.losses[index]
        self._put_back(held, [index])

    # --- giving up ------------------------------------------------------------------------------

    def cancel(self, group: Group) -> None:
        """Forget a group: take back what is leased of it; harmless when nothing is."""
        held = self._groups.pop(group.number, None)
        if held is None:
            return
        if held.is_waiting:
            self._waiting.remove(held)
        lease_ids = sorted(held.lease_ids)
        self._take_back(lease_ids)
        for lease_id in lease_ids:
            self._close(lease_id)

    def pop_evaluation(self) -> list[Group]:
        """Forget the groups of an evaluation that nobody can complete, and return them."""
        groups = [held.group for held in self._groups.values() if held.group.evaluation]
        for group in groups:
            self.cancel(group)
            group.is_abandoned = True
        return groups

    def _fail(self, held: LeasedGroup, reason: str, detail: str) -> None:
        self.cancel(held.group)
        self._failures.append(GroupFailure(held.group, reason, detail))

    def _take_back(self, lease_ids: list[int]) -> None:
        """Tell the holders to stop, and count their slots as free."""
        for lease_id in lease_ids:
            lease = self._open[lease_id]
            self._generators.give_back(lease.generator, lease_id, len(lease.missing))
            self._cancels.append((lease.generator, Cancel(lease_id)))

    def pop_cancels(self) -> list[tuple[str, Cancel]]:
        """What to tell generators since the last call."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def pop_failures(self) -> list[GroupFailure]:
        """Groups that failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    # --- state ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Completions of opened groups that no generator has."""
        return self._waiting.completions

    @property
    def outstanding(self) -> int:
        """Completions leased or waiting for a lease."""
        return self._leased + self.waiting

    @property
    def _leased(self) -> int:
        return sum(len(lease.missing) for lease in self._open.values())

    @property
    def generators(self) -> list[str]:
        """Names of the live generators."""
        return self._generators.names

    @property
    def peers(self) -> list[Peer]:
        """The live generators."""
        return self._generators.all

    @property
    def has_room(self) -> bool:
        """Whether a generator that has weights can take a completion."""
        return self._generators.select(0).has_room

    def describe(self, now: float) -> str:
        """One line on what is open where."""
        return (
            f"{self._leased} completions in {len(self._open)} leases, {self.waiting} wait for one; "
            f"generators: {self._generators.describe(now)}"
        )


def _count_as_lost(held: LeasedGroup, indices: list[int]) -> None:
    """The latest attempts of these were none."""
    held.attempts.subtract(indices)
    held.losses.update(indices)
