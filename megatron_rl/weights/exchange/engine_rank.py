"""An engine rank's part in weight syncs: it takes its parcels, and hands them on.

Runs in every rank of an engine, while the engine is paused: the rank's device does nothing else.
Shared by engines; needs torch and messages alone. The rank reports in the store of trainer rank 0,
because SGLang passes on neither a loader's result nor its error:

| key | set by | says |
|---|---|---|
| `layouts/N` | trainer rank 0 | `Layouts`, from which the rank computes its plan |
| `ready/ATTEMPT/REPLICA/RANK` | the rank | `Ready`: whether it can receive, and what it holds |
| `go/ATTEMPT` | trainer rank 0 | a `Round`: who takes part |
| `done/ATTEMPT/REPLICA/RANK` | the rank | a `Report` |
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.folder_transport import FolderEnd, FolderTransport
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.lanes import Lanes
from megatron_rl.weights.exchange.layouts import Layouts
from megatron_rl.weights.exchange.parcels import incoming, receive
from megatron_rl.weights.exchange.plan import Plan, Rounds
from megatron_rl.weights.exchange.sender import failed_key, go_key
from megatron_rl.weights.exchange.shared_transport import done_key
from megatron_rl.weights.exchange.staged import StagedParameters, StagedRounds
from megatron_rl.weights.exchange.transport import (
    FOLDER,
    Buffers,
    Round,
    Transport,
    stages_all,
)
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.slices import Slice

log = logging.getLogger(__name__)


def layouts_key(number: int) -> str:
    """See the module's table."""
    return f"layouts/{number}"


def ready_key(attempt: int, replica: str, rank: int) -> str:
    """See the module's table. rank: among the engine's."""
    return f"ready/{attempt}/{replica}/{rank}"


class Ready(msgspec.Struct, frozen=True):
    """What one engine rank says before a transfer."""

    error: str = ""
    """Why it cannot receive; empty: it can."""
    holds: int = -1
    """Version that its parameters hold bit for bit; -1: none, or not in the type on the wire."""


class Report(msgspec.Struct, frozen=True):
    """What one engine rank says of one transfer."""

    error: str = ""
    """Empty when every parcel arrived, damaged or not."""
    damaged: int = 0
    payload_bytes: int = 0
    """That arrived; with FOLDER, of the files."""
    peak_bytes: int = 0
    seconds: float = 0.0


class Refused(RuntimeError):
    """This rank cannot take part in a transfer; the text says why."""


@dataclass
class _Syncer:
    """What is kept of the present syncer."""

    name: str
    store: dist.TCPStore
    version: int = -1
    """What arrived last."""
    is_whole: bool = False
    """Whether the parameters hold it: no transfer has failed since."""
    folder: FolderEnd | None = None
    layouts: int = -1
    """Number of the layouts that the plan follows."""
    plan: Plan | None = None
    rounds: Rounds = field(default_factory=list)
    """This rank's part of the plan, which is known to fit the parameters."""
    group: str = ""
    lanes: Lanes | None = None
    takes_part: bool = False
    """Whether other ranks count on this one in the present transfer."""

    def leave_group(self) -> None:
        """Peers that wait for this rank fail then."""
        if self.lanes is not None:
            self.lanes.close()
        self.group, self.lanes = "", None


