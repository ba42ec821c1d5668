"""Leases: which generator generates which completions, and which completions are leased again.

Used by the rollout queue. A lease has completions of one group, as many as its generator has room
for, so that no slot of an engine waits for a whole group. The first generator of a group is its
home and gets the other completions as slots become free: its prefix cache has the prompt.

A completion is leased again when its generator reports a failure, or returns nothing of the lease
for too long. After max_attempts tries its group fails; of an environment, only the completion. A
loss is not an attempt and has a separate limit: the generator restarts (another session), is
silent, has no weights for long, or its heartbeats do not name the lease. What a leaving generator
gives back counts as neither.
"""

import logging
from collections.abc import Callable, Collection, Mapping

import msgspec

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import Cancel, GeneratorReady, Lease, Rollout, RolloutFailed
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.drop_reasons import (
    GroupFailure,
    ScoreFailure,
    TooManyFailures,
    check_reason,
    lost_conversation,
)
from megatron_rl.rollout_queue.faults import FaultyRollout, RolloutLimits, find_fault
from megatron_rl.rollout_queue.groups import Group, Origin
from megatron_rl.rollout_queue.lease_breakers import EngineBreaker, EnvironmentBreaker, Failed
from megatron_rl.rollout_queue.peers import Peer, Peers, PeerSelection
from megatron_rl.rollout_queue.unleased_groups import (
    Eligible,
    OpenLease,
    PendingGroup,
    UnleasedGroups,
    find_exhausted,
)

log = logging.getLogger(__name__)

_CANCELS_A_HEARTBEAT = 1_000  # the next heartbeat names the other unknown leases again


