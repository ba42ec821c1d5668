"""Weight syncs of slices as trainer rank 0 conducts them, with all generators of a kind at once.

Runs in one thread of rank 0, which alone uses the link meanwhile. A transfer:

| rank 0 | trainer ranks (`sender.py`) | ranks of the engines (`engine_rank.py`) |
|---|---|---|
| Pause, Receive | | compute the plan, look at their parameters, say ready |
| roll call: who is not ready within `grace_s` is left out | wait for a call | wait for `go` |
| sets `go` with those that take part | open the lanes, send | open the lanes, receive, hand on |
| reads all `done`: Resume for those that have it | | |

One engine that fails breaks the chain for others. So those that lack the version are served once
more without the lost ones, and what still fails is served alone: then its failure is its own.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from megatron_rl.protocol.types import Pause, Receive
from megatron_rl.weights.exchange.engine_rank import Ready, Report, layouts_key, ready_key
from megatron_rl.weights.exchange.group import is_of_devices
from megatron_rl.weights.exchange.layouts import Layouts
from megatron_rl.weights.exchange.sender import failed_key, go_key, prepared_key
from megatron_rl.weights.exchange.shared_transport import done_key
from megatron_rl.weights.exchange.transport import Round
from megatron_rl.weights.sync.link import Conversation, GeneratorLink
from megatron_rl.weights.sync.members import ExchangeSettings, Member, Outcome

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Transfers of one weight sync to several generators together; what then fails is served alone."""
REPORT_S = 2.0
"""A rank has so much longer to report than to receive: its error says more than its absence."""
GLANCE_S = 0.004
"""Seconds between two polls of the store."""


@dataclass(frozen=True)
class _Task:
    """What all transfers to some generators have in common."""

    talk: Conversation
    members: dict[str, Member]
    layouts: int
    version: int
    outcome: Outcome

    def keys(self, kind: Callable[[int, str, int], str], attempt: int, name: str) -> list[str]:
        """One key for each engine rank of a generator."""
        size = self.members[name].hello.world_size
        return [kind(attempt, name, rank) for rank in range(size)]


