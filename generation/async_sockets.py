"""A DEALER and a ROUTER on an asyncio event loop.

Generators use two DEALERs, the scorer a ROUTER.
"""

from collections.abc import Sequence

import zmq
import zmq.asyncio

from megatron_rl.protocol.endpoints import ANY, Endpoint
from megatron_rl.protocol.frames import Frame
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.types import AnyMessage
from megatron_rl.protocol.wire import (
    HIGH_WATER_MESSAGES,
    DeadlineExceeded,
    Dealer,
    Router,
    WireError,
    check_welcome,
    encode_frames,
)


class AsyncDealer(Dealer):
    """`wire.Dealer` with an awaitable receive."""

    def __init__(
        self, address: str, identity: str, keys: Keys | None = None, *,
        endpoint: Endpoint = ANY, label: str = "",
    ) -> None:  # fmt: skip
        super().__init__(address, identity, keys, endpoint=endpoint, label=label)
        self._awaitable = zmq.asyncio.Socket.shadow(self.socket)

    def send(self, message: AnyMessage) -> None:
        """Queue a message; DeadlineExceeded when the queue to the peer is full.

        WireError when the socket cannot send at all.
        """
        # Not on the plain socket, although sending never waits: libzmq signals an arrived message
        # once, a plain send would swallow that signal, and the event loop would sleep on it.
        frames = encode_frames(message)
        sent = self._awaitable.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        # pyzmq 27 sends at once and returns a future that is done, unless an earlier send waits
        # for room: then this one would wait behind it, and nobody would learn how it ended.
        if not sent.done():
            sent.cancel()
            raise self._full_queue()
        match sent.exception():
            case None:
                return
            case zmq.Again() as error:
                raise self._full_queue() from error
            case zmq.ZMQError() as error:
                name = type(message).__name__
                raise WireError(f"cannot send {name} to {self.address}: {error}") from error
            case error:
                raise error

    def _full_queue(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{HIGH_WATER_MESSAGES} messages wait unsent for {self.address}: is it alive?"
        )

    async def next_message(self, timeout_s: float) -> AnyMessage | None:
        """Next message, or None when nothing came in time. Raises TurnedAway."""
        if not await self._awaitable.poll(max(0, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        frames = [frame.buffer for frame in await self._awaitable.recv_multipart(copy=False)]
        check_welcome(frames, self.address, self.label)
        return self.decode(frames)

    def close(self) -> None:
        """Close the socket and its context."""
        self._awaitable.close(linger=None)
        super().close()


class AsyncRouter(Router):
    """`wire.Router` with an awaitable receive."""

    def __init__(
        self, host: str, port: int, keys: Keys | None = None, *,
        endpoint: Endpoint = ANY, label: str = "",
    ) -> None:  # fmt: skip
        super().__init__(host, port, keys, endpoint=endpoint, label=label)
        self._awaitable = zmq.asyncio.Socket.shadow(self.socket)

    async def next_message(self) -> tuple[str, AnyMessage]:
        """Next (peer, message), whenever it comes. Raises WireError for what is no message."""
        while True:
            arrived = await self._awaitable.recv_multipart(copy=False)
            if (heard := self._hear([frame.buffer for frame in arrived])) is not None:
                return heard

    def _send_now(self, frames: Sequence[Frame]) -> None:
        # By the awaitable socket, for the reason that AsyncDealer.send gives.
        sent = self._awaitable.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        if not sent.done():
            sent.cancel()
            raise zmq.Again
        if (error := sent.exception()) is not None:
            raise error

    def close(self) -> None:
        """Close the socket and its context."""
        if hasattr(self, "_awaitable"):
            self._awaitable.close(linger=None)
        super().close()
