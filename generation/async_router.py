"""A ROUTER on an asyncio event loop.

Used by the scorer process.
"""

import zmq
import zmq.asyncio

from megatron_rl.protocol.endpoints import ANY, Endpoint
from megatron_rl.protocol.frames import Frame
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.types import AnyMessage
from megatron_rl.protocol.wire import Router


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

    def _send_now(self, frames: list[Frame]) -> None:
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