class Leader:
    """State of rank 0: the store, and the count of calls."""

    def __init__(
        self,
        link: GeneratorLink,
        store: dist.TCPStore,
        settings: ExchangeSettings,
        trainer_ranks: int,
    ) -> None:
        """store: of this process, in which engines and trainer ranks look for calls."""
        self._link, self._store, self._settings = link, store, settings
        self._trainer_ranks = trainer_ranks
        self._calls = self._groups_made = 0
        self._groups: dict[tuple[tuple[str, int], ...], str] = {}
        """Name of the group of (generator, session), while it is sound."""
        self._served: set[tuple[str, int]] = set()
        """Sessions that have taken a version."""
        self._old_keys: list[str] = []

    def announce(self, number: int, layouts: Layouts) -> None:
        """Put layouts into the store."""
        self._store.set(layouts_key(number), msgspec.json.encode(layouts))

    def lead(self, parties: Sequence[tuple[int, Sequence[Member]]], version: int) -> Outcome:
        """Bring all members to the version. parties: number of the layouts, members."""
        outcome = Outcome()
        old, self._old_keys = self._old_keys, []
        fault = self._await_senders()
        for key in old:
            # All senders have read the calls of the last weight sync.
            self._store.delete_key(key)
        for number, members in parties:
            talk = Conversation(self._link, members, outcome, self._settings.deadline_s)
            if fault:
                talk.lose_all({name: f"{name}: {fault}" for name in talk.names})
            named = {member.name: member for member in members}
            self._serve(_Task(talk, named, number, version, outcome))
        self._call(Round(self._calls, is_end=True))
        return outcome

    def forget(self, name: str) -> None:
        """A generator is lost: no group with it is sound."""
        self._groups = {key: text for key, text in self._groups.items() if name not in dict(key)}

    def _await_senders(self) -> str:
        """Why no transfer is possible; "": all senders wait for a call."""
        keys = [prepared_key(self._calls, rank) for rank in range(self._trainer_ranks)]
        self._old_keys += keys
        ends_at = time.monotonic() + self._settings.deadline_s
        while not self._store.check(keys):
            if time.monotonic() > ends_at:
                return "no sender came before the deadline (expert.weights.deadline_s)"
            time.sleep(GLANCE_S)
        return next((text for key in keys if (text := self._store.get(key).decode())), "")

    def _serve(self, task: _Task) -> None:
        lacking = dict.fromkeys(task.talk.names, "")
        for _ in range(ATTEMPTS):
            if lacking:
                lacking = self._transfer(task, list(lacking))
        for name in list(lacking) if len(task.members) > 1 else ():
            del lacking[name]
            lacking |= self._transfer(task, [name])
        task.talk.lose_all(lacking)

    # --- one transfer ---------------------------------------------------------------------------

    def _transfer(self, task: _Task, names: list[str]) -> dict[str, str]:
        """Make one transfer; why each generator that may be served again lacks the version."""
        talk, attempt, settings = task.talk, self._calls, self._settings
        # A first transfer gets its memory, and forms the lanes.
        is_known = any(self._session(task, name) in self._served for name in names)
        wait_s = min(settings.grace_s if is_known else math.inf, settings.deadline_s)
        pause = Pause()
        talk.tell(names, lambda name: pause)
        # No wait for the Ack of Pause: a generator obeys in order, so `ready` answers both.
        orders = {name: self._receive(task, name, wait_s) for name in names}
        talk.tell(names, orders.__getitem__)
        held = self._roll_call(task, [name for name in names if name in talk.names], wait_s)
        present, base = list(held), _base(held.values())
        self._call(
            Round(
                attempt,
                task.version,
                task.layouts,
                self._group(task, present),
                tuple(present),
                settings.deadline_s,
                wait_s,
                base,
                needs_whole=base < 0 or set(held.values()) != {base},
                keeps=settings.keeps,
            )
        )
        if not present:
            return {}
        self._await_reports(task, attempt, present, wait_s)
        left = [name for name in present if name in talk.names]
        # The engine's call ends after the reports of its ranks, and Resume must follow it.
        talk.await_acks(left, orders[present[0]])
        left = [name for name in left if name in talk.names]
        lacking = {name: why for name in left if (why := self._read(task, attempt, name))}
        if len(left) - len(lacking) < len(present):
            # Its connections are broken, or it will not be these generators' again.
            self.forget(present[0])
        whole = [name for name in left if name not in lacking]
        talk.resume(task.version, whole)
        self._served |= {self._session(task, name) for name in whole}
        return lacking

    def _receive(self, task: _Task, name: str, wait_s: float) -> Receive:
        settings = self._settings
        return Receive(
            address=settings.host,
            port=self._store.port,
            syncer=settings.name,
            replica=name,
            layouts=task.layouts,
            backend=settings.backend,
            folder=settings.folder,
            attempt=self._calls,
            version=task.version,
            # Of the roll call and the transfer.
            deadline_s=wait_s + settings.deadline_s,
        )

    def _roll_call(self, task: _Task, names: list[str], wait_s: float) -> dict[str, int]:
        """The generators whose ranks can all receive; the others are lost.

        With the version that the ranks hold, -1 where they hold none or several.
        """
        keys = {name: task.keys(ready_key, self._calls, name) for name in names}
        self._old_keys += [key for each in keys.values() for key in each]
        ends_at = time.monotonic() + wait_s
        lost = self._link.await_all(
            names, lambda name: self._store.check(keys[name]), lambda: ends_at, "it is not ready"
        )
        task.talk.lose_all(lost)
        present = {}
        for name in names:
            if name in lost:
                continue
            ranks = [msgspec.json.decode(self._store.get(key), type=Ready) for key in keys[name]]
            if refusal := next((ready.error for ready in ranks if ready.error), ""):
                task.talk.lose(name, f"{name}: {refusal}")
            else:
                versions = {ready.holds for ready in ranks}
                present[name] = versions.pop() if len(versions) == 1 else -1
        return present

    def _await_reports(self, task: _Task, attempt: int, names: list[str], wait_s: float) -> None:
        """Wait until all ranks have reported. Those that do not are lost."""
        keys = {name: task.keys(done_key, attempt, name) for name in names}
        self._old_keys += [failed_key(attempt), *(key for each in keys.values() for key in each)]
        limit = time.monotonic() + self._settings.deadline_s + REPORT_S
        is_troubled = False

        def ends_at() -> float:
            nonlocal limit, is_troubled
            if not is_troubled and self._store.check([failed_key(attempt)]):
                is_troubled = True
                limit = min(limit, time.monotonic() + self._notice_s(wait_s) + REPORT_S)
            return limit

        lost = self._link.await_all(
            names, lambda name: self._store.check(keys[name]), ends_at, "no report came"
        )
        if lost and is_troubled:
            log.warning("%s", self._store.get(failed_key(attempt)).decode())
        task.talk.lose_all(lost)

    def _notice_s(self, wait_s: float) -> float:
        """Within which every rank notices that another one has failed."""
        # NCCL does not tell a rank that its peer has left; a socket's end does.
        return wait_s if is_of_devices(self._settings.backend) else 0.0

    def _read(self, task: _Task, attempt: int, name: str) -> str:
        """Add the reports of a generator's ranks to the outcome; why it lacks the version."""
        keys, outcome = task.keys(done_key, attempt, name), task.outcome
        reports = [msgspec.json.decode(self._store.get(key), type=Report) for key in keys]
        damaged = sum(report.damaged for report in reports)
        outcome.damaged += damaged
        outcome.transfers_s.append(max(report.seconds for report in reports))
        outcome.wire_bytes += sum(report.payload_bytes for report in reports)
        outcome.peak_bytes = max(outcome.peak_bytes, *(report.peak_bytes for report in reports))
        why = next((report.error for report in reports if report.error), "")
        if not why and damaged:
            why = f"{damaged} parcels arrived damaged"
        if why:
            log.warning("version %d at %s: %s", task.version, name, why)
        return why and f"{name}: {why}"

    # --- groups and calls -----------------------------------------------------------------------

    def _session(self, task: _Task, name: str) -> tuple[str, int]:
        return name, task.members[name].hello.session

    def _group(self, task: _Task, names: list[str]) -> str:
        """Name of the group of these generators; a new one if there is none."""
        key = tuple(self._session(task, name) for name in names)
        if key not in self._groups:
            # An engine is in one group at a time.
            for name in names:
                self.forget(name)
            self._groups_made += 1
            # Unique among runs too: each syncer has separate groups.
            self._groups[key] = f"{self._settings.name}-{self._groups_made}"
        return self._groups[key]

    def _call(self, order: Round) -> None:
        key = go_key(self._calls)
        self._old_keys.append(key)
        self._store.set(key, msgspec.json.encode(order))
        self._calls += 1


def _base(held: Iterable[int]) -> int:
    """The version that most generators hold; -1: none."""
    counts = Counter(version for version in held if version >= 0)
    return max(counts, key=lambda version: (counts[version], version), default=-1)