class EngineRank:
    """Exchanges of one engine rank, with one syncer at a time."""

    def __init__(
        self,
        parameters: Callable[[], dict[str, Tensor]],
        rank: int,
        dtype: torch.dtype,
        *,
        may_pad_ffn: bool,
    ) -> None:
        """parameters: asked for at each transfer, because an engine may rebind them in between.

        rank: among the engine's ranks. dtype: of elements on the wire.
        """
        self._parameters, self._rank, self._dtype = parameters, rank, dtype
        self._may_pad_ffn = may_pad_ffn
        self._syncer: _Syncer | None = None
        self._buffers = Buffers()
        self._staged: StagedParameters | None = None

    def take(self, order: Receive) -> None:
        """Do as the order says, within its deadline; never raises what a peer can cause.

        What went wrong stands in the store.
        """
        ends_at = time.monotonic() + order.deadline_s
        try:
            report = self._take(order, self._syncer_of(order), ends_at)
        except (RuntimeError, ValueError, msgspec.DecodeError) as error:
            # An error that left a loader of SGLang 0.5.23 would end the server.
            log.exception("attempt %d of %s failed", order.attempt, order.syncer)
            report = Report(error=f"engine rank {self._rank}: {type(error).__name__}: {error}")
        if report.error and self._syncer is not None:
            # Rank 0 may still wait for `ready`, and would not look at `done` before.
            self._say_ready(order, Ready(report.error))
            if self._syncer.takes_part:
                text = f"{order.replica}: {report.error}".encode()
                self._tell(failed_key(order.attempt), text)
            # Ranks that wait for this one fail when its connections close, not at the deadline.
            self._syncer.leave_group()
        if report.error and self._staged is not None:
            self._staged.drop()
        done = done_key(order.attempt, order.replica, self._rank)
        self._tell(done, msgspec.json.encode(report))

    def leave(self) -> None:
        """Leave the syncer, if there is one. Ranks that wait for this one fail then."""
        if self._syncer is not None:
            self._syncer.leave_group()
            if self._syncer.folder is not None:
                self._syncer.folder.clear()
        self._syncer = None
        # Their memory goes back: the next syncer may come much later, or never.
        self._buffers.drop()
        if self._staged is not None:
            self._staged.drop()

    def _syncer_of(self, order: Receive) -> _Syncer:
        if self._syncer is None or self._syncer.name != order.syncer:
            self.leave()
            store = open_store(
                order.address, order.port, is_master=False, timeout_s=order.deadline_s
            )
            self._syncer = _Syncer(order.syncer, store)
            if order.backend == FOLDER:
                self._syncer.folder = FolderEnd(Folder(order.folder), store, self._dtype)
        return self._syncer

    def _take(self, order: Receive, syncer: _Syncer, ends_at: float) -> Report:
        """ends_at: monotonic time."""
        syncer.takes_part = False
        parameters = self._parameters()
        # All that can be refused comes before `ready`: from `go` on parameters are overwritten.
        if order.version < syncer.version:
            raise Refused(
                f"version {order.version} would replace {syncer.version}: it never goes back"
            )
        plan = self._plan(order, syncer, parameters)
        stages = stages_all(order.backend)
        staged = None
        if isinstance(parameters, StagedParameters):
            self._staged = parameters
            staged = StagedRounds(syncer.rounds, parameters, self._dtype, stages_all=stages)
        ends = staged or incoming(syncer.rounds, parameters, self._dtype, stages_all=stages)
        holds = syncer.version if syncer.is_whole and self._can_add(syncer, parameters) else -1
        self._say_ready(order, Ready(holds=holds))
        # The store's timeout was set for the first transfer: here it is what is left now.
        syncer.store.set_timeout(timedelta(seconds=max(0.001, ends_at - time.monotonic())))
        round_ = msgspec.json.decode(syncer.store.get(go_key(order.attempt)), type=Round)
        if order.replica not in round_.replicas:
            raise Refused("trainer rank 0 called the transfer off")
        syncer.takes_part, syncer.is_whole = True, False
        patience = round_.patience()
        device = next(iter(parameters.values())).device
        if syncer.folder is not None:
            transport: Transport = syncer.folder.open(
                round_, plan.senders + self._rank, device, self._buffers, holds=holds
            )
        else:
            lanes = self._lanes(round_, syncer, plan)
            transport = lanes.open(round_, order.backend, device, patience, order.replica)
        result = receive(
            ends, transport, dtype=self._dtype, version=order.version, patience=patience
        )
        peak_bytes = result.peak_bytes + (staged.finish() if staged is not None else 0)
        # Also if parcels are damaged: what the parameters hold now is not the older version.
        syncer.version, syncer.is_whole = order.version, not result.damaged
        is_file = isinstance(transport, FolderTransport)
        nbytes = transport.file_bytes if is_file else result.payload_bytes
        return Report("", result.damaged, nbytes, peak_bytes, result.seconds)

    def _plan(self, order: Receive, syncer: _Syncer, parameters: dict[str, Tensor]) -> Plan:
        """The plan of the order's layouts; computed, and compared with the parameters, once."""
        if syncer.plan is None or syncer.layouts != order.layouts:
            layouts = msgspec.json.decode(
                syncer.store.get(layouts_key(order.layouts)), type=Layouts
            )
            plan = layouts.plan()
            rounds = plan.of_receiver(layouts.trainer_ranks + self._rank)
            moves = [move for each in rounds for parcel in each for move in parcel.moves]
            slices = [
                Slice("", 0, 0, m.rows, m.columns, m.target, m.target_row, m.target_column)
                for m in moves
            ]
            trained = layouts.kind.trained(layouts.shape, self._rank, parameters)
            check_slices(slices, trained, may_pad_ffn=self._may_pad_ffn)
            syncer.plan, syncer.rounds, syncer.layouts = plan, rounds, order.layouts
        return syncer.plan

    def _can_add(self, syncer: _Syncer, parameters: dict[str, Tensor]) -> bool:
        """Whether parameters have the bits that were sent, to which a difference may be added."""
        moves = (move for each in syncer.rounds for parcel in each for move in parcel.moves)
        return not isinstance(parameters, StagedParameters) and all(
            parameters[name].dtype == self._dtype for name in {move.target for move in moves}
        )

    def _say_ready(self, order: Receive, ready: Ready) -> None:
        key = ready_key(order.attempt, order.replica, self._rank)
        self._tell(key, msgspec.json.encode(ready))

    def _lanes(self, order: Round, syncer: _Syncer, plan: Plan) -> Lanes:
        if syncer.lanes is None or syncer.group != order.group:
            syncer.leave_group()
            rank = plan.senders + self._rank
            syncer.group = order.group
            syncer.lanes = Lanes(syncer.store, plan, rank, self._buffers)
        return syncer.lanes

    def _tell(self, key: str, value: bytes) -> None:
        if self._syncer is None:
            # The store could not be reached: rank 0 gives this engine up at its deadline.
            return
        try:
            self._syncer.store.set(key, value)
        except dist.DistError:
            # The trainer is gone, and with it whoever would have read this.
            log.warning("the exchange's store does not take %s", key)
