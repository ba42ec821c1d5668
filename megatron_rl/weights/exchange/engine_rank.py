"""An engine rank's part in weight syncs: it takes its parcels, and may pass the version on.

Runs in every rank of an engine, while the engine is paused: the rank's device does nothing else and
its parameters stay what they are. Shared by engines; needs torch and messages alone. The rank
reports in the exchange's store, because SGLang passes on neither a loader's result nor its error:

| key | set by | says |
|---|---|---|
| `plan/RANK` | trainer rank 0, before the first transfer | the rank's parcels, round by round |
| `ready/ATTEMPT/RANK` | the rank | "" when it can receive, else why it cannot or failed later |
| `go/ATTEMPT` | trainer rank 0 | "1" when the senders start, "0" when they do not |
| `done/ATTEMPT/RANK` | the rank | a `Report` |

When it passes a version on, the rank is one more `Sender`. Trainer rank 0 leads that transfer as it
leads one from trainer ranks, and a key of the store says what the rank gives.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.protocol.types import PassOn, Receive
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.parcels import Ends, incoming, outgoing, receive
from megatron_rl.weights.exchange.plan import Rounds
from megatron_rl.weights.exchange.sender import Sender
from megatron_rl.weights.exchange.transport import Buffers, Channel, stages_all
from megatron_rl.weights.layout.engine_layout import check_slices
from megatron_rl.weights.layout.slices import Slice

log = logging.getLogger(__name__)


class Report(msgspec.Struct, frozen=True):
    """What one engine rank says of one transfer."""

    error: str = ""
    """Empty when every parcel arrived, damaged or not."""
    damaged: int = 0
    payload_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


class Refused(RuntimeError):
    """This rank cannot take part in a transfer; the text says why."""


@dataclass
class _Link:
    """What is kept between the transfers of one group."""

    channel: Channel
    rounds: Rounds
    is_checked: bool = False
    """Whether the plan is known to fit the parameters."""
    version: int = -1


class Receiver:
    """Exchanges of one engine rank; at most one group at a time."""

    def __init__(
        self,
        parameters: Callable[[], dict[str, Tensor]],
        rank: int,
        dtype: torch.dtype,
        *,
        may_pad_ffn: bool,
        buffers: Buffers | None = None,
    ) -> None:
        """parameters: asked for at each transfer, because an engine may rebind them in between.

        rank: among the engine's ranks. dtype: of elements on the wire. buffers: nobody else uses
        them during a transfer.
        """
        self._parameters = parameters
        self._rank = rank
        self._dtype = dtype
        self._may_pad_ffn = may_pad_ffn
        self._name = ""
        self._link: _Link | None = None
        self._buffers = buffers if buffers is not None else Buffers()

    @property
    def version(self) -> int:
        """What arrived last from the present group; -1: nothing."""
        return self._link.version if self._link is not None else -1

    def take(self, order: Receive) -> Report:
        """Do as the order says, within its deadline; never raises what a peer can cause."""
        rank = order.rank_offset + self._rank
        ends_at = time.monotonic() + order.deadline_s
        try:
            report = self._take(order, self._link_of(order, rank), ends_at)
        except (RuntimeError, ValueError, msgspec.DecodeError) as error:
            # An error that left a loader of SGLang 0.5.23 would end the server.
            log.exception("attempt %d of group %s failed", order.attempt, order.group_name)
            report = Report(error=f"engine rank {self._rank}: {type(error).__name__}: {error}")
        if self._link is not None:
            if report.error:
                # Rank 0 may still wait for `ready`, and would not look at `done` before.
                self._tell(f"ready/{order.attempt}/{rank}", report.error.encode())
            self._tell(f"done/{order.attempt}/{rank}", msgspec.json.encode(report))
        if report.error:
            # Senders that wait for this rank fail when its connections close, not at the deadline.
            self.leave()
        return report

    def leave(self) -> None:
        """Leave the group, if there is one. Senders that wait for this rank fail then."""
        if self._link is not None:
            self._link.channel.close()
        self._link, self._name = None, ""
        # Their memory goes back: the next syncer may come much later, or never.
        self._buffers.drop()

    def _link_of(self, order: Receive, rank: int) -> _Link:
        if self._link is None or self._name != order.group_name:
            self.leave()
            store = open_store(
                order.address, order.port, is_master=False, timeout_s=order.deadline_s
            )
            self._link, self._name = (
                _Link(Channel(store, rank, self._buffers), []),
                order.group_name,
            )
            # The plan of a group never changes: it is read once, and checked once.
            self._link.rounds = msgspec.json.decode(store.get(f"plan/{rank}"), type=Rounds)
        return self._link

    def _take(self, order: Receive, link: _Link, ends_at: float) -> Report:
        """ends_at: monotonic time."""
        parameters = self._parameters()
        # All that can be refused comes before `ready`: from `go` on parameters are overwritten.
        self._check(order, link, parameters)
        ends = incoming(link.rounds, parameters, self._dtype, stages_all=stages_all(order.backend))
        store = link.channel.store
        self._tell(f"ready/{order.attempt}/{link.channel.rank}", b"")
        # The store's timeout was set for the group's first transfer: here it is what is left now.
        store.set_timeout(timedelta(seconds=max(0.0, ends_at - time.monotonic())))
        if store.get(f"go/{order.attempt}") != b"1":
            raise Refused("trainer rank 0 called the transfer off")
        device = next(iter(parameters.values())).device
        result = receive(
            ends,
            link.channel.open(order, device, ends_at),
            dtype=self._dtype,
            version=order.version,
            ends_at=ends_at,
        )
        # Also if parcels are damaged: what the parameters hold now is not the older version.
        link.version = order.version
        return Report(
            "", result.damaged, result.payload_bytes, result.peak_bytes, result.seconds
        )  # fmt: skip

    def _check(self, order: Receive, link: _Link, parameters: dict[str, Tensor]) -> None:
        if order.version < link.version:
            raise Refused(
                f"version {order.version} would replace {link.version}: it never goes back"
            )
        if not link.is_checked:
            moves = [move for each in link.rounds for parcel in each for move in parcel.moves]
            slices = [
                Slice("", 0, 0, m.rows, m.columns, m.target, m.target_row, m.target_column)
                for m in moves
            ]
            check_slices(slices, parameters, may_pad_ffn=self._may_pad_ffn)
            link.is_checked = True

    def _tell(self, key: str, value: bytes) -> None:
        assert self._link is not None
        try:
            self._link.channel.store.set(key, value)
        except dist.DistError:
            # The trainer is gone, and with it whoever would have read this.
            log.warning("the exchange's store does not take %s", key)


class Relay:
    """What one engine rank passes on, to one engine after the other."""

    def __init__(
        self,
        parameters: Callable[[], dict[str, Tensor]],
        rank: int,
        dtype: torch.dtype,
        buffers: Buffers,
    ) -> None:
        """rank: among the engine's. dtype: of elements on the wire. buffers: nobody else uses them
        during a transfer."""
        self._parameters, self._rank, self._dtype = parameters, rank, dtype
        self._buffers = buffers
        self._senders: dict[str, Sender] = {}
        """By group."""

    def pass_on(self, order: PassOn, held: int) -> None:
        """Send until rank 0 says that it is over; never raises what a peer can cause.

        held: version of the parameters.
        """
        for name in self._senders.keys() - {order.group_name, *order.kept}:
            self._senders.pop(name).close()
        parameters = self._parameters()
        if order.group_name not in self._senders:
            self._senders[order.group_name] = Sender(
                rank=self._rank,
                address=order.address,
                port=order.port,
                deadline_s=order.deadline_s,
                dtype=self._dtype,
                device=next(iter(parameters.values())).device,
                buffers=self._buffers,
            )
        sender = self._senders[order.group_name]
        ends: Ends = []
        fault = f"it holds version {held}, not {order.version}" if held != order.version else ""
        try:
            if not fault:
                ends = outgoing(sender.given(), parameters, self._dtype)
        except (RuntimeError, KeyError, msgspec.DecodeError) as error:
            # Also of a store that is gone; what leaves a loader of SGLang 0.5.23 ends the server.
            log.exception("cannot pass version %d on", order.version)
            fault = f"engine rank {self._rank}: {type(error).__name__}: {error}"
        sender.serve(ends, fault=fault)

    def leave(self) -> None:
        """Leave all groups."""
        while self._senders:
            self._senders.popitem()[1].close()


class EngineRank:
    """The exchanges of one rank of an engine, one after the other."""

    def __init__(
        self,
        parameters: Callable[[], dict[str, Tensor]],
        rank: int,
        dtype: torch.dtype,
        *,
        may_pad_ffn: bool,
    ) -> None:
        """The arguments are those of `Receiver`."""
        buffers = Buffers()
        self._receiver = Receiver(parameters, rank, dtype, may_pad_ffn=may_pad_ffn, buffers=buffers)
        self._relay = Relay(parameters, rank, dtype, buffers)

    def obey(self, order: Receive | PassOn) -> None:
        """Take or pass on. What went wrong stands in the exchange's store; it is never raised."""
        match order:
            case Receive():
                self._receiver.take(order)
            case PassOn():
                self._relay.pass_on(order, self._receiver.version)

    def leave(self) -> None:
        """Leave all groups; peers that wait for this rank fail then."""
        self._relay.leave()
        self._receiver.leave()
