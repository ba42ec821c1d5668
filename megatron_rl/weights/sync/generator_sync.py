"""One weight sync to one generator, as trainer rank 0 conducts it.

The sync is an iterator of single polls, so that one thread serves all generators at once (`lead`).

The senders are the ranks of a model copy, or the engine of another generator that relays the
version. If a relay fails and the receiving engine is idle again, the generator is passed over
instead of dropped: its copy serves it in a separate weight sync.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import msgspec

from megatron_rl.protocol.types import Fence, PassOn, Pause, Receive, Resume
from megatron_rl.weights.exchange.engine_rank import Report
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.plan import Plan
from megatron_rl.weights.exchange.sender import (
    ENGINE_MARGIN_S,
    Call,
    call_key,
    failed_key,
    gives_key,
    prepared_key,
)
from megatron_rl.weights.sync.link import POLL_S, GeneratorLink, GeneratorLost
from megatron_rl.weights.sync.members import ATTEMPTS, ExchangeSettings, Member, Outcome
from megatron_rl.weights.sync.sync_progress import SyncProgress

log = logging.getLogger(__name__)

GLANCE_S = 0.004
"""Seconds between two polls of a store."""
LONGEST_POLL_S = 0.02


class RelayFailed(RuntimeError):
    """A generator did not relay the version; the generator that waited for it is idle."""


class GeneratorSync:
    """State of rank 0 for one generator: the store, and the count of calls and transfers."""

    def __init__(
        self,
        member: Member,
        plan: Plan,
        *,
        source: str,
        name: str,
        settings: ExchangeSettings,
    ) -> None:
        """source: sends the weights, see `Relays`. name: of the group."""
        self.member, self.name, self._settings = member, name, settings
        self._senders, self._source = plan.senders, source
        self._progress = SyncProgress({}, {})
        """Progress of the current weight sync."""
        self._store = open_store(settings.host, 0, is_master=True, timeout_s=settings.deadline_s)
        self._attempts = self._calls = 0
        self._old_keys: list[str] = []
        self.has_served = False
        """Whether the generator has taken a version: then its group is formed."""
        # Before any Receive names this store: an engine rank reads its plan as soon as it is there.
        for rank in self._engine_ranks:
            self._store.set(f"plan/{rank}", msgspec.json.encode(plan.of_receiver(rank)))
        if source:
            for rank in range(self._senders):
                self._store.set(gives_key(rank), msgspec.json.encode(plan.of_sender(rank)))

    @property
    def port(self) -> int:
        """Port of the store."""
        return self._store.port

    @property
    def _engine_ranks(self) -> range:
        return range(self._senders, self._senders + self.member.hello.world_size)

    def sync(
        self,
        link: GeneratorLink,
        version: int,
        outcome: Outcome,
        progress: SyncProgress,
        *,
        turns: int,
    ) -> Generator[None]:
        """Bring the generator to the version, and add the result to the outcome.

        turns: generators that its senders may serve before this one.
        """
        member, self._progress = self.member, progress
        old, self._old_keys = self._old_keys, []
        try:
            link.begin(member.name, member.hello.session)
            if self._source:
                yield from self._ask_source(link, version)
            yield from self._prepared(link, turns)
            # All senders have read the calls of the last weight sync.
            for key in old:
                self._store.delete_key(key)
            paused_at = time.monotonic()
            yield from self._transfers(link, version, outcome)
            self._call(Call())
            progress.note_held(member.name)
            outcome.relayed += bool(self._source)
            yield from self._passing_on(link)
            # Every engine rank has reported whole parcels: the version may be served.
            resume = Resume(version)
            link.tell(member.name, resume)
            yield from link.awaiting_ack(member.name, resume, self._deadline())
            outcome.pauses_s.append(time.monotonic() - paused_at)
            self.has_served = True
        except RelayFailed as error:
            outcome.passed_over[member.name] = str(error)
            progress.note_failed(member.name)
            self._call(Call())
        except GeneratorLost as error:
            outcome.failed[member.name] = str(error)
            progress.note_failed(member.name)
            self._fence(link, str(error))
            # Senders may know already: a second call does no harm, as this sync is not used again.
            self._call(Call())

    def _ask_source(self, link: GeneratorLink, version: int) -> Iterator[None]:
        """Wait for this generator's turn, then have its source send. Raises RelayFailed."""
        name, progress = self.member.name, self._progress
        yield from link.waiting(
            name, lambda: progress.is_turn(name), self._last(), f"{self._source} was not done"
        )
        if not progress.holds(self._source):
            raise RelayFailed(f"{name}: {self._source} failed, which was to pass the version on")
        order = PassOn(
            address=self._settings.host,
            port=self.port,
            group_name=self.name,
            version=version,
            deadline_s=self._settings.deadline_s,
            kept=progress.groups_of(self._source),
        )
        try:
            # No wait for the Ack: a generator obeys in order, so its Resume comes later.
            link.tell(self._source, order)
        except GeneratorLost as error:
            raise RelayFailed(f"{name}: {error}") from error

    def _passing_on(self, link: GeneratorLink) -> Iterator[None]:
        """Wait until the generators that this one relays to have the version."""
        name, progress = self.member.name, self._progress
        if not progress.served_by(name):
            return
        yield from link.waiting(
            name, lambda: progress.has_passed_on(name), self._last(), "it did not pass it on"
        )

    def _last(self) -> float:
        """Return the time by which every transfer that this one may wait for has ended."""
        each_s = (ATTEMPTS + 1) * (self._settings.deadline_s + ENGINE_MARGIN_S)
        return time.monotonic() + self._progress.size * each_s

    def _prepared(self, link: GeneratorLink, turns: int) -> Iterator[None]:
        keys = [prepared_key(self._calls, rank) for rank in range(self._senders)]
        self._old_keys += keys
        ends_at = time.monotonic() + turns * (ATTEMPTS + 1) * self._settings.deadline_s
        yield from self._before_sending(link, keys, ends_at, "no sender came")
        faults = [text for key in keys if (text := self._store.get(key).decode())]
        if faults:
            raise self._failure(faults[0])

    def _failure(self, reason: str) -> GeneratorLost | RelayFailed:
        """Return the failure of a transfer that has ended at the generator."""
        reason = f"{self.member.name}: {reason}"
        if self._source:
            return RelayFailed(f"{reason} (passed on by {self._source})")
        return GeneratorLost(reason)

    def _before_sending(
        self, link: GeneratorLink, keys: list[str], ends_at: float, why: str
    ) -> Iterator[None]:
        """Wait for keys. Raises GeneratorLost, or RelayFailed when the source is lost."""

        def are_there() -> bool:
            if self._source and self._progress.is_lost(self._source):
                raise RelayFailed(f"{self.member.name}: {self._source} was lost as it passed on")
            return self._store.check(keys)

        return self._looking(link, are_there, ends_at, why)

    def _transfers(self, link: GeneratorLink, version: int, outcome: Outcome) -> Iterator[None]:
        name, damaged = self.member.name, 0
        for _ in range(ATTEMPTS):
            damaged = yield from self._transfer(link, version, outcome)
            outcome.damaged += damaged
            if not damaged:
                return
            log.warning("%d damaged parcels at %s: once more", damaged, name)
        raise self._failure(f"{damaged} parcels arrived damaged, {ATTEMPTS} times")

    def _transfer(
        self, link: GeneratorLink, version: int, outcome: Outcome
    ) -> Generator[None, None, int]:
        """Make one transfer; return the count of damaged parcels. Raises GeneratorLost."""
        name, ends_at = self.member.name, self._deadline()
        # A part of each key, so that a late answer to an earlier transfer does not count.
        self._attempts += 1
        receive = self._receive(version)
        yield from self._make_ready(link, receive, ends_at)
        self._call(Call(receive, ends_at - time.monotonic()))
        done, failed = self._keys("done", receive), failed_key(receive.attempt)

        def is_over() -> bool:
            # If one rank cannot send, the reports do not come before the deadline.
            return self._store.check(done) or self._store.check([failed])

        yield from self._looking(link, is_over, ends_at, "no report came")
        if not self._store.check(done):
            raise GeneratorLost(f"{name}: {self._store.get(failed).decode()}")
        # The engine's call ends after the reports of its ranks, and Resume must follow it.
        yield from link.awaiting_ack(name, receive, ends_at)
        return self._read(done, outcome)

    def _make_ready(self, link: GeneratorLink, receive: Receive, ends_at: float) -> Iterator[None]:
        """Pause the generator and wait until all its ranks can receive. Raises GeneratorLost."""
        name, ready, go = self.member.name, self._keys("ready", receive), f"go/{receive.attempt}"
        self._old_keys.append(go)
        try:
            # No wait for the Ack of Pause: a generator obeys in order, so `ready` answers both.
            link.tell(name, Pause())
            link.tell(name, receive)
            yield from self._before_sending(link, ready, ends_at, "it is not ready")
        except (GeneratorLost, RelayFailed):
            # Its ready ranks wait for `go`, and would wait until their deadline.
            self._store.set(go, "0")
            raise
        refusals = [text for key in ready if (text := self._store.get(key).decode())]
        self._store.set(go, "0" if refusals else "1")
        if refusals:
            raise GeneratorLost(f"{name}: {refusals[0]}")

    def _read(self, done: Sequence[str], outcome: Outcome) -> int:
        """Return the count of damaged parcels by the ranks' reports. Raises GeneratorLost."""
        reports = [msgspec.json.decode(self._store.get(key), type=Report) for key in done]
        outcome.transfers_s.append(max(report.seconds for report in reports))
        outcome.wire_bytes += sum(report.payload_bytes for report in reports)
        outcome.peak_bytes = max(outcome.peak_bytes, *(report.peak_bytes for report in reports))
        if errors := [report.error for report in reports if report.error]:
            raise self._failure(errors[0])
        return sum(report.damaged for report in reports)

    def _looking(
        self, link: GeneratorLink, is_over: Callable[[], bool], ends_at: float, why: str
    ) -> Iterator[None]:
        """As `GeneratorLink.waiting`, for conditions in a store, where a poll takes time."""
        look_at = 0.0

        def glance() -> bool:
            nonlocal look_at
            if time.monotonic() < look_at:
                return False
            found = is_over()
            look_at = time.monotonic() + GLANCE_S
            return found

        return link.waiting(self.member.name, glance, ends_at, why)

    def _call(self, call: Call) -> None:
        key = call_key(self._calls)
        self._old_keys.append(key)
        self._store.set(key, msgspec.json.encode(call))
        self._calls += 1

    def _fence(self, link: GeneratorLink, reason: str) -> None:
        """Fence a generator with half old, half new parameters; do not wait for its Ack."""
        try:
            link.tell(self.member.name, Fence(reason))
        except GeneratorLost as error:
            log.info("%s", error)

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.deadline_s + ENGINE_MARGIN_S

    def _receive(self, version: int) -> Receive:
        return Receive(
            address=self._settings.host,
            port=self.port,
            group_name=self.name,
            backend=self._settings.backend,
            rank_offset=self._senders,
            world_size=self._engine_ranks.stop,
            attempt=self._attempts,
            version=version,
            deadline_s=self._settings.deadline_s,
        )

    def _keys(self, kind: str, receive: Receive) -> list[str]:
        keys = [f"{kind}/{receive.attempt}/{rank}" for rank in self._engine_ranks]
        self._old_keys += keys
        return keys


