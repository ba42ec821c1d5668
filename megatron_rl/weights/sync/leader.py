"""Weight syncs of slices as trainer rank 0 conducts them, with all generators of a kind at once.

Runs in one thread of rank 0, which alone uses the link meanwhile. A transfer:

| rank 0 | trainer ranks (`Sender` of `reshard.py`) | ranks of the engines (`engine_rank.py`) |
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.protocol.types import Hello, Pause, Receive
from megatron_rl.weights.exchange.group import is_of_devices
from megatron_rl.weights.exchange.orders import Call, Ready, Report, key
from megatron_rl.weights.exchange.plan import Layouts
from megatron_rl.weights.sync.link import Conversation, GeneratorLink, Outcome

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Transfers of one weight sync to several generators together; what then fails is served alone."""
REPORT_S = 2.0
"""A rank has so much longer to report than to receive: its error says more than its absence."""


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings of the exchange."""

    host: str
    """Address on which the stores of the groups listen."""
    backend: str
    """Collective backend of the groups; or without groups IPC, memory that ranks on one node
    share, or FOLDER, files."""
    dtype: torch.dtype
    """Type of elements on the wire."""
    bucket_bytes: int
    deadline_s: float
    name: str
    """Prefix of the groups' names: equal on every rank, unique to this syncer."""
    grace_s: float = 30.0
    """Most that all wait for a generator that has taken a version before: in the roll call, and in
    each round of packets."""
    groups: int = 1
    """Parts of the generators that are served one after the other; the others generate."""
    folder: str = ""
    """With FOLDER: path or URL of the files."""
    keeps: bool = False
    """With FOLDER: engines keep their parameters, so differences between versions are sent."""


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
        self._store.set(key("layouts", number), msgspec.json.encode(layouts))

    def lead(
        self,
        members: Mapping[str, Hello],
        numbers: Mapping[str, int],
        version: int,
        then: Callable[[], None] | None = None,
    ) -> Outcome:
        """Bring all members to the version. numbers: of each member's layouts.

        then: called once every member has taken the version or failed, if one has taken it.
        """
        outcome = Outcome()
        old, self._old_keys = self._old_keys, []
        fault = self._await_senders()
        for each in old:
            # All senders have read the calls of the last weight sync.
            self._store.delete_key(each)
        for number, names in self._parties(numbers):
            party = {name: members[name] for name in names}
            talk = Conversation(self._link, party, outcome, self._settings.deadline_s)
            if fault:
                talk.lose({name: f"{name}: {fault}" for name in names})
            self._serve(talk, number, version)
        self._call(Call(self._calls, is_end=True))
        if then is not None and len(outcome.failed) < len(members):
            then()
        return outcome

    def _parties(self, numbers: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
        """Members that are served together, with the number of their layouts."""
        for number in sorted(set(numbers.values())):
            names = [name for name in numbers if numbers[name] == number]
            for start in range(min(self._settings.groups, len(names))):
                yield number, names[start :: self._settings.groups]

    def forget(self, name: str) -> None:
        """A generator is lost: no group with it is sound."""
        self._groups = {who: text for who, text in self._groups.items() if name not in dict(who)}

    def _await_senders(self) -> str:
        """Why no transfer is possible; "": all senders wait for a call."""
        keys = [key("prepared", self._calls, rank) for rank in range(self._trainer_ranks)]
        self._old_keys += keys
        try:
            self._store.wait(keys, timedelta(seconds=self._settings.deadline_s))
        except dist.DistStoreError:
            return "no sender came before the deadline (expert.weights.deadline_s)"
        return next((text for each in keys if (text := self._store.get(each).decode())), "")

    def _serve(self, talk: Conversation, layouts: int, version: int) -> None:
        lacking, is_one = dict.fromkeys(talk.present, ""), len(talk.present) == 1
        for _ in range(ATTEMPTS):
            if lacking:
                lacking = self._transfer(talk, list(lacking), layouts, version)
        for name in list(lacking) if not is_one else ():
            del lacking[name]
            lacking |= self._transfer(talk, [name], layouts, version)
        talk.lose(lacking)

    # --- one transfer ---------------------------------------------------------------------------

    def _transfer(
        self, talk: Conversation, names: list[str], layouts: int, version: int
    ) -> dict[str, str]:
        """Make one transfer; why each generator that may be served again lacks the version."""
        attempt, settings = self._calls, self._settings
        # A first transfer gets its memory, and forms the lanes.
        is_known = any(self._session(talk, name) in self._served for name in names)
        wait_s = min(settings.grace_s if is_known else math.inf, settings.deadline_s)
        talk.tell(dict.fromkeys(names, Pause()))
        # No wait for the Ack of Pause: a generator obeys in order, so `ready` answers both.
        orders = {name: self._order(name, layouts, version, wait_s) for name in names}
        talk.tell(orders)
        held = self._roll_call(talk, [name for name in names if name in talk.present], wait_s)
        present, base = list(held), _base(held.values())
        self._call(
            Call(
                attempt,
                version,
                layouts,
                self._group(talk, present),
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
        self._await_reports(talk, attempt, present, wait_s)
        # The engine's call ends after the reports of its ranks, and Resume must follow it.
        talk.await_acks(present, orders[present[0]])
        left = [name for name in present if name in talk.present]
        lacking = {name: why for name in left if (why := self._read(talk, attempt, name, version))}
        if len(left) - len(lacking) < len(present):
            # Its connections are broken, or it will not be these generators' again.
            self.forget(present[0])
        whole = [name for name in left if name not in lacking]
        self._served |= {self._session(talk, name) for name in whole}
        talk.resume(version, whole)
        return lacking

    def _order(self, name: str, layouts: int, version: int, wait_s: float) -> Receive:
        settings = self._settings
        return Receive(
            address=settings.host,
            port=self._store.port,
            syncer=settings.name,
            replica=name,
            layouts=layouts,
            backend=settings.backend,
            folder=settings.folder,
            attempt=self._calls,
            version=version,
            # Of the roll call and the transfer.
            deadline_s=wait_s + settings.deadline_s,
        )

    def _roll_call(self, talk: Conversation, names: list[str], wait_s: float) -> dict[str, int]:
        """The generators whose ranks can all receive; the others are lost.

        With the version that the ranks hold, -1 where they hold none or several.
        """
        keys = {name: self._keys("ready", self._calls, talk, name) for name in names}
        ends_at = time.monotonic() + wait_s
        lost = self._link.await_all(
            names, lambda name: self._store.check(keys[name]), lambda: ends_at, "it is not ready"
        )
        talk.lose(lost)
        present = {}
        for name in names:
            if name in lost:
                continue
            ranks = [msgspec.json.decode(self._store.get(each), type=Ready) for each in keys[name]]
            if refusal := next((ready.error for ready in ranks if ready.error), ""):
                talk.lose({name: f"{name}: {refusal}"})
            else:
                versions = {ready.holds for ready in ranks}
                present[name] = versions.pop() if len(versions) == 1 else -1
        return present

    def _await_reports(
        self, talk: Conversation, attempt: int, names: list[str], wait_s: float
    ) -> None:
        """Wait until all ranks have reported. Those that do not are lost."""
        keys = {name: self._keys("done", attempt, talk, name) for name in names}
        failed = key("failed", attempt)
        self._old_keys.append(failed)
        limit = time.monotonic() + self._settings.deadline_s + REPORT_S
        is_troubled = False
        # Within which every rank notices that another one has failed. NCCL does not tell a rank
        # that its peer has left; a socket's end does.
        notice_s = wait_s if is_of_devices(self._settings.backend) else 0.0

        def ends_at() -> float:
            nonlocal limit, is_troubled
            if not is_troubled and self._store.check([failed]):
                is_troubled = True
                limit = min(limit, time.monotonic() + notice_s + REPORT_S)
            return limit

        lost = self._link.await_all(
            names, lambda name: self._store.check(keys[name]), ends_at, "no report came"
        )
        if lost and is_troubled:
            log.warning("%s", self._store.get(failed).decode())
        talk.lose(lost)

    def _read(self, talk: Conversation, attempt: int, name: str, version: int) -> str:
        """Add the reports of a generator's ranks to the outcome; why it lacks the version."""
        keys, outcome = self._keys("done", attempt, talk, name), talk.outcome
        reports = [msgspec.json.decode(self._store.get(each), type=Report) for each in keys]
        damaged = sum(report.damaged for report in reports)
        outcome.damaged += damaged
        outcome.transfers_s.append(max(report.seconds for report in reports))
        outcome.wire_bytes += sum(report.payload_bytes for report in reports)
        outcome.peak_bytes = max(outcome.peak_bytes, *(report.peak_bytes for report in reports))
        why = next((report.error for report in reports if report.error), "")
        if not why and damaged:
            why = f"{damaged} parcels arrived damaged"
        if why:
            log.warning("version %d at %s: %s", version, name, why)
        return why and f"{name}: {why}"

    # --- keys, groups and calls -----------------------------------------------------------------

    def _keys(self, kind: str, attempt: int, talk: Conversation, name: str) -> list[str]:
        """One key for each engine rank of a generator."""
        keys = [key(kind, attempt, name, rank) for rank in range(talk.present[name].world_size)]
        self._old_keys += keys
        return keys

    def _session(self, talk: Conversation, name: str) -> tuple[str, int]:
        return name, talk.present[name].session

    def _group(self, talk: Conversation, names: list[str]) -> str:
        """Name of the group of these generators; a new one if there is none."""
        sessions = tuple(self._session(talk, name) for name in names)
        if sessions not in self._groups:
            # An engine is in one group at a time.
            for name in names:
                self.forget(name)
            self._groups_made += 1
            # Unique among runs too: each syncer has separate groups.
            self._groups[sessions] = f"{self._settings.name}-{self._groups_made}"
        return self._groups[sessions]

    def _call(self, call: Call) -> None:
        go = key("go", self._calls)
        self._old_keys.append(go)
        self._store.set(go, msgspec.json.encode(call))
        self._calls += 1


def _base(held: Iterable[int]) -> int:
    """The version that most generators hold; -1: none."""
    counts = Counter(version for version in held if version >= 0)
    return max(counts, key=lambda version: (counts[version], version), default=-1)
