"""Leases: which generator generates which completions of which group, and what is tried again.

Used by the rollout queue. A completion is leased again when its generator restarts (changed
session), falls silent, reports a failure, or returns nothing of the lease for too long.
"""

import collections
import dataclasses
import logging

from megatron_rl.protocol.config import QueueConfig
from megatron_rl.protocol.types import GeneratorReady, Lease, Rollout, RolloutFailed
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.groups import Group, find_fault
from megatron_rl.rollout_queue.peers import Peers

log = logging.getLogger(__name__)

Work = tuple[Group, list[int]]
"""Completions to generate: a group and indices in it."""


class AttemptsExhausted(DeadlineExceeded):
    """A completion or a score failed as often as queue.max_attempts allows."""


@dataclasses.dataclass
class _OpenLease:
    group: Group
    missing: set[int]
    generator: str
    active_at: float


class Leases:
    """All leases, the generators that hold them, and the work waiting to be leased again."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._generators = Peers("generator")
        self._open: dict[int, _OpenLease] = {}
        self._again: collections.deque[Work] = collections.deque()
        self._attempts: collections.Counter[tuple[int, int]] = collections.Counter()
        self._next_id = 0
        self.late_rollouts = 0
        """Rollouts of leases that had been given up."""

    def announce(self, name: str, ready: GeneratorReady, now: float) -> None:
        """Take in a generator's state."""
        lost = self._generators.announce(
            name, capacity=ready.capacity, session=ready.session, version=ready.version, now=now
        )
        self._lose(lost, f"generator {name} restarted")

    @property
    def has_repeats(self) -> bool:
        """Whether work waits to be leased again, or the rest of a group to be leased."""
        while self._again and self._again[0][0].is_abandoned:
            self._again.popleft()
        return bool(self._again)

    def issue(self, fresh: Work | None, min_version: int, now: float) -> tuple[str, Lease] | None:
        """Lease work to the generator with most room: work to repeat first, else `fresh`.

        None when no generator of `min_version` has room or there is no work. What a single
        generator cannot hold is left for the next call.
        """
        if fresh is not None:
            self._again.append(fresh)
        if not self.has_repeats:
            return None
        group, indices = self._again[0]
        found = self._generators.find_room(len(indices), min_version)
        if found is None:
            return None
        generator, count = found
        self._again.popleft()
        if count < len(indices):
            self._again.appendleft((group, indices[count:]))
        for index in indices[:count]:
            self._attempts[group.number, index] += 1
        lease = Lease(self._next_id, group.prompt, indices[:count], group.sampling)
        self._next_id += 1
        self._open[lease.lease_id] = _OpenLease(group, set(lease.indices), generator.name, now)
        self._generators.hand_out(generator.name, lease.lease_id, count)
        return generator.name, lease

    def has_room(self, items: int, min_version: int) -> bool:
        """Whether a generator has room for so many completions."""
        return self._generators.find_room(items, min_version) is not None

    def take_rollout(self, name: str, rollout: Rollout, now: float) -> Group | None:
        """Group of a rollout that arrived; None when its lease was given up or it is faulty."""
        fault = find_fault(rollout)
        if fault:
            self.take_failure(name, RolloutFailed(rollout.lease_id, rollout.index, fault), now)
            return None
        group = self._return(name, rollout.lease_id, rollout.index, now)
        if group is None:
            self.late_rollouts += 1
            return None
        del self._attempts[group.number, rollout.index]
        return group

    def take_failure(self, name: str, failure: RolloutFailed, now: float) -> None:
        """Queue a failed completion to be leased again."""
        group = self._return(name, failure.lease_id, failure.index, now)
        if group is not None:
            self._repeat(group, [failure.index], f"{name} failed: {failure.reason}")

    def expire(self, now: float) -> None:
        """Give up the leases of silent generators, and those that returned nothing for long."""
        config = self._config
        silent = self._generators.drop_silent(now, config.heartbeat_timeout_s)
        self._lose(silent, "its generator fell silent")
        stuck = [
            lease_id
            for lease_id, lease in self._open.items()
            if now - lease.active_at > config.lease_timeout_s
        ]
        for lease_id in stuck:
            lease = self._open[lease_id]
            self._generators.give_back(lease.generator, lease_id, len(lease.missing))
        self._lose(stuck, f"nothing came for {config.lease_timeout_s:.0f} s")

    def drop_generator(self, name: str) -> None:
        """Forget a generator that cannot be reached."""
        self._lose(self._generators.drop(name), f"generator {name} is gone")

    def _return(self, name: str, lease_id: int, index: int, now: float) -> Group | None:
        self._generators.hear(name, now)
        lease = self._open.get(lease_id)
        if lease is None or lease.generator != name or index not in lease.missing:
            return None
        lease.missing.remove(index)
        lease.active_at = now
        self._generators.give_back(name, lease_id)
        if not lease.missing:
            del self._open[lease_id]
        return lease.group

    def _lose(self, lease_ids: list[int], why: str) -> None:
        for lease_id in lease_ids:
            lease = self._open.pop(lease_id)
            self._repeat(lease.group, sorted(lease.missing), why)

    def _repeat(self, group: Group, indices: list[int], why: str) -> None:
        if group.is_abandoned:
            return
        attempts = max(self._attempts[group.number, index] for index in indices)
        if attempts >= self._config.max_attempts:
            raise AttemptsExhausted(
                f"completions {indices} of prompt {group.prompt.id!r} were tried {attempts} times "
                f"(queue.max_attempts); last: {why}"
            )
        log.warning("leasing completions %s of prompt %r again: %s", indices, group.prompt.id, why)
        self._again.append((group, indices))

    @property
    def outstanding(self) -> int:
        """Completions leased or waiting to be leased again."""
        leased = sum(len(lease.missing) for lease in self._open.values())
        return leased + sum(len(indices) for _, indices in self._again)

    @property
    def generators(self) -> list[str]:
        """Names of the live generators."""
        return self._generators.names

    def describe(self, now: float) -> str:
        """One line on what is open where."""
        return (
            f"{self.outstanding} completions in {len(self._open)} leases, {len(self._again)} to be "
            f"leased again; generators: {self._generators.describe(now)}"
        )