def lead(
    link: GeneratorLink,
    syncs: Sequence[GeneratorSync],
    version: int,
    sources: Mapping[str, str],
    *,
    grace_s: float | None,
) -> Outcome:
    """Sync all generators at the same time.

    sources: generator -> its source, see `Relays`. grace_s: seconds after another generator took
    the version, after which one that has taken a version before is dropped; a generator that waits
    for a relay has the time of a transfer more. None: each has its whole deadline.
    """
    outcome = Outcome()
    progress = SyncProgress(sources, {sync.member.name: sync.name for sync in syncs})
    turns = 1 if grace_s is not None else len(syncs)
    talks = {d.member.name: d.sync(link, version, outcome, progress, turns=turns) for d in syncs}
    known = {sync.member.name for sync in syncs if sync.has_served}
    # A poll of many generators takes longer than of one.
    poll_s = min(LONGEST_POLL_S, POLL_S * len(talks))
    waits_until, passes_on = math.inf, any(sources.values())
    while talks:
        link.listen(poll_s)
        if grace_s is not None and time.monotonic() > waits_until:
            for name in progress.are_late(known & talks.keys()):
                reason = (
                    f"{name}: not done {grace_s:g} s after another one (expert.weights.grace_s)"
                )
                _give_up(talks[name], reason)
                # Generators that relayed to it, or waited for it, continue only now.
                waits_until = time.monotonic() + grace_s
        for name, talk in list(talks.items()):
            if next(talk, _END) is _END:
                del talks[name]
                # Generators that end one after the other show that the senders make progress.
                if grace_s is not None and name not in outcome.failed:
                    longest_s = max(outcome.transfers_s, default=0.0) if passes_on else 0.0
                    waits_until = time.monotonic() + grace_s + longest_s
    return outcome


def _give_up(talk: Generator[None], reason: str) -> None:
    """End a sync as if its generator were lost."""
    try:
        talk.throw(GeneratorLost(reason))
    except StopIteration:
        return


_END = object()
