"""The method `reshard`: slices go from trainer shards straight into engine shards.

Runs on every trainer rank. All generators are served together: see `leader.py` for the course of a
transfer, `exchange/transport.py` for the way of the bytes. Threads of a weight sync:

| thread | on | does | waits for |
|---|---|---|---|
| caller | every rank | begins, joins the other threads | rank 0's outcome |
| leader (`leader.py`) | rank 0 | messages generators, calls trainer ranks | reports, acks |
| sender (`sender.py`) | every rank | takes digests of its slices, sends | calls in the store |

Threads share no group, connection to the store or socket. Every wait of a sender has a limit, so
`end` waits for it: afterwards nobody reads the parameters.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.nccl_settings import check_settings, own_settings
from megatron_rl.protocol.types import Hello, LeaveGroup
from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.folder_transport import FolderEnd
from megatron_rl.weights.exchange.group import is_of_devices, open_store
from megatron_rl.weights.exchange.layouts import EngineKind, Layouts, kind_of
from megatron_rl.weights.exchange.memory import SideStreams, synchronize
from megatron_rl.weights.exchange.parcels import Ends, PlainParameters, outgoing
from megatron_rl.weights.exchange.sender import Sender
from megatron_rl.weights.exchange.transport import stages_all
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.leader import Leader
from megatron_rl.weights.sync.link import GeneratorLink, GeneratorLost
from megatron_rl.weights.sync.members import ExchangeSettings, Member, Outcome

log = logging.getLogger(__name__)


@dataclass
class _Running:
    """The threads of a weight sync."""

    outcome: Future[Outcome] | None = None
    """On rank 0."""
    sending: Future[None] | None = None


class Reshard:
    """The exchanges with all generators."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        place: Place,
        shape: ModelShape,
        *,
        control: Control,
        link: GeneratorLink | None,
        settings: ExchangeSettings,
    ) -> None:
        """parameters, place: this rank's. Collective."""
        self._parameters, self._place, self._shape = parameters, place, shape
        self._control, self._link, self._settings = control, link, settings
        self._layouts: dict[EngineKind, tuple[int, Layouts]] = {}
        """With their numbers in the store."""
        self._device = next(iter(parameters.values())).device
        self._streams = SideStreams(self._device)
        self._running = _Running()
        self._names: set[str] = set()
        port, self._leader = 0, None
        if link is not None:
            deadline_s = settings.deadline_s
            master = open_store(settings.host, 0, is_master=True, timeout_s=deadline_s)
            self._leader = Leader(link, master, settings, control.world_size)
            port = master.port
        port = control.share(port, int)
        store = open_store(settings.host, port, is_master=False, timeout_s=settings.deadline_s)
        self._folder, end = None, None
        if settings.folder:
            self._folder = Folder(settings.folder)
            end = FolderEnd(self._folder, store, settings.dtype, settings.name)
            if link is not None:
                self._folder.remove_all()
        self._sender = Sender(
            store,
            rank=control.rank,
            backend=settings.backend,
            dtype=settings.dtype,
            device=self._device,
            # Between two calls rank 0 waits for reports and answers, and calls the roll.
            patience_s=4 * settings.deadline_s + 2 * settings.grace_s,
            folder=end,
        )

    @property
    def peak_bytes(self) -> int:
        """Peak memory of buffers on this rank."""
        return self._sender.peak_bytes

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Serve all members together."""
        self.begin(members, version)
        return self.end()

    # --- one weight sync ------------------------------------------------------------------------

    def begin(
        self, members: list[Member], version: int, then: Callable[[], None] | None = None
    ) -> None:
        """Start to serve all members. Until `end` the parameters must not change, and no other code
        uses the link.

        then: called on rank 0, by another thread, once every member has taken the version or
        failed, and at least one has taken it.
        """
        # First: an impossible plan is impossible on every rank.
        numbers = [self._number(member.hello) for member in members]
        pairs = sorted(zip(numbers, members, strict=True), key=lambda pair: pair[0])
        parties = [
            (number, party)
            for number, each in itertools.groupby(pairs, key=lambda pair: pair[0])
            for party in _parts([member for _, member in each], self._settings.groups)
        ]
        self._names |= {member.name for member in members}
        # A pool per weight sync. No daemons: torch 2.13 aborts a process that ends while a thread
        # waits in gloo.
        pool = ThreadPoolExecutor(
            2, thread_name_prefix="sync", initializer=self._streams.enter
        )  # fmt: skip
        self._streams.begin()
        running = self._running = _Running()
        if self._leader is not None:
            running.outcome = pool.submit(_lead, self._leader, parties, version, then)
        running.sending = pool.submit(self._send, sorted(set(numbers)))
        pool.shutdown(wait=False)

    def _send(self, numbers: Sequence[int]) -> None:
        """Prepare this rank's slices for these layouts, and send them as rank 0 calls."""
        plain = PlainParameters(self._parameters)
        plans = {number: layouts.plan() for number, layouts in self._layouts.values()}
        prepared: dict[int, Ends] = {}
        fault = ""
        try:
            for number in numbers:
                prepared[number] = outgoing(
                    plans[number].of_sender(self._control.rank),
                    plain,
                    self._settings.dtype,
                    stages_all=stages_all(self._settings.backend),
                )
            synchronize(self._device)
        except RuntimeError as error:
            # torch's error of a device without room for the dequantised tensors.
            fault = f"trainer rank {self._control.rank} could not prepare its slices: {error}"
        self._sender.serve(prepared, plans, fault=fault)

    def is_over(self) -> bool:
        """On rank 0: whether all generators have ended."""
        return self._running.outcome is not None and self._running.outcome.done()

    def end(self) -> Outcome:
        """Wait until all members hold the version or have failed; the parameters may change then.

        Collective.
        """
        running, self._running = self._running, _Running()
        outcome = running.outcome.result() if running.outcome is not None else Outcome()
        if running.sending is not None:
            running.sending.result()
        outcome.failed = self._control.share(outcome.failed, dict[str, str])
        return outcome

    # --- who is there ---------------------------------------------------------------------------

    def _number(self, hello: Hello) -> int:
        """Number of the layouts for a generator's engine. Raises InputError."""
        if is_of_devices(self._settings.backend):
            check_settings(own_settings(), hello.nccl)
        kind = kind_of(hello)
        if kind not in self._layouts:
            layouts = Layouts(
                self._shape,
                self._place,
                self._control.world_size,
                kind,
                self._settings.dtype.itemsize,
                self._settings.bucket_bytes,
            )
            try:
                layouts.plan()
            except ValueError as error:
                raise InputError(f"no exchange with a generator of {hello}: {error}") from error
            number = len(self._layouts)
            self._layouts[kind] = number, layouts
            if self._leader is not None:
                self._leader.announce(number, layouts)
        return self._layouts[kind][0]

    def forget(self, name: str) -> None:
        """Leave the groups with a lost generator."""
        self._names.discard(name)
        self._sender.forget(name)
        if self._leader is not None:
            self._leader.forget(name)

    def close(self) -> None:
        """Leave all groups."""
        # After an error a weight sync may still run, and it uses the link.
        is_free = self._running.outcome is None or self._running.outcome.done()
        for name in sorted(self._names) if self._link is not None and is_free else ():
            try:
                self._link.tell(name, LeaveGroup())
            except GeneratorLost as error:
                log.info("%s", error)
        if self._running.sending is None or self._running.sending.done():
            self._sender.close()
            if self._folder is not None and self._link is not None:
                self._folder.remove_all()


def _parts(members: Sequence[Member], groups: int) -> list[list[Member]]:
    """The members in as many parts, of which none is empty."""
    return [part for start in range(groups) if (part := list(members[start::groups]))]


def _lead(
    leader: Leader,
    parties: Sequence[tuple[int, Sequence[Member]]],
    version: int,
    then: Callable[[], None] | None,
) -> Outcome:
    outcome = leader.lead(parties, version)
    if then is not None and len(outcome.failed) < sum(len(members) for _, members in parties):
        then()
    return outcome
