"""Leases: which generator generates which completions of which group, and what is tried again.

Used by the rollout queue. A lease holds completions of one group: as many as its generator has room
for, down to a single one, so that no slot of an engine waits for the room of a whole group. The
first generator that holds some of a group is its home and gets the others as its slots come free:
there the prompt's keys and values are in the prefix cache.

A completion is leased again when its generator restarts (changed session), falls silent, reports a
failure, or returns nothing of the lease for too long; after queue.max_attempts tries its group
fails. Whoever still generates what nobody waits for is told to stop.
"""

import dataclasses
import logging
from collections.abc import Callable

import msgspec

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import Cancel, GeneratorReady, Lease, Rollout, RolloutFailed
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.failures import ATTEMPTS_EXHAUSTED, GroupFailure
from megatron_rl.rollout_queue.groups import Group, Origin, find_fault
from megatron_rl.rollout_queue.peers import Peer, Peers
from megatron_rl.rollout_queue.rooms import Selection
from megatron_rl.rollout_queue.waiting import Able, LeasedGroup, WaitingGroups

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _OpenLease:
    holder: LeasedGroup
    missing: set[int]
    generator: str
    leased_at: float
    active_at: float


class Leases:
    """All leases, the generators that hold them, and the completions that wait for one."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._generators = Peers("generator")
        self._open: dict[int, _OpenLease] = {}
        self._groups: dict[int, LeasedGroup] = {}
        self._waiting = WaitingGroups()
        self._next_id = 0
        self._cancels: list[tuple[str, Cancel]] = []
        self._failures: list[GroupFailure] = []
        self.late_rollouts = 0
        """Rollouts of leases that had been given up."""

    def announce(self, name: str, ready: GeneratorReady, now: float) -> None:
        """Take in a generator's state."""
        lost = self._generators.announce(
            name,
            capacity=ready.capacity,
            session=ready.session,
            version=ready.version,
            now=now,
            is_held=ready.is_held,
        )
        self._lose(lost, f"generator {name} restarted")

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

    def _all_able(self, rules: LeaseRules) -> Able:
        return Able(self._able(rules, is_evaluation=False), self._able(rules, is_evaluation=True))

    def issue(
        self, rules: LeaseRules, open_group: Callable[[], Group | None], now: float
    ) -> tuple[str, Lease] | None:
        """Lease completions of one group to a generator with room; None when nothing can be leased.

        A slot takes, in this order, what remains of a group whose home it is, or of an urgent one;
        a group that `open_group` opens; what remains of any group. So a group stays with its home
        where that costs nothing, and no slot idles while a completion waits. The groups that come
        before an older one are those of its own version, and no more than admission lets be opened.
        """
        if not self._generators.select().has_room:
            return None
        able = self._all_able(rules)
        choice = self._waiting.choose(rules, able, anywhere=False)
        if choice is None and (group := open_group()) is not None:
            self.add(group)
            choice = self._waiting.choose(rules, able, anywhere=False)
        choice = choice or self._waiting.choose(rules, able, anywhere=True)
        return self._lease(*choice, now) if choice is not None else None

    def _lease(self, held: LeasedGroup, name: str, now: float) -> tuple[str, Lease]:
        count = min(len(held.unleased), self._generators[name].room)
        indices, held.unleased = held.unleased[:count], held.unleased[count:]
        if not held.unleased:
            self._waiting.remove(held)
        if held.home == held.shunned or held.home not in self._generators:
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
            self.take_failure(name, RolloutFailed(rollout.lease_id, rollout.index, why), now)
            return None
        lease = self._return(name, rollout.lease_id, rollout.index, now)
        if lease is None:
            self.late_rollouts += 1
            return None
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

    def take_failure(self, name: str, failure: RolloutFailed, now: float) -> None:
        """Queue a failed completion to be leased again, unless its group is to be dropped."""
        lease = self._return(name, failure.lease_id, failure.index, now)
        if lease is None:
            return
        held = lease.holder
        if failure.drop_as:
            self._fail(held, failure.drop_as, failure.reason)
            return
        self._waiting.shun(held, name)
        self._repeat(held, [failure.index], f"{name} failed: {failure.reason}")

    def expire(self, now: float) -> None:
        """Give up the leases of silent generators, and those that returned nothing for long."""
        config = self._config
        silent = self._generators.drop_silent(now, config.heartbeat_timeout_s)
        # It may live on behind a slow network, and hears this when it is back.
        self._take_back(silent)
        self._lose(silent, "its generator fell silent")
        stuck = [
            lease_id
            for lease_id, lease in self._open.items()
            if now - lease.active_at > config.lease_timeout_s
        ]
        self._take_back(stuck)
        for lease_id in stuck:
            lease = self._open[lease_id]
            self._waiting.shun(lease.holder, lease.generator)
        self._lose(stuck, f"nothing came for {config.lease_timeout_s:.0f} s")

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

    def _lose(self, lease_ids: list[int], why: str) -> None:
        for lease_id in lease_ids:
            # A group that failed meanwhile took its other leases with it.
            lease = self._open.get(lease_id)
            if lease is not None:
                self._close(lease_id)
                self._repeat(lease.holder, sorted(lease.missing), why)

    def _repeat(self, held: LeasedGroup, indices: list[int], why: str) -> None:
        prompt_id = held.group.prompt.id
        attempts = max(held.attempts[index] for index in indices)
        if attempts >= self._config.max_attempts:
            tried = f"completions {indices} were tried {attempts} times (queue.max_attempts)"
            self._fail(held, ATTEMPTS_EXHAUSTED, f"{tried}; last: {why}")
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
        del held.attempts[index]
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
