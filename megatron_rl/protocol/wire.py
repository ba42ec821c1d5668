"""ROUTER and DEALER sockets that carry `types.AnyMessage`.

Used by every process. One frame a message: msgpack, with arrays as raw little-endian buffers.
Nothing is pickled. Sockets bind to loopback unless CURVE keys are configured. Every receive has a
deadline; every send fails at a full queue instead of blocking.
"""

import functools
import time
from typing import Any

import msgspec
import numpy as np
import zmq

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.types import AnyMessage

HIGH_WATER_MESSAGES = 20_000
_ARRAY_DTYPES = {"h": np.dtype("<i2"), "i": np.dtype("<i4"), "f": np.dtype("<f4")}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class WireError(RuntimeError):
    """A peer sent something that is no message, or a socket could not be used."""

    peer = ""
    """Who sent it, where that is known."""


class DeadlineExceeded(TimeoutError):
    """A peer did not answer in time."""


def _encode_array(obj: Any) -> Any:
    if isinstance(obj, np.ndarray) and obj.ndim == 1 and obj.dtype.kind in "if":
        code = "h" if obj.dtype == np.int16 else obj.dtype.kind
        array = np.ascontiguousarray(obj, dtype=_ARRAY_DTYPES[code])
        # A view of its bytes: the encoder copies them into the frame, and nothing else need.
        return (code, array.data.cast("B") if array.size else b"")
    raise NotImplementedError(f"cannot send {type(obj).__name__}: {obj!r:.80}")


def _decode_array(kind: type, obj: Any) -> Any:
    if kind is np.ndarray:
        code, buffer = obj
        return np.frombuffer(buffer, dtype=_ARRAY_DTYPES[code])
    raise NotImplementedError(f"cannot receive {kind.__name__}")


def encode(message: Any) -> bytes:
    """Frame of a message. int16 arrays stay such, other integers become int32, floats float32."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    # Making one costs more than decoding a small message.
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def decode(frame: bytes, kind: Any = AnyMessage) -> Any:
    """Message of a frame; WireError when it is none."""
    try:
        return _decoder(kind).decode(frame)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise WireError(
            f"received a frame of {len(frame)} bytes that is no message: {error}"
        ) from error


def check_loopback(host: str) -> None:
    """Raise WireError for a bind address that other hosts could reach without keys."""
    if host not in LOOPBACK:
        raise WireError(
            f"refusing to bind {host} without CURVE keys: use 127.0.0.1, or have `megatron-rl "
            "prepare` make keys (ports.keys_dir) before opening a socket to other hosts"
        )


class Router(Closing):
    """A bound ROUTER: many peers, each known by the identity that its DEALER chose."""

    def __init__(self, host: str, port: int, keys: Keys | None = None) -> None:
        if keys is None:
            check_loopback(host)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 2_000)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A restarted peer takes over the identity of its dead predecessor.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        try:
            self.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise WireError(
                f"cannot listen on {host}:{port}: {error}. Another run may be using the port; "
                "stop it or choose other ports"
            ) from error

    def send(self, peer: str, message: AnyMessage) -> bool:
        """Queue a message for a peer; False when that peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([peer.encode(), encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self, timeout_s: float) -> tuple[str, AnyMessage] | None:
        """Next (peer, message), or None when nothing came in time."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        identity, *frames = self.socket.recv_multipart()
        peer = identity.decode(errors="replace")
        try:
            if len(frames) != 1:
                raise WireError(f"received {len(frames)} frames from {peer}, expected 1")
            return peer, decode(frames[0])
        except WireError as error:
            error.peer = peer
            raise

    def close(self) -> None:
        """Close the socket and its context."""
        self.socket.close()
        self._context.term()


class Dealer(Closing):
    """A connected DEALER with a stable identity."""

    def __init__(self, address: str, identity: str, keys: Keys | None = None) -> None:
        self.address = address
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.LINGER, 2_000)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if keys is not None:
            public, secret = zmq.curve_keypair()
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        self.socket.connect(f"tcp://{address}")

    def send(self, message: AnyMessage) -> None:
        """Queue a message; DeadlineExceeded when the queue to the peer is full."""
        try:
            self.socket.send(encode(message), flags=zmq.DONTWAIT)
        except zmq.Again as error:
            raise DeadlineExceeded(
                f"{HIGH_WATER_MESSAGES} messages wait unsent for {self.address}: is it alive?"
            ) from error

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """Next message, or None when nothing came in time."""
        frame = self.receive_frame(timeout_s)
        return None if frame is None else decode(frame)

    def receive_frame(self, timeout_s: float) -> bytes | None:
        """Next message as it came, for who passes it on; None when nothing came in time."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return self.socket.recv()

    def request(self, message: AnyMessage, timeout_s: float) -> AnyMessage:
        """Send a message and return the next one that arrives; DeadlineExceeded after timeout_s."""
        self.send(message)
        deadline = time.monotonic() + timeout_s
        answer = self.receive(deadline - time.monotonic())
        if answer is None:
            raise DeadlineExceeded(
                f"no answer from {self.address} to {type(message).__name__} in {timeout_s:.0f} s"
            )
        return answer

    def close(self) -> None:
        """Close the socket and its context."""
        self.socket.close()
        self._context.term()
