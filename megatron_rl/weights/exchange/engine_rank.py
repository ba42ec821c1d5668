"""An engine rank's part in weight syncs: it takes slices, and may pass them on.

Shared by engines, which call it while they are paused; needs torch and messages alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.protocol.types import PassOn, Receive
from megatron_rl.weights.exchange.receiver import Receiver
from megatron_rl.weights.exchange.relay import Relay
from megatron_rl.weights.exchange.transport import Buffers


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
