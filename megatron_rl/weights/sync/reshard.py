"""The method `reshard`: slices go from trainer shards straight into engine shards.

Runs on every trainer rank. Each generator is bound to one copy of the model (`relays.py`). Its
process group holds the ranks of that copy and the ranks of its engine. So copies serve their
generators at the same time, and a failing generator affects no other. Threads of a weight sync:

| thread | on | does | waits for |
|---|---|---|---|
| caller | every rank | binds, begins, joins the other threads | rank 0's outcome |
| `generator_sync.py` | rank 0 | messages generators, calls their senders | reports, acks |
| preparation | every rank of a copy | computes the digests of all slices | - |
| sender (`sender.py`), one a generator | every rank of its copy | sends | calls in a store |

Over NCCL one thread of a rank serves all generators in turn. With `expert.weights.relay` a copy
serves a few generators, and the ranks of their engines send to the others (`relays.py`).

Threads share no group, store or socket. A transfer:

| rank 0 | senders | the engine's ranks |
|---|---|---|
| waits until all are prepared | say prepared | |
| Pause, then Receive | wait for a call | read the plan, check their parameters, say ready |
| waits for all `ready`, sets `go`, calls | | wait for `go` |
| | open the group, send | open the group, receive, compare digests |
| reads all `done`; once more, or over and Resume | | |

Senders start when every receiver is ready. A receiver that fails closes its connections, so its
senders fail at once. A receiver that hangs is dropped at its deadline, or expert.weights.grace_s
after the others. Over gloo no thread waits for its senders, which end at the deadline.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.nccl_settings import check_settings, own_settings
from megatron_rl.protocol.types import Hello, LeaveGroup
from megatron_rl.weights.exchange.group import is_of_devices
from megatron_rl.weights.exchange.memory import SideStreams, synchronize
from megatron_rl.weights.exchange.parcels import Ends, PlainParameters, for_another, outgoing
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.exchange.sender import Sender
from megatron_rl.weights.exchange.transport import Buffers, stages_all
from megatron_rl.weights.layout.copies import Copies
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.generator_sync import GeneratorSync, lead
from megatron_rl.weights.sync.link import GeneratorLink, GeneratorLost
from megatron_rl.weights.sync.members import ExchangeSettings, Member, Outcome
from megatron_rl.weights.sync.relays import COPY, Bindings, Relays

log = logging.getLogger(__name__)

_Reasons = dict[str, str]
Kind = tuple[str, int, int, int]
"""Engines of one kind need the same slices. Fields of their Hello."""


@dataclass(frozen=True)
class _Prepared:
    """What this rank sends to all receivers of one kind."""

    ends: Ends
    fault: str = ""
    """Why this rank cannot send; "": it can."""


@dataclass
class _Running:
    """The threads of a weight sync."""

    outcome: Future[Outcome] | None = None
    """On rank 0."""
    senders: dict[str, Future[None]] = field(default_factory=dict)
    """By generator."""


class Reshard:
    """The exchanges with all generators."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        copies: Copies,
        shape: ModelShape,
        *,
        control: Control,
        link: GeneratorLink | None,
        settings: ExchangeSettings,
    ) -> None:
        """parameters: this rank's, by local name."""
        self._parameters = parameters
        self._plain = PlainParameters(parameters)
        """Parameters of the current weight sync."""
        self._copies, self._shape = copies, shape
        self._control, self._link, self._settings = control, link, settings
        self._bindings = Bindings(len(copies.ranks))
        self._copy = next(n for n, ranks in enumerate(copies.ranks) if control.rank in ranks)
        """Number of the copy that this rank belongs to."""
        self._place = copies.ranks[self._copy].index(control.rank)
        """Position of this rank in its copy."""
        self._device = next(iter(parameters.values())).device
        self._streams = SideStreams(self._device)
        self._relays = Relays()
        self._plans: dict[tuple[Kind, Kind | None], Plan] = {}
        """By kind of the receivers, and kind of the senders where these are engine ranks."""
        self._opened: dict[str, str] = {}
        """Generator with an exchange -> its source."""
        self._syncs: dict[str, GeneratorSync] = {}
        self._senders: dict[str, Sender] = {}
        self._groups_made = 0
        self._buffers = Buffers()
        """Buffers of all senders, where they work in turn."""
        self._running = _Running()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of buffers on this rank."""
        peaks = [sender.peak_bytes for sender in self._senders.values()]
        return sum(peaks) if self._settings.is_concurrent else max(peaks, default=0)

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Serve all members at the same time."""
        self.begin(members, version)
        return self.end()

    # --- one weight sync
    # ----------------------------------------------------------------------------

    def begin(
        self, members: list[Member], version: int, then: Callable[[], None] | None = None
    ) -> None:
        """Start to serve all members. Until `end` the parameters must not change, and no other code
        uses the link. then: see `OverlappingMethod`."""
        sources = self._bind(members)
        by_name = {member.name: member for member in members}
        # In the order of service, which is the same on all ranks.
        members = [by_name[name] for name in sources]
        self._plain = PlainParameters(self._parameters)
        mine = [member for member in members if member.name in self._senders]
        kinds = {kind_of(member.hello) for member in mine}
        # A pool per weight sync: threads that wait for a hanging generator may be left over.
        # No daemons: torch 2.13 aborts a process that ends while a thread waits in gloo.
        pool = ThreadPoolExecutor(
            1 + len(kinds) + len(mine),
            thread_name_prefix="sync",
            initializer=self._streams.enter,
        )
        self._streams.begin()
        running = self._running = _Running()
        if self._link is not None:
            syncs = [self._syncs[member.name] for member in members]
            grace_s = self._settings.grace_s if self._settings.is_concurrent else None
            talk = partial(lead, self._link, syncs, version, sources, grace_s=grace_s)
            running.outcome = pool.submit(_lead, talk, len(members), then)
        prepared = {kind: pool.submit(self._prepare, kind, self._plain) for kind in kinds}
        tasks = {m.name: (self._senders[m.name], prepared[kind_of(m.hello)]) for m in mine}
        if self._settings.is_concurrent:
            running.senders = {name: pool.submit(_serve, [task]) for name, task in tasks.items()}
        elif tasks:
            running.senders = dict.fromkeys(tasks, pool.submit(_serve, list(tasks.values())))
        pool.shutdown(wait=False)

    def _prepare(self, kind: Kind, plain: PlainParameters) -> _Prepared:
        try:
            ends = outgoing(
                self._plans[kind, None].of_sender(self._place),
                plain,
                self._settings.dtype,
                stages_all=stages_all(self._settings.backend),
            )
            # Senders read the tensors dequantised and digested here, each in a separate stream.
            synchronize(self._device)
        except RuntimeError as error:
            # torch's error of a device without room for the dequantised tensors.
            return _Prepared([], f"a trainer rank could not prepare its slices: {error}")
        return _Prepared(ends)

    def is_over(self) -> bool:
        """On rank 0: whether all generators have ended."""
        return self._running.outcome is not None and self._running.outcome.done()

    def end(self) -> Outcome:
        """Wait until all members hold the version or have failed; the parameters may change then.

        Collective. Senders to a hanging generator may still read: what they send is never used.
        """
        running, self._running = self._running, _Running()
        outcome = running.outcome.result() if running.outcome is not None else Outcome()
        known = (outcome.failed, outcome.passed_over)
        outcome.failed, outcome.passed_over = self._control.share(known, tuple[_Reasons, _Reasons])
        for name in outcome.passed_over:
            self._relays.serve_directly(name)
        # Senders that still read keep their buffers.
        self._plain = PlainParameters(self._parameters)
        for name, sender in running.senders.items():
            # Over NCCL no kernel may stay on the device; the wait lasts until its deadline.
            if name not in outcome.failed or not self._settings.is_concurrent or sender.done():
                sender.result()
        return outcome

    # --- who is there ---------------------------------------------------------------------------

    def _bind(self, members: Sequence[Member]) -> dict[str, str]:
        """Find each member's source, and open an exchange for members that have none with it.

        Return the sources in the order of service; see `Relays`.
        """
        for name in self._bindings.bind([member.name for member in members]):
            log.info("%s changes to copy %d of the model", name, self._bindings.of[name])
            self._leave(name)
        sources = self._sources(members)
        for name, source in sources.items():
            if self._opened.get(name, source) != source:
                self._leave(name)
        new = [member for member in members if member.name not in self._opened]
        # First: an impossible plan is impossible on every rank.
        hellos = {member.name: member.hello for member in members}
        plans = [self.plan(member.hello, hellos.get(sources[member.name])) for member in new]
        ports = []
        if self._link is not None:
            ports = [
                self._open_sync(member, plan, sources[member.name])
                for member, plan in zip(new, plans, strict=True)
            ]
        if new:
            ports = self._control.share(ports, list[int])
        for member, port in zip(new, ports, strict=True):
            self._opened[member.name] = sources[member.name]
            if sources[member.name] == COPY and self._bindings.of[member.name] == self._copy:
                self._senders[member.name] = self._open_sender(port)
        return sources

    def _sources(self, members: Sequence[Member]) -> dict[str, str]:
        names = [member.name for member in members]
        if not self._settings.relays:
            return dict.fromkeys(names, COPY)
        kinds = {member.name: kind_of(member.hello) for member in members}
        order = self._relays.order(names, self._bindings.of)
        return self._relays.sources({name: kinds[name] for name in order})

    def _open_sender(self, port: int) -> Sender:
        return Sender(
            rank=self._place,
            address=self._settings.host,
            port=port,
            deadline_s=self._settings.deadline_s,
            dtype=self._settings.dtype,
            device=self._device,
            buffers=Buffers() if self._settings.is_concurrent else self._buffers,
        )

    def _open_sync(self, member: Member, plan: Plan, source: str) -> int:
        """On rank 0: open the exchange's store; return its port."""
        self._groups_made += 1
        sync = self._syncs[member.name] = GeneratorSync(
            member,
            plan,
            source=source,
            # Unique among runs too: each syncer has separate groups.
            name=f"{self._settings.name}-{self._groups_made}",
            settings=self._settings,
        )
        return sync.port

    def plan(self, hello: Hello, source: Hello | None = None) -> Plan:
        """Return the plan of an engine with any copy, or with the engine of `source`.

        Raises InputError.
        """
        if is_of_devices(self._settings.backend):
            check_settings(own_settings(), hello.nccl)
        kinds = kind_of(hello), kind_of(source) if source is not None else None
        if kinds not in self._plans:
            self._plans[kinds] = self._make_plan(hello, source)
        return self._plans[kinds]

    def _make_plan(self, hello: Hello, source: Hello | None) -> Plan:
        senders, settings = self._copies.slices, self._settings
        try:
            if source is not None:
                senders = tuple(
                    receiver_slices(self._shape, source, rank) for rank in range(source.world_size)
                )
            receivers = {
                len(senders) + rank: receiver_slices(self._shape, hello, rank)
                for rank in range(hello.world_size)
            }
            return make_plan(
                dict(enumerate(senders)),
                receivers,
                itemsize=settings.dtype.itemsize,
                bucket_bytes=settings.bucket_bytes,
            )
        except ValueError as error:
            raise InputError(f"no exchange with a generator of {hello}: {error}") from error

    def forget(self, name: str) -> None:
        """Close the group with a lost generator."""
        self._bindings.forget(name)
        self._relays.forget(name)
        self._leave(name)
        # The groups of generators that it relayed to hold connections to its engine.
        for other, source in list(self._opened.items()):
            if source == name:
                self._leave(other)

    def _leave(self, name: str) -> None:
        self._opened.pop(name, None)
        self._syncs.pop(name, None)
        sender = self._senders.pop(name, None)
        if sender is not None:
            sender.close()

    def close(self) -> None:
        """Leave all groups."""
        # After an error a weight sync may still run, and it uses the link.
        is_free = self._running.outcome is None or self._running.outcome.done()
        for name in list(self._opened):
            if self._link is not None and is_free:
                try:
                    self._link.tell(name, LeaveGroup())
                except GeneratorLost as error:
                    log.info("%s", error)
            self.forget(name)


def _lead(talk: Callable[[], Outcome], members: int, then: Callable[[], None] | None) -> Outcome:
    outcome = talk()
    if then is not None and len(outcome.failed) + len(outcome.passed_over) < members:
        then()
    return outcome


def _serve(tasks: list[tuple[Sender, Future[_Prepared]]]) -> None:
    """Serve generators, one after the other."""
    for sender, prepared in tasks:
        found = prepared.result()
        sender.serve(for_another(found.ends), fault=found.fault)


def kind_of(hello: Hello) -> Kind:
    """Return the fields on which a generator's slices depend."""
    return hello.engine, hello.world_size, hello.ffn_multiple, hello.expert_parallel


def receiver_slices(shape: ModelShape, hello: Hello, rank: int) -> list[Slice]:
    """Slices of one rank of a generator's engine."""
    if hello.engine == "hf":
        return hf_slices(shape)
    return engine_slices(
        shape,
        Share(rank, hello.world_size),
        expert_parallel=hello.expert_parallel,
        ffn_multiple=hello.ffn_multiple,
    )
