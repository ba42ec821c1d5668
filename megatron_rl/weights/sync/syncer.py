"""Weight syncs to the generators, which may join, fail and leave at any time.

Runs on every trainer rank. The trainer waits for a weight sync (`sync`), or trains on the next
batch meanwhile, up to the optimizer step (`start`, `join`). Rank 0 knows the generators (`link.py`)
and chooses the members; `Reshard` moves the weights. A generator that fails or passes the deadline
is dropped, and the others continue. After its next Hello it gets a whole weight sync, at the next
version or while the trainer waits for a batch. Engines on the trainer's GPUs may release their
memory between two weight syncs (`turns.py`).
"""

import logging
import time
from collections.abc import Callable

from megatron_rl.config.generator import MOST_PASSED_BY
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.types import Fence, Hello
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import GeneratorLink, Outcome
from megatron_rl.weights.sync.reshard import Reshard
from megatron_rl.weights.sync.turns import MemoryTurns

log = logging.getLogger(__name__)

_SHOWN_FAULTS = 4
RETRY_S = 0.5
"""Seconds before another weight sync, when no generator took one."""


class Backoff:
    """Generators that the next weight syncs leave out, because they failed several in a row. Pure.

    A weight sync waits until its deadline for a generator that does not answer. Without back-off
    all other generators would wait for it at each weight sync.
    """

    def __init__(self) -> None:
        self._weight_syncs = 0
        self._failed: dict[tuple[str, int], tuple[int, int]] = {}
        """By session of a generator: failures since it was last served, and the number of the next
        weight sync that includes it."""

    def begin_sync(self) -> None:
        """Count a weight sync."""
        self._weight_syncs += 1

    def note_failed(self, name: str, session: int) -> int:
        """Return how many weight syncs leave it out: 0 at first, then 2, 4, at most 8."""
        failures = self._failed.get((name, session), (0, 0))[0] + 1
        passed_by = min(MOST_PASSED_BY, 2 ** (failures - 1)) if failures > 1 else 0
        due_at = self._weight_syncs + passed_by + bool(passed_by)
        self._failed[name, session] = failures, due_at
        return passed_by

    def note_served(self, name: str, session: int) -> None:
        """Note that it took a version."""
        self._failed.pop((name, session), None)

    def is_due(self, name: str, session: int) -> bool:
        """Whether it takes part now. A restarted generator does: it has a new session."""
        return self._weight_syncs >= self._failed.get((name, session), (0, 0))[1]


