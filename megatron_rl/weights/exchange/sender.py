"""One rank's sending to one generator, as trainer rank 0 calls for it in the exchange's store.

Runs on the trainer ranks of the copy that serves the generator: in one thread per generator or,
over NCCL, in one thread for all generators. Also runs in the ranks of an engine that passes weights
on (`engine_rank.py`). No other thread uses its store, group or buffers, and the parameters
do not change before its weight sync has ended.
"""

import logging
import time
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.parcels import Ends, send
from megatron_rl.weights.exchange.plan import Rounds
from megatron_rl.weights.exchange.transport import Buffers, Channel

ENGINE_MARGIN_S = 2.0
"""The senders' deadline ends so much later than the receivers': a receiver that is late then has
time to report why, and its error says more than a sender's."""


class Call(msgspec.Struct, frozen=True):
    """What rank 0 tells the senders of one generator."""

    receive: Receive | None = None
    """The transfer that begins; None: the weight sync to this generator is over."""
    left_s: float = 0.0
    """Until the transfer's deadline."""


def prepared_key(call: int, rank: int) -> str:
    """Set by a sender to "" when it can begin, else to why not.

    call: number of the call that it waits for.
    """
    return f"prepared/{call}/{rank}"


def call_key(call: int) -> str:
    """Set by rank 0 to a `Call`."""
    return f"call/{call}"


def failed_key(attempt: int) -> str:
    """Set by a sender that could not send, to the reason."""
    return f"failed/{attempt}"


def gives_key(rank: int) -> str:
    """Set by rank 0 to the parcels that a sender gives, round by round, where it is an engine's."""
    return f"gives/{rank}"


log = logging.getLogger(__name__)


class Sender:
    """This rank's end of all transfers to one generator."""

    def __init__(
        self,
        *,
        rank: int,
        address: str,
        port: int,
        deadline_s: float,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
    ) -> None:
        """rank: among those that send. address, port: of the exchange's store.

        deadline_s: of a transfer. dtype: of elements on the wire. buffers: no other sender uses
        them at the same time.
        """
        self._rank = rank
        self._address, self._port, self._deadline_s = address, port, deadline_s
        self._dtype, self._device = dtype, device
        self._buffers = buffers
        self._channel: Channel | None = None
        self._given: Rounds | None = None
        self._calls = 0
        self._is_busy = False
        self._is_left = False
        self.peak_bytes = 0
        """Most memory of buffers that this sender has needed."""

    def serve(self, ends: Ends, *, fault: str = "") -> None:
        """Do what rank 0 calls for until the weight sync to the generator is over.

        ends: see `outgoing`; of this sender alone. fault: why there is nothing to send; rank 0 then
        calls for no transfer.
        """
        self._is_busy = True
        try:
            channel = self._channel or self._open()
            channel.store.set(prepared_key(self._calls, self._rank), fault)
            while (call := self._next_call(channel)).receive is not None:
                ends_at = time.monotonic() + call.left_s
                if reason := self._send(channel, call.receive, ends, ends_at):
                    channel.store.set(failed_key(call.receive.attempt), reason)
        except dist.DistError as error:
            # Rank 0 has closed the store because it dropped the generator, or is gone itself.
            log.warning("no more calls for a transfer: %s", error)
        finally:
            self._is_busy = False
            if self._is_left:
                self.close()

    def given(self) -> Rounds:
        """What the plan has this rank send, where rank 0 says so: to an engine's rank.

        Raises RuntimeError (torch's own) when the store is gone.
        """
        if self._given is None:
            channel = self._channel or self._open()
            found = channel.store.get(gives_key(self._rank))
            # The plan of a group never changes.
            self._given = msgspec.json.decode(found, type=Rounds)
        return self._given

    def _open(self) -> Channel:
        store = open_store(self._address, self._port, is_master=False, timeout_s=self._deadline_s)
        self._channel = Channel(store, self._rank, self._buffers)
        return self._channel

    def _next_call(self, channel: Channel) -> Call:
        # Rank 0 waits for all senders and the engine's ranks before it calls, and afterwards until
        # the transfer's deadline.
        patience_s = 3 * self._deadline_s + ENGINE_MARGIN_S
        channel.store.set_timeout(timedelta(seconds=patience_s))
        call = msgspec.json.decode(channel.store.get(call_key(self._calls)), type=Call)
        self._calls += 1
        return call

    def _send(self, channel: Channel, receive: Receive, ends: Ends, ends_at: float) -> str:
        """This rank's part of a transfer; why it failed."""
        try:
            peak_bytes = send(
                ends,
                channel.open(receive, self._device, ends_at),
                dtype=self._dtype,
                version=receive.version,
                ends_at=ends_at,
            )
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        except RuntimeError as error:
            # Also torch's DistError of a store, a group or a collective is a RuntimeError.
            return f"sending failed: {error}"
        return ""

    def close(self) -> None:
        """Leave the group; a transfer that still runs does so at its end."""
        self._is_left = True
        if not self._is_busy and self._channel is not None:
            self._channel.close()
            self._channel = None
