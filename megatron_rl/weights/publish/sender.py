"""One trainer rank's sending to one generator, as rank 0 calls for it in the exchange's store.

Runs on the ranks of the copy that serves the generator, in a thread of its own or, over NCCL, in
one that serves all generators of the rank in turn. It uses nothing that another thread uses: store,
group and buffers are its own, and the parameters do not change before its publish has ended.
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
from megatron_rl.weights.exchange.transport import Buffers, Channel
from megatron_rl.weights.publish.settings import (
    ENGINE_MARGIN_S,
    Call,
    ExchangeSettings,
    call_key,
    failed_key,
    prepared_key,
)

log = logging.getLogger(__name__)


class Sender:
    """This rank's end of all transfers to one generator."""

    def __init__(
        self,
        *,
        rank: int,
        port: int,
        settings: ExchangeSettings,
        device: torch.device,
        buffers: Buffers,
    ) -> None:
        """rank: among those of the copy. port: of the exchange's store, on settings.host.

        buffers: no other sender uses them at the same time.
        """
        self._rank, self._port = rank, port
        self._settings, self._device = settings, device
        self._buffers = buffers
        self._channel: Channel | None = None
        self._calls = 0
        self._is_busy = False
        self._is_left = False
        self.peak_bytes = 0
        """Most memory of buffers that this sender has needed."""

    def serve(self, ends: Ends, *, fault: str = "") -> None:
        """Do what rank 0 calls for until the publish to the generator is over.

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

    def _open(self) -> Channel:
        store = open_store(
            self._settings.host,
            self._port,
            is_master=False,
            timeout_s=self._settings.deadline_s,
        )
        self._channel = Channel(store, self._rank, self._buffers)
        return self._channel

    def _next_call(self, channel: Channel) -> Call:
        # Rank 0 waits for all senders and the engine's ranks before it calls, and afterwards until
        # the transfer's deadline.
        patience_s = 3 * self._settings.deadline_s + ENGINE_MARGIN_S
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
                dtype=self._settings.dtype,
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
