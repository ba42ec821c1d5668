"""Passing on: an engine rank sends the version that it has just taken to another engine's ranks.

Runs in every rank of an engine while the engine is paused, so that the rank's device does nothing
else and its parameters stay what they are. The rank is one more `Sender`: rank 0 of the trainer
leads the transfer as it does one from trainer ranks, and tells the rank what it gives by a key of
the exchange's store, as it tells a receiver what it takes.
"""

import logging
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from megatron_rl.protocol.types import PassOn
from megatron_rl.weights.exchange.parcels import Ends, outgoing
from megatron_rl.weights.exchange.sender import Sender
from megatron_rl.weights.exchange.transport import Buffers

log = logging.getLogger(__name__)


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