class WeightSyncer(Closing):
    """All weight syncs of a training phase."""

    def __init__(
        self,
        method: Reshard,
        control: Control,
        link: GeneratorLink | None,
        *,
        replicas: int,
        join_timeout_s: float,
        min_replicas: int | None = None,
        overlaps: bool = False,
        turns: MemoryTurns | None = None,
        fault: Callable[[], str] | None = None,
    ) -> None:
        """link: on rank 0 only. replicas: generators to wait for at the beginning.

        fault: says on each rank why its weights may not be synced; "": they may.

        min_replicas: generators that training needs to begin; None: all. overlaps: whether
        weight syncs may overlap with training. turns: if engines release their memory while the
        trainer computes; excludes overlaps.
        """
        assert turns is None or not overlaps
        self._turns = turns
        self._fault = fault
        self._has_released = False
        """Whether engines are without their weights: from `release` to the next weight sync."""
        self._overlaps = overlaps
        self._flight: dict[str, Hello] | None = None
        """Members of a weight sync that was started and not joined."""
        self._then: Callable[[], None] | None = None
        self._waited_s = 0.0
        """Seconds that the trainer waited since the metrics of the last weight sync."""
        self._method, self._control, self._link = method, control, link
        self._replicas, self._join_timeout_s = replicas, join_timeout_s
        self._min_replicas = min_replicas or replicas
        self._backoff = Backoff()
        self._sessions: dict[str, int] = {}
        self._held: dict[str, int] = {}
        """Version that each generator of the last weight sync holds."""
        self._version = self._level = -1
        """The latest synced version, and the first one that may be synced."""
        self._outcome = Outcome()
        """Outcome since the metrics of the last weight sync."""
        self._dropped = 0
        self.metrics: list[Metric] = []
        """Of the last weight sync and the late syncs before it."""

    @property
    def engines(self) -> list[Hello]:
        """The Hello of each generator; [] on ranks other than 0."""
        return list(self._link.peers.values()) if self._link is not None else []

    def await_generators(self) -> None:
        """Wait until all generators have said hello, at most expert.weights.join_timeout_s.

        Every rank calls it. Raises DeadlineExceeded with fewer than min_replicas by then.
        With `turns` generators start their engines only now.
        """
        if self._turns is not None:
            self._turns.begin_engines_turn()
        if self._link is not None:
            self._link.await_peers(self._replicas, self._join_timeout_s, least=self._min_replicas)

    def wait_until_level(self, version: int) -> None:
        """The trainer was restarted: no weight sync before `version`, or the newest held one.

        Generators go on with the weights that they have, which the trainer will have again. Every
        rank calls it, after `await_generators`.
        """
        newest = max([version, *(hello.version for hello in self.engines)])
        self._level = self._control.share(newest, int)
        log.info("generators hold version %d: no weight sync before it", self._level)

    def sync(self, version: int) -> None:
        """Bring all generators to `version`. Every rank calls it.

        Without any generator it waits for one; raises DeadlineExceeded after
        expert.weights.join_timeout_s.
        """
        if version < self._level:
            self._fence_paused()
            self._note()
            return
        started = self._begin(version)
        self._held.clear()
        if self._turns is not None:
            self._turns.begin_engines_turn()
            self._has_released = False
        self._sync_to(self._members(late_only=False))
        self._await_one()
        self._waited_s += time.monotonic() - started
        self._note()

    def _fence_paused(self) -> None:
        """On rank 0: fence generators that a dead trainer paused; with `turns` they wait anyway."""
        if self._link is not None and self._turns is None:
            self._link.listen()
            for name, hello in self._link.peers.items():
                if hello.is_paused and hello.version >= 0:
                    self._link.tell(name, Fence("the trainer died during its weight sync"))

    def _begin(self, version: int) -> float:
        """A weight sync begins; when it did, as monotonic time."""
        self.join()
        self._refuse_faulty(version)
        self._version = version
        self._backoff.begin_sync()
        return time.monotonic()

    def release(self) -> None:
        """Have all generators release their memory until the next weight sync.

        Every rank calls it. Without `turns` generators keep their memory.
        """
        if self._turns is None:
            return
        self._turns.end_engines_turn()
        # Generators that a weight sync left out hold memory too.
        members = self._members(late_only=False, passes_by=False)
        for name, reason in self._turns.release(members).items():
            self._drop(name, reason)
        # Their weights are gone.
        self._held.clear()
        self._has_released = True

    @property
    def overlaps(self) -> bool:
        """Whether `start` may be called."""
        return self._overlaps and self._version >= self._level

    def start(self, version: int, then: Callable[[], None]) -> None:
        """As `sync`, but returns while the transfers run. Every rank calls it.

        The parameters must not change before `join`. then: called on rank 0 when the generators
        hold the version, by another thread, here or in `join`. With a generator that has never
        taken a version it waits for all: a first transfer allocates memory, which must not happen
        during a forward pass.
        """
        assert self._overlaps
        started = self._begin(version)
        # Figures of the weight sync before: those of this one come with the next.
        self._note()
        served = {name: self._sessions[name] for name in self._held}
        self._held.clear()
        self._flight, self._then = self._members(late_only=False), then
        self._method.begin(self._flight, version, then)
        self._waited_s += time.monotonic() - started
        if any(served.get(name) != hello.session for name, hello in self._flight.items()):
            self.join()

    def join(self) -> None:
        """Wait for the transfers of `start`, if there are any; then the parameters may change.

        Every rank calls it. Without any generator it waits for one, as `sync` does.
        """
        if self._flight is None:
            return
        started = time.monotonic()
        members, self._flight = self._flight, None
        self._take(members, self._method.end())
        is_told = bool(self._held)
        self._await_one()
        if not is_told and self._link is not None and self._then is not None:
            self._then()
        self._waited_s += time.monotonic() - started

    def _refuse_faulty(self, version: int) -> None:
        """Raise TrainingStopped on all ranks, if the weights of any rank may not be synced."""
        if self._fault is None:
            return
        if faults := [found for found in self._control.gather(self._fault(), str) if found]:
            raise TrainingStopped(
                f"version {version} has NaN or Inf in {'; '.join(faults[:_SHOWN_FAULTS])}, and "
                "goes to no generator. Resume from an earlier checkpoint with a lower "
                "optimizer.lr; look at the gradient norm of the steps before"
            )

    def _await_one(self) -> None:
        """Sync again until a generator holds the version. Raises DeadlineExceeded."""
        # Rank 0 alone waits for a generator to return. The others already wait for its list of
        # members; `_held` is the same on all ranks, so they leave the loop together.
        ends_at = time.monotonic() + self._join_timeout_s
        while not self._held:
            self._await_return(ends_at)
            self._sync_to(self._members(late_only=False))

    def _await_return(self, ends_at: float) -> None:
        """On rank 0: wait until a generator is present. Raises DeadlineExceeded."""
        if self._link is None:
            return
        # A generator that fails at once also returns at once: pause between two syncs.
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
        """Bring returned generators to the current version. Every rank calls it."""
        if self._version < self._level:
            return
        # Engines would take the memory in which the trainer computes.
        assert not self._has_released
        if self._flight is not None:
            # The running weight sync still uses the link.
            if not self._control.share(self._method.is_over(), bool):
                return
            self.join()
        late = self._members(late_only=True)
        if late:
            log.info("late weight sync to %s", [*late])
            self._sync_to(late)

    def _members(self, *, late_only: bool, passes_by: bool = True) -> dict[str, Hello]:
        """Return the members by name, the same on every rank.

        passes_by: leave out generators that failed several weight syncs in a row, see `Backoff`.
        """
        members: dict[str, Hello] = {}
        leaving: list[str] = []
        if self._link is not None:
            self._link.listen()
            leaving = self._link.pop_leaving()
            # A held generator evaluates its version; after that it is late. Late generators
            # returned, or came for the first time, since the last weight sync.
            members = {
                name: hello
                for name, hello in sorted(self._link.peers.items())
                if not hello.is_held and not (late_only and self._is_current(name, hello))
            }
            due = {n: h for n, h in members.items() if self._backoff.is_due(n, h.session)}
            # Without other generators, each gets its chance.
            if passes_by and (due or self._held):
                members = due
        members, leaving = self._control.share(
            (members, leaving), tuple[dict[str, Hello], list[str]]
        )
        for name in leaving:
            log.info("%s leaves the run", name)
            self._held.pop(name, None)
            self._method.forget(name)
        for name, hello in members.items():
            # Groups hold connections to the process that died; a restarted one needs new groups.
            if self._sessions.get(name, hello.session) != hello.session:
                self._method.forget(name)
            self._sessions[name] = hello.session
        return members

    def _is_current(self, name: str, hello: Hello) -> bool:
        is_same = self._sessions.get(name) == hello.session
        return is_same and self._held.get(name) == self._version

    def _sync_to(self, members: dict[str, Hello]) -> None:
        if self._turns is not None and members:
            # Those that take their memory again.
            failed = self._turns.reclaim(members)
            for name, reason in failed.items():
                self._drop(name, reason)
            members = {name: hello for name, hello in members.items() if name not in failed}
        if members:
            self._take(members, self._method.sync(members, self._version))

    def _take(self, members: dict[str, Hello], found: Outcome) -> None:
        """Record the outcome of a sync to these members."""
        outcome = self._outcome
        for name, hello in members.items():
            if name in found.failed:
                self._drop(name, found.failed[name])
            else:
                self._held[name] = self._version
                self._backoff.note_served(name, hello.session)
        # A late weight sync has no row of metrics: it counts in the row of the next sync.
        outcome.pauses_s += found.pauses_s
        outcome.transfers_s += found.transfers_s
        outcome.wire_bytes += found.wire_bytes
        outcome.damaged += found.damaged
        outcome.peak_bytes = max(outcome.peak_bytes, found.peak_bytes)

    def _drop(self, name: str, reason: str) -> None:
        """Continue without a generator."""
        # All its state goes: after a new Hello it is served like a new generator.
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
        """Write the metrics since the last call."""
        outcome, self._outcome = self._outcome, Outcome()
        seconds, self._waited_s = self._waited_s, 0.0
        self.metrics = [Metric("weight_sync/s", seconds, "max")]
        if self._link is None:
            return
        self.metrics += [
            Metric("weight_sync/generators", len(self._held), "max"),
            Metric("weight_sync/dropped_generators", self._dropped, "max"),
            Metric("weight_sync/damaged_parcels", outcome.damaged, "sum"),
            Metric("weight_sync/wire_mb", outcome.wire_bytes / 1e6, "sum"),
            Metric("weight_sync/peak_extra_mb", outcome.peak_bytes / 1e6, "max"),
        ]
        if self._turns is not None:
            self.metrics += self._turns.pop_metrics()
        if outcome.pauses_s:
            self.metrics.append(Metric("weight_sync/pause_s", max(outcome.pauses_s), "max"))
        if outcome.transfers_s:
            self.metrics.append(Metric("weight_sync/transfer_s", max(outcome.transfers_s), "max"))

    def close(self) -> None:
        """Release the generators."""
        self._method.close()
