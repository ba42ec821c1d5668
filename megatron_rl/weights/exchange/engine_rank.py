"""An engine rank's part in weight syncs: it takes its parcels, and hands them on.

Runs in every rank of an engine, while the engine is paused: the rank's device does nothing else.
Shared by engines; needs torch and messages alone. The rank reports in the store of trainer rank 0
(`orders.py`), because SGLang passes on neither a loader's result nor its error.
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
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.group_transport import open_transport
from megatron_rl.weights.exchange.orders import Call, Ready, Report, key
from megatron_rl.weights.exchange.parcels import StagedParameters, incoming, receive
from megatron_rl.weights.exchange.plan import Layouts, Plan, Rounds
from megatron_rl.weights.exchange.transport import Transport
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.slices import Slice

log = logging.getLogger(__name__)


class Refused(RuntimeError):
    """This rank cannot take part in a transfer; the text says why."""


@dataclass
class _Syncer:
    """What is kept of the present syncer."""

    name: str
    store: dist.TCPStore
    transport: Transport | None = None
    version: int = -1
    """What arrived last."""
    is_whole: bool = False
    """Whether the parameters hold it: no transfer has failed since."""
    layouts: int = -1
    """Number of the layouts that the plan follows."""
    plan: Plan | None = None
    rounds: Rounds = field(default_factory=list)
    """This rank's part of the plan, which is known to fit the parameters."""
    takes_part: bool = False
    """Whether other ranks count on this one in the present transfer."""


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
            self._give_up(order, report.error)
        self._tell("done", order, report)

    def _give_up(self, order: Receive, reason: str) -> None:
        if self._staged is not None:
            self._staged.drop()
        if self._syncer is None:
            return
        # Rank 0 may still wait for `ready`, and would not look at `done` before.
        self._tell("ready", order, Ready(reason))
        if self._syncer.takes_part:
            self._set(key("failed", order.attempt), f"{order.replica}: {reason}".encode())
        if self._syncer.transport is not None:
            # Ranks that wait for this one fail when its connections close, not at the deadline.
            self._syncer.transport.forget([order.replica])

    def leave(self) -> None:
        """Leave the syncer, if there is one. Ranks that wait for this one fail then.

        The memory of buffers goes back: the next syncer may come much later, or never.
        """
        if self._syncer is not None and self._syncer.transport is not None:
            self._syncer.transport.close()
        self._syncer = None
        if self._staged is not None:
            self._staged.drop()

    def _syncer_of(self, order: Receive) -> _Syncer:
        if self._syncer is None or self._syncer.name != order.syncer:
            self.leave()
            store = open_store(
                order.address, order.port, is_master=False, timeout_s=order.deadline_s
            )
            self._syncer = _Syncer(order.syncer, store)
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
        self._staged = parameters if isinstance(parameters, StagedParameters) else None
        if syncer.transport is None:
            device = next(iter(parameters.values())).device
            syncer.transport = open_transport(
                syncer.store, plan.senders + self._rank, device, backend=order.backend,
                dtype=self._dtype, folder=order.folder,
            )  # fmt: skip
        ends = incoming(
            syncer.rounds, parameters, self._dtype, stages_all=syncer.transport.stages_all
        )
        holds = syncer.version if syncer.is_whole and self._can_add(syncer, parameters) else -1
        self._tell("ready", order, Ready(holds=holds))
        # The store's timeout was set for the first transfer: here it is what is left now.
        syncer.store.set_timeout(timedelta(seconds=max(0.001, ends_at - time.monotonic())))
        call = msgspec.json.decode(syncer.store.get(key("go", order.attempt)), type=Call)
        if order.replica not in call.replicas:
            raise Refused("trainer rank 0 called the transfer off")
        syncer.takes_part, syncer.is_whole = True, False
        syncer.transport.begin(call, plan, replica=order.replica, holds=holds)
        report = receive(
            ends, syncer.transport, dtype=self._dtype, version=order.version, staged=self._staged
        )
        # Also if parcels are damaged: what the parameters hold now is not the older version.
        syncer.version, syncer.is_whole = order.version, not report.damaged
        return report

    def _plan(self, order: Receive, syncer: _Syncer, parameters: dict[str, Tensor]) -> Plan:
        """The plan of the order's layouts; computed, and compared with the parameters, once."""
        if syncer.plan is None or syncer.layouts != order.layouts:
            layouts = msgspec.json.decode(
                syncer.store.get(key("layouts", order.layouts)), type=Layouts
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

    def _tell(self, kind: str, order: Receive, said: Ready | Report) -> None:
        self._set(key(kind, order.attempt, order.replica, self._rank), msgspec.json.encode(said))

    def _set(self, name: str, value: bytes) -> None:
        if self._syncer is None:
            # The store could not be reached: rank 0 gives this engine up at its deadline.
            return
        try:
            self._syncer.store.set(name, value)
        except dist.DistError:
            # The trainer is gone, and with it whoever would have read this.
            log.warning("the exchange's store does not take %s", name)
