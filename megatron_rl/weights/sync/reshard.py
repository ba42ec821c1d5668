"""The method `reshard`: slices go from trainer shards straight into engine shards.

Runs on every trainer rank. All generators are served together: see `leader.py` for the course of a
transfer, `exchange/transport.py` for the way of the bytes. Threads of a weight sync:

| thread | on | does | waits for |
|---|---|---|---|
| caller | every rank | begins, joins the other threads | rank 0's outcome |
| leader (`leader.py`) | rank 0 | messages generators, calls trainer ranks | reports, acks |
| sender (`Sender`) | every rank | takes digests of its slices, sends | calls in the store |

Threads share no group, connection to the store or socket. Every wait of a sender has a limit, so
`end` waits for it: afterwards nobody reads the parameters.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.nccl_settings import check_settings, own_settings
from megatron_rl.protocol.types import Hello, LeaveGroup
from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.group import is_of_devices, open_store
from megatron_rl.weights.exchange.group_transport import open_transport
from megatron_rl.weights.exchange.memory import SideStream, synchronize
from megatron_rl.weights.exchange.orders import Call, key
from megatron_rl.weights.exchange.parcels import Ends, PlainParameters, outgoing, send
from megatron_rl.weights.exchange.plan import EngineKind, Layouts, Plan, kind_of
from megatron_rl.weights.exchange.transport import FOLDER, IPC, Transport
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.leader import ExchangeSettings, Leader
from megatron_rl.weights.sync.link import GeneratorLink, Outcome

log = logging.getLogger(__name__)


class Sender:
    """This rank's end of all transfers, as rank 0 calls for them in the store (`orders.py`).

    Works in one thread. No other thread uses its store or transport, and the parameters do not
    change before its weight sync has ended.
    """

    def __init__(
        self,
        store: dist.Store,
        transport: Transport,
        *,
        rank: int,
        dtype: torch.dtype,
        patience_s: float,
    ) -> None:
        """dtype: of elements on the wire. patience_s: of a wait for rank 0's next call."""
        self._store, self._transport = store, transport
        self._rank, self._dtype, self._patience_s = rank, dtype, patience_s
        self._calls = 0

    def serve(
        self, prepared: Mapping[int, Ends], plans: Mapping[int, Plan], *, fault: str = ""
    ) -> None:
        """Send what rank 0 calls for until the weight sync is over.

        prepared: by number of layouts, see `outgoing`. plans: likewise. fault: why there is nothing
        to send; rank 0 then calls for no transfer.
        """
        try:
            self._store.set(key("prepared", self._calls, self._rank), fault)
            while not (call := self._next_call()).is_end:
                if call.replicas and (
                    reason := self._send(call, prepared[call.layouts], plans[call.layouts])
                ):
                    self._store.set(key("failed", call.attempt), reason)
        except dist.DistError as error:
            # Rank 0 is gone.
            log.warning("no more calls for a transfer: %s", error)

    def _next_call(self) -> Call:
        self._store.set_timeout(timedelta(seconds=self._patience_s))
        call = msgspec.json.decode(self._store.get(key("go", self._calls)), type=Call)
        self._calls += 1
        return call

    def _send(self, call: Call, ends: Ends, plan: Plan) -> str:
        """This rank's part of a transfer; why it failed."""
        try:
            self._transport.begin(call, plan)
            send(ends, self._transport, dtype=self._dtype, version=call.version)
        except RuntimeError as error:
            # Also torch's DistError of a store, a group or a collective is a RuntimeError. Engine
            # ranks that wait for this one fail when its connections close.
            self._transport.forget(call.replicas)
            return f"trainer rank {self._rank} could not send: {error}"
        return ""


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
        self._stream = SideStream(self._device)
        self._leading: Future[Outcome] | None = None
        """Of the weight sync that runs, on rank 0."""
        self._sending: Future[None] | None = None
        self._names: set[str] = set()
        port, self._leader = 0, None
        if link is not None:
            deadline_s = settings.deadline_s
            master = open_store(settings.host, 0, is_master=True, timeout_s=deadline_s)
            self._leader = Leader(link, master, settings, control.world_size)
            port = master.port
        port = control.share(port, int)
        self.store = open_store(settings.host, port, is_master=False, timeout_s=settings.deadline_s)
        """This rank's connection to the store in which trainer and engine ranks meet."""
        self._remove_files()
        self._transport = open_transport(
            self.store, control.rank, self._device, backend=settings.backend, dtype=settings.dtype,
            folder=settings.folder, syncer=settings.name,
        )  # fmt: skip
        self._sender = Sender(
            self.store,
            self._transport,
            rank=control.rank,
            dtype=settings.dtype,
            # Between two calls rank 0 waits for reports and answers, and calls the roll.
            patience_s=4 * settings.deadline_s + 2 * settings.grace_s,
        )

    def _remove_files(self) -> None:
        """On rank 0: remove the files of all weight syncs."""
        if self._link is not None and self._settings.folder:
            Folder(self._settings.folder).remove_all()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of buffers on this rank."""
        return self._transport.peak_bytes

    def sync(self, members: Mapping[str, Hello], version: int) -> Outcome:
        """Serve all members together."""
        self.begin(members, version)
        return self.end()

    # --- one weight sync ------------------------------------------------------------------------

    def begin(
        self, members: Mapping[str, Hello], version: int, then: Callable[[], None] | None = None
    ) -> None:
        """Start to serve all members. Until `end` the parameters must not change, and no other code
        uses the link.

        then: see `Leader.lead`; called by another thread.
        """
        # First: an impossible plan is impossible on every rank.
        numbers = {name: self._number(hello) for name, hello in members.items()}
        self._names |= members.keys()
        # A pool per weight sync. No daemons: torch 2.13 aborts a process that ends while a thread
        # waits in gloo.
        pool = ThreadPoolExecutor(2, "sync")
        self._stream.begin()
        if self._leader is not None:
            self._leading = pool.submit(self._leader.lead, members, numbers, version, then)
        self._sending = pool.submit(self._send, sorted(set(numbers.values())))
        pool.shutdown(wait=False)

    def _send(self, numbers: Sequence[int]) -> None:
        """Prepare this rank's slices for these layouts, and send them as rank 0 calls."""
        # The leader's thread does nothing on the device.
        self._stream.enter()
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
                    stages_all=self._transport.stages_all,
                )
            synchronize(self._device)
        except RuntimeError as error:
            # torch's error of a device without room for the dequantised tensors.
            fault = f"trainer rank {self._control.rank} could not prepare its slices: {error}"
        self._sender.serve(prepared, plans, fault=fault)

    def is_over(self) -> bool:
        """On rank 0: whether all generators have ended."""
        return self._leading is not None and self._leading.done()

    def end(self) -> Outcome:
        """Wait until all members hold the version or have failed; the parameters may change then.

        Collective.
        """
        leading, self._leading = self._leading, None
        sending, self._sending = self._sending, None
        outcome = leading.result() if leading is not None else Outcome()
        if sending is not None:
            sending.result()
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
                few_senders=self._settings.backend not in (FOLDER, IPC),
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
        self._transport.forget([name])
        if self._leader is not None:
            self._leader.forget(name)

    def close(self) -> None:
        """Leave all groups."""
        # After an error a weight sync may still run, and it uses the link.
        is_free = self._leading is None or self._leading.done()
        for name in sorted(self._names) if self._link is not None and is_free else ():
            if unheard := self._link.tell(name, LeaveGroup()):
                log.info("%s", unheard)
        if self._sending is None or self._sending.done():
            self._transport.close()
            self._remove_files()