class Leases:
    """All leases, their generators, and the completions that wait for a lease."""

    def __init__(
        self,
        config: QueueConfig,
        limits: RolloutLimits | None = None,
        environments: Mapping[str, str] | None = None,
    ) -> None:
        """environments: of each task that has one."""
        self.environments = EnvironmentBreaker(environments or {})
        self._config, self.limits = config, limits or RolloutLimits()
        self.fence_grace_s = config.lease_timeout_s
        """A generator without weights keeps its leases for this long."""
        self._breaker, self._last_failure = EngineBreaker(), ""
        self._generators = Peers("generator")
        self._open: dict[int, OpenLease] = {}
        self._groups: dict[int, PendingGroup] = {}
        self._waiting = UnleasedGroups()
        self._next_id = 0
        self._cancels: list[tuple[str, Cancel]] = []
        self._failures: list[GroupFailure | ScoreFailure] = []
        self.late_rollouts = 0
        """Rollouts that arrived after the queue gave up their lease."""

    def announce(self, name: str, ready: GeneratorReady, now: float) -> None:
        """Update a generator's state; repair leases on which it and the queue disagree.

        Raises WireError for a version that there is not.
        """
        self.limits.check_version(ready.version)
        self._breaker.note_session(name, ready.session)
        lost = self._generators.announce(
            name,
            capacity=ready.capacity,
            session=ready.session,
            version=ready.version,
            now=now,
            is_held=ready.is_held,
        )
        self._lose(lost, f"generator {name} restarted")
        if ready.leases is None:
            return
        known = self._generators[name].handed_out.keys()
        for lease_id in known & set(ready.active):
            self._open[lease_id].active_at = now
        reported = set(ready.leases)
        unknown = sorted(reported - known)[:_CANCELS_A_HEARTBEAT]
        self._cancels += [(name, Cancel(lease_id)) for lease_id in unknown]
        lost = self._generators.find_lost(name, reported, now)
        self._withdraw(lost, f"a message of it was lost between {name} and the queue")

    def add(self, group: Group) -> None:
        pending = PendingGroup(group, list(range(group.size)), group.size)
        self._groups[group.number] = pending
        self._waiting.add(pending)

    def can_take(self, rules: LeaseRules, *, is_evaluation: bool) -> bool:
        return self._eligible(rules, is_evaluation=is_evaluation).has_room

    def _eligible(self, rules: LeaseRules, *, is_evaluation: bool) -> PeerSelection:
        self._generators.set_evaluators(rules.evaluators)
        return self._generators.select(
            rules.oldest_version(is_evaluation=is_evaluation),
            is_evaluator=is_evaluation if rules.evaluators else None,
        )

    def issue(
        self, rules: LeaseRules, open_group: Callable[[], Group | None], now: float
    ) -> tuple[str, Lease] | None:
        """Lease completions of one group to a generator with room; None when nothing can be leased.

        A slot takes completions of the first of: an urgent group or a group with this home; a group
        that `open_group` opens; any group. So a group stays with its home where that is free, and
        no slot idles while a completion waits. Admission bounds the number of groups that overtake
        an older one; they have the same version.
        """
        for name, limit in self._breaker.limits(now).items():
            self._generators.limit(name, limit)
        if not self._generators.select().has_room:
            return None
        eligible = Eligible(*(self._eligible(rules, is_evaluation=one) for one in (False, True)))
        for task in self.environments.find_due(now):
            if (choice := self._waiting.choose_held(task, eligible)) is not None:
                self.environments.note_probe(task, now)
                return self._lease(*choice, now, most=1)
        choice = self._waiting.choose(rules, eligible, anywhere=False)
        # More than one only if the environment of the first one's task fails.
        while choice is None and (group := open_group()) is not None:
            self.add(group)
            choice = self._waiting.choose(rules, eligible, anywhere=False)
        choice = choice or self._waiting.choose(rules, eligible, anywhere=True)
        return self._lease(*choice, now) if choice is not None else None

    def _lease(
        self, pending: PendingGroup, name: str, now: float, *, most: int | None = None
    ) -> tuple[str, Lease]:
        count = min(len(pending.unleased[:most]), self._generators[name].room)
        indices, pending.unleased = pending.unleased[:count], pending.unleased[count:]
        if not pending.unleased:
            self._waiting.remove(pending)
        if pending.home in pending.avoided or pending.home not in self._generators:
            self._waiting.set_home(pending, name)
        pending.attempts.update(indices)
        group = pending.group
        prompt = group.prompt
        if prompt.task not in self.environments.targets:
            # Only verifiers need the tests of programs, which can be long.
            prompt = msgspec.structs.replace(prompt, entry="")
        lease = Lease(self._next_id, prompt, indices, group.sampling_of(indices))
        self._next_id += 1
        self._open[lease.lease_id] = OpenLease(pending, set(indices), name, now, now)
        pending.lease_ids.add(lease.lease_id)
        self._generators.hand_out(name, lease.lease_id, count)
        return name, lease

    def take_rollout(self, name: str, rollout: Rollout, now: float) -> Group | None:
        """The group of a returned rollout; None if its lease was given up.

        Raises FaultyRollout, after the completion is queued again.
        """
        lease = self._open.get(rollout.lease_id)
        fault = find_fault(rollout, self.limits, most_tokens=lease.most_tokens if lease else None)
        if fault:
            self.take_failure(name, RolloutFailed(rollout.lease_id, rollout.index, fault), now)
            at = f"completion {rollout.index} of lease {rollout.lease_id}"
            raise FaultyRollout(f"{at} has {fault}")
        if lease is not None and lease.is_mixed(rollout):
            why = "its tokens are not all of the version that is measured"
            failure = RolloutFailed(rollout.lease_id, rollout.index, why, fault="none")
            self.take_failure(name, failure, now)
            return None
        lease = self._return(name, rollout.lease_id, rollout.index, now)
        if lease is None:
            self.late_rollouts += 1
            return None
        if self._breaker.note_success(name):
            self._generators.limit(name, None)
        if self.environments.note_success(task := lease.pending.group.prompt.task):
            self._waiting.release(task)
        return self._note_returned(lease, rollout.index, now)

    def _note_returned(self, lease: OpenLease, index: int, now: float) -> Group:
        pending = lease.pending
        pending.group.origins[index] = Origin(lease.generator, lease.leased_at, now)
        pending.unreturned -= 1
        if not pending.unreturned:
            del self._groups[pending.group.number]
        return pending.group

    def take_failure(self, name: str, failure: RolloutFailed, now: float) -> bool:
        """Lease a failed completion again, or drop its group as the failure asks.

        Returns whether the queue still waited for it. Raises WireError for a reason that is not in
        GROUP_REASONS, TooManyFailures if an environment does not work again.
        """
        check_reason(name, failure)
        lease = self._return(name, failure.lease_id, failure.index, now)
        if lease is None:
            return False
        pending = lease.pending
        if failure.drop_as:
            self.cancel(pending.group)
            self._failures.append(GroupFailure(pending.group, failure.drop_as, failure.reason))
            return True
        if failure.is_environments:
            if self.environments.note_failure(lease, failure, now):
                self._waiting.hold(pending.group.prompt.task)
            tries = pending.attempts[failure.index]
            if tries >= self._config.max_attempts:
                group = self._note_returned(lease, failure.index, now)
                self._failures.append(lost_conversation(group, failure, tries))
                return True
        self._waiting.avoid(pending, name)
        self._last_failure = f"{name} failed: {failure.reason}"
        if failure.fault == "engine":
            failed = Failed(pending, failure.index)
            for forgiven in self._breaker.note_failure(name, failed, lease.leased_at, now):
                forgiven.pending.count_as_lost([forgiven.index])
        self._repeat(pending, [failure.index], self._last_failure, is_lost=False)
        return True

    def expire(self, now: float) -> None:
        """Give up the leases of silent generators, and leases that returned nothing for long.

        Raises TooManyFailures when every engine fails all its leases.
        """
        if self._breaker.are_hopeless(self._generators.names):
            raise TooManyFailures(
                f"no generator can generate any more, the last failure: {self._last_failure!r}. "
                "Look into the logs of generators and of their engines"
            )
        config = self._config
        # A silent generator may still run behind a slow network, so its leases are cancelled.
        silent = self._generators.drop_silent(now, config.heartbeat_timeout_s)
        self._withdraw(silent, "its generator fell silent")
        for peer in self._generators.all:
            if peer.fenced_at is not None and now - peer.fenced_at > self.fence_grace_s:
                why = f"{peer.name} had no weights for {self.fence_grace_s:.0f} s"
                self._withdraw(list(peer.handed_out), why)
        stuck = [
            lease_id
            for lease_id, lease in self._open.items()
            if now - lease.active_at > config.lease_timeout_s
        ]
        self._take_back(stuck)
        for lease in map(self._open.__getitem__, stuck):
            self._waiting.avoid(lease.pending, lease.generator)
        self._lose(stuck, f"nothing came for {config.lease_timeout_s:.0f} s", is_lost=False)

    def hand_back(self, name: str, kept: Collection[int]) -> bool:
        """Lease again all but the `kept` leases of a generator; forget it if it keeps none."""
        held = self._generators[name].handed_out
        for lease_id in sorted(held.keys() - kept):
            lease = self._open[lease_id]
            self._generators.give_back(name, lease_id, len(lease.missing))
            self._close(lease_id)
            lease.pending.attempts.subtract(lease.missing)
            self._put_back(lease.pending, sorted(lease.missing))
        if not held:
            self._generators.drop(name)
        return not held

    def drop_generator(self, name: str) -> None:
        self._lose(self._generators.drop(name), f"generator {name} is gone")

    def _return(self, name: str, lease_id: int, index: int, now: float) -> OpenLease | None:
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
        lease.pending.lease_ids.remove(lease_id)

    def _withdraw(self, lease_ids: list[int], why: str) -> None:
        """Cancel leases whose completions count as lost."""
        self._take_back(lease_ids)
        self._lose(lease_ids, why)

    def _lose(self, lease_ids: list[int], why: str, *, is_lost: bool = True) -> None:
        """Lease the completions of leases again. is_lost: as in `_repeat`."""
        for lease_id in lease_ids:
            # The group may have failed meanwhile, and lost its other leases.
            lease = self._open.get(lease_id)
            if lease is not None:
                self._close(lease_id)
                self._repeat(lease.pending, sorted(lease.missing), why, is_lost=is_lost)

    def _repeat(
        self, pending: PendingGroup, indices: list[int], why: str, *, is_lost: bool
    ) -> None:
        """Queue completions again, up to the limits. is_lost: count a loss, not an attempt."""
        if is_lost:
            pending.count_as_lost(indices)
        if failure := find_exhausted(pending, indices, self._config, why):
            self.cancel(pending.group)
            self._failures.append(failure)
            return
        prompt_id = pending.group.prompt.id
        log.warning("leasing completions %s of prompt %r again: %s", indices, prompt_id, why)
        self._put_back(pending, indices)

    def _put_back(self, pending: PendingGroup, indices: list[int]) -> None:
        if not pending.unleased:
            self._waiting.add(pending)
        pending.unleased = sorted([*pending.unleased, *indices])

    def replace(self, group: Group, index: int) -> None:
        """Queue a replacement of a returned completion that cannot be graded."""
        pending = self._groups.get(group.number)
        if pending is None:
            pending = self._groups[group.number] = PendingGroup(group, [], 0)
        pending.unreturned += 1
        del pending.attempts[index], pending.losses[index]
        self._put_back(pending, [index])

    def cancel(self, group: Group) -> None:
        pending = self._groups.pop(group.number, None)
        if pending is None:
            return
        if pending.is_waiting:
            self._waiting.remove(pending)
        self._take_back(lease_ids := sorted(pending.lease_ids))
        for lease_id in lease_ids:
            self._close(lease_id)

    def pop_evaluation(self) -> list[Group]:
        """Remove and return the groups of an evaluation that ends early."""
        groups = [pending.group for pending in self._groups.values() if pending.group.evaluation]
        for group in groups:
            self.cancel(group)
            group.is_abandoned = True
        return groups

    def _take_back(self, lease_ids: list[int]) -> None:
        """Cancel leases and free their slots."""
        for lease_id in lease_ids:
            lease = self._open[lease_id]
            self._generators.give_back(lease.generator, lease_id, len(lease.missing))
            self._cancels.append((lease.generator, Cancel(lease_id)))

    def pop_cancels(self) -> list[tuple[str, Cancel]]:
        cancels, self._cancels = self._cancels, []
        return cancels

    def pop_failures(self) -> list[GroupFailure | ScoreFailure]:
        """Groups, and completions of environments, that failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def outstanding(self) -> int:
        """Number of completions that are leased or wait for a lease."""
        return self.leased + self.waiting

    @property
    def waiting(self) -> int:
        return self._waiting.completions

    @property
    def leased(self) -> int:
        """Number of completions that generators have."""
        return sum(len(lease.missing) for lease in self._open.values())

    @property
    def generators(self) -> list[str]:
        return self._generators.names

    @property
    def peers(self) -> list[Peer]:
        return self._generators.all

    @property
    def has_room(self) -> bool:
        """Whether a generator with weights has room for a completion."""
        return self._generators.select(0).has_room

    def describe(self, now: float) -> str:
        """One line: leases, waiting completions, generators."""
        leased = f"{self.leased} completions in {len(self._open)} leases"
        if held := self._waiting.held_completions:
            leased += f", {held} wait for an environment that fails"
        waiting = self.waiting - held
        return f"{leased}, {waiting} wait; generators: {self._generators.describe(now)}"
