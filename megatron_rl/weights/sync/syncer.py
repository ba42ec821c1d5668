"""Syncing weights to the generators, which come, fail and go as they like.

Runs on every trainer rank. A weight sync is waited for (`sync`), or its weights travel while the
next batch is trained on, up to the optimizer step (`start`, `join`). Rank 0 knows the generators
(`link.py`) and says who takes part; a `Method` moves the weights. A generator that fails or passes
the deadline is dropped, the others continue; it gets a whole weight sync once it says Hello again,
at the next version or while the trainer waits for a batch. Engines on the trainer's GPUs may give
their memory back in between (`turns.py`).
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import Hello
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import GeneratorLink
from megatron_rl.weights.sync.members import Backoff, Member, Outcome
from megatron_rl.weights.sync.turns import MemoryTurns

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before another weight sync, when no generator took one."""


class Method(Protocol):
    """A way to move the weights. All methods are collective over the trainer ranks."""

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Bring the members to `version`; those that fail are in the outcome, not raised."""

    def forget(self, name: str) -> None:
        """Free what is kept for a generator that is gone."""

    def close(self) -> None:
        """Free everything, and tell the generators."""


class OverlappingMethod(Method, Protocol):
    """A method whose transfers run in threads."""

    def begin(
        self, members: list[Member], version: int, then: Callable[[], None] | None = None
    ) -> None:
        """Start; the parameters must not change until `end`.

        then: called on rank 0, by another thread, once a member holds the version and none is left
        that may.
        """

    def is_over(self) -> bool:
        """Whether `end` would not wait long."""

    def end(self) -> Outcome:
        """Wait for what `begin` started."""


class WeightSyncer(Closing):
    """Owns the syncing of a training phase."""

    def __init__(
        self,
        method: Method,
        control: Control,
        link: GeneratorLink | None,
        *,
        replicas: int,
        join_timeout_s: float,
        min_replicas: int | None = None,
        overlapping: OverlappingMethod | None = None,
        turns: MemoryTurns | None = None,
    ) -> None:
        """link: on rank 0 only. replicas: generators that are waited for at the beginning.

        min_replicas: of them, those without which training does not begin; None: all.
        overlapping: the method, if weight syncs may overlap with training. turns: if engines give
        their memory back meanwhile, which excludes the former.
        """
        assert turns is None or overlapping is None
        self._turns = turns
        self._has_released = False
        """Whether engines are without their weights: from `release` to the next weight sync."""
        self._overlapping = overlapping
        self._flight: list[Member] | None = None
        """Members of the weight sync that was started and not joined yet."""
        self._then: Callable[[], None] | None = None
        self._waited_s = 0.0
        """By the trainer, since the metrics of the last weight sync."""
        self._method, self._control, self._link = method, control, link
        self._replicas, self._join_timeout_s = replicas, join_timeout_s
        self._min_replicas = min_replicas or replicas
        self._backoff = Backoff()
        self._sessions: dict[str, int] = {}
        self._held: dict[str, int] = {}
        """Version that each generator of the last weight sync holds."""
        self._version = -1
        self._outcome = Outcome()
        """Since the metrics of the last weight sync."""
        self._dropped = 0
        self.metrics: list[Metric] = []
        """Of the last weight sync and the late ones before it."""

    @property
    def engines(self) -> list[Hello]:
        """What each generator said of itself; [] on ranks other than 0."""
        return list(self._link.peers.values()) if self._link is not None else []

    def await_generators(self) -> None:
        """Wait until all generators have said hello, at most expert.weights.join_timeout_s.

        Every rank calls it. Raises DeadlineExceeded with fewer than min_replicas by then.
        With `turns` they start their engines only now.
        """
        if self._turns is not None:
            self._turns.begin_engines_turn()
        if self._link is not None:
            self._link.await_peers(self._replicas, self._join_timeout_s, least=self._min_replicas)

    def sync(self, version: int) -> None:
        """Bring all generators to `version`. Every rank calls it.

        With no generator left it waits for one; DeadlineExceeded after
        expert.weights.join_timeout_s.
        """
        self.join()
        started = time.monotonic()
        self._version = version
        self._backoff.begin_sync()
        self._held.clear()
        if self._turns is not None:
            self._turns.begin_engines_turn()
            self._has_released = False
        self._sync_to(self._members(late_only=False))
        self._await_one()
        self._waited_s += time.monotonic() - started
        self._note()

    def release(self) -> None:
        """Have all generators give their memory back, up to the next weight sync. Every rank calls
        it.

        Without `turns` they keep it.
        """
        if self._turns is None:
            return
        self._turns.end_engines_turn()
        # Those that a weight sync passed by hold memory too.
        members = self._members(late_only=False, passes_by=False)
        for name, reason in self._turns.release(members).items():
            self._drop(name, reason)
        # Their weights are gone.
        self._held.clear()
        self._has_released = True

    @property
    def overlaps(self) -> bool:
        """Whether `start` is possible."""
        return self._overlapping is not None

    def start(self, version: int, then: Callable[[], None]) -> None:
        """As `sync`, but returns while the weights travel. Every rank calls it.

        The parameters must not change before `join`. then: called on rank 0 when the generators
        hold the version, by another thread, here or in `join`. Where a generator has not taken the
        version before, all are waited for: memory that its transfers keep is taken in the first
        one, not while a pass computes.
        """
        assert self._overlapping is not None
        self.join()
        # What is known of the weight sync before: this one's figures come with the next.
        self._note()
        started = time.monotonic()
        self._version = version
        self._backoff.begin_sync()
        served = {name: self._sessions[name] for name in self._held}
        self._held.clear()
        self._flight, self._then = self._members(late_only=False), then
        self._overlapping.begin(self._flight, version, then)
        self._waited_s += time.monotonic() - started
        if any(served.get(member.name) != member.hello.session for member in self._flight):
            self.join()

    def join(self) -> None:
        """Wait for what `start` began, if anything: then the parameters may change.

        Every rank calls it. With no generator left it waits for one, as `sync` does.
        """
        if self._flight is None or self._overlapping is None:
            return
        started = time.monotonic()
        members, self._flight = self._flight, None
        again = self._take(members, self._overlapping.end())
        is_told = bool(self._held)
        self._sync_to(again)
        self._await_one()
        if not is_told and self._link is not None and self._then is not None:
            self._then()
        self._waited_s += time.monotonic() - started

    def _await_one(self) -> None:
        """Sync again until a generator holds the version. Raises DeadlineExceeded."""
        # Rank 0 alone waits for a generator to return. The others already wait for its list of
        # members; `_held` is the same on all ranks, so they leave the loop together.
        ends_at = time.monotonic() + self._join_timeout_s
        while not self._held:
            self._await_return(ends_at)
            self._sync_to(self._members(late_only=False))

    def _await_return(self, ends_at: float) -> None:
        """On rank 0: wait until a generator is there again. Raises DeadlineExceeded."""
        if self._link is None:
            return
        # A generator that fails at once also comes back at once: do not sync without a break.
        time.sleep(RETRY_S)
        while not self._link.peers and time.monotonic() < ends_at:
            self._link.listen(ends_at - time.monotonic())
        if time.monotonic() >= ends_at:
            reasons = "; ".join(self._outcome.failed.values()) or "none said hello"
            raise DeadlineExceeded(
                f"no generator took version {self._version} in {self._join_timeout_s:.0f} s "
                f"(expert.weights.join_timeout_s): {reasons}; see logs/generator-*.log"
            )

    def admit(self) -> None:
        """Bring generators that came back to the current version. Every rank calls it."""
        # They would take the memory in which the trainer computes.
        assert not self._has_released
        if self._flight is not None and self._overlapping is not None:
            # Rank 0's conversation still uses the link, until it is over.
            if not self._control.share(self._overlapping.is_over(), bool):
                return
            self.join()
        late = self._members(late_only=True)
        if late:
            log.info("late weight sync to %s", [member.name for member in late])
            self._sync_to(late)

    def _members(self, *, late_only: bool, passes_by: bool = True) -> list[Member]:
        """Who takes part, the same on every rank.

        passes_by: without those that failed several weight syncs in a row, see `Backoff`.
        """
        members: list[Member] = []
        if self._link is not None:
            self._link.listen()
            # A held one evaluates its version; once it lets go it is late.
            members = [
                Member(name, hello)
                for name, hello in sorted(self._link.peers.items())
                if not hello.is_held
            ]
            # Late are those that came back since the last weight sync, or came for the first time.
            if late_only:
                members = [member for member in members if not self._is_current(member)]
            due = [m for m in members if self._backoff.is_due(m.name, m.hello.session)]
            # With nobody else, each gets its chance.
            if passes_by and (due or self._held):
                members = due
        members = self._control.share(members, list[Member])
        for member in members:
            # Groups hold connections to the process that died; a restarted one needs new groups.
            if self._sessions.get(member.name, member.hello.session) != member.hello.session:
                self._method.forget(member.name)
            self._sessions[member.name] = member.hello.session
        return members

    def _is_current(self, member: Member) -> bool:
        is_same = self._sessions.get(member.name) == member.hello.session
        return is_same and self._held.get(member.name) == self._version

    def _sync_to(self, members: list[Member]) -> None:
        if self._turns is not None and members:
            members = self._reclaim(self._turns, members)
        while members:
            members = self._take(members, self._method.sync(members, self._version))

    def _reclaim(self, turns: MemoryTurns, members: list[Member]) -> list[Member]:
        """Have the members take their memory again; those that did."""
        failed = turns.reclaim(members)
        for name, reason in failed.items():
            self._drop(name, reason)
        return [member for member in members if member.name not in failed]

    def _take(self, members: list[Member], found: Outcome) -> list[Member]:
        """Take in how a sync to these members went; those that are to be served once more."""
        outcome, again = self._outcome, []
        for member in members:
            if member.name in found.passed_over:
                log.warning("served once more: %s", found.passed_over[member.name])
                again.append(member)
                continue
            reason = found.failed.get(member.name)
            if reason is None:
                self._held[member.name] = self._version
                self._backoff.note_served(member.name, member.hello.session)
                continue
            self._drop(member.name, reason)
        # A late weight sync has no row of metrics: it counts in the row of the next one.
        outcome.pauses_s += found.pauses_s
        outcome.transfers_s += found.transfers_s
        outcome.wire_bytes += found.wire_bytes
        outcome.damaged += found.damaged
        outcome.peak_bytes = max(outcome.peak_bytes, found.peak_bytes)
        outcome.relayed += found.relayed
        outcome.passed_over |= found.passed_over
        return again

    def _drop(self, name: str, reason: str) -> None:
        """Continue without a generator."""
        # Nothing of it is kept: it comes back with a new Hello, as if it were another one.
        self._dropped += 1
        passed_by = self._backoff.note_failed(name, self._sessions[name])
        again = f"; the next {passed_by} weight syncs pass it by" if passed_by else ""
        log.warning("dropped from weight sync: %s%s", reason, again)
        self._outcome.failed[name] = reason
        self._held.pop(name, None)
        self._method.forget(name)
        if self._link is not None:
            self._link.drop(name)

    def _note(self) -> None:
        """Metrics of what there was since the last ones."""
        outcome, self._outcome = self._outcome, Outcome()
        seconds, self._waited_s = self._waited_s, 0.0
        self.metrics = [Metric("weight_sync/s", seconds, "max")]
        if self._link is None:
            return
        self.metrics += [
            Metric("weight_sync/generators", len(self._held), "max"),
            Metric("weight_sync/dropped_generators", self._dropped, "max"),
            Metric("weight_sync/damaged_parcels", outcome.damaged, "sum"),
            Metric("weight_sync/relayed", outcome.relayed, "sum"),
            Metric("weight_sync/passed_over", len(outcome.passed_over), "sum"),
            Metric("weight_sync/wire_mb", outcome.wire_bytes / 1e6, "sum"),
            Metric("weight_sync/peak_extra_mb", outcome.peak_bytes / 1e6, "max"),
        ]
        if self._turns is not None:
            release_s, reclaim_s = self._turns.pop_seconds()
            self.metrics.append(Metric("weight_sync/release_s", release_s, "max"))
            self.metrics.append(Metric("weight_sync/reclaim_s", reclaim_s, "max"))
        if outcome.pauses_s:
            self.metrics.append(Metric("weight_sync/pause_s", max(outcome.pauses_s), "max"))
        if outcome.transfers_s:
            self.metrics.append(Metric("weight_sync/transfer_s", max(outcome.transfers_s), "max"))

    def close(self) -> None:
        """Let the generators leave."""
        self._method.close()
