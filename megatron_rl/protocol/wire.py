"""ROUTER and DEALER sockets for the messages of an endpoint (`endpoints.py`).

Used by every process. `frames.py` encodes messages. Sockets bind to loopback unless CURVE keys are
configured. Every receive has a deadline; a send to a full queue fails instead of blocking.

The label (`expert.ports.label`) names a phase of one start of a run, and is part of the DEALER's
identity. A ROUTER rejects DEALERs with another label, so a process left over from another phase
cannot take the place of a peer with the same name.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.endpoints import ANY, Endpoint, names_of
from megatron_rl.protocol.frames import Frame, WireError, decode_frames, encode_frames
from megatron_rl.protocol.frames import decode as decode
from megatron_rl.protocol.frames import encode as encode
from megatron_rl.protocol.frames import join_frames as join_frames
from megatron_rl.protocol.frames import split_frames as split_frames
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.types import AnyMessage

HIGH_WATER_MESSAGES = 20_000
MOST_FRAME_BYTES = 2 << 30
"""Size of a frame from which on ZeroMQ disconnects its sender, before memory is allocated."""
MAX_REFUSED = 100
"""A ROUTER turns a peer away after each so many refused messages: it speaks another protocol."""
LOOPBACK = ("127.0.0.1", "localhost")
_LABEL_MARK = "@"
_TURNED_AWAY = b"\xc1"
"""The first of two frames. The second tells a peer with the label why; it is empty for a stranger,
which does not learn the label. msgpack never uses this byte, so no message begins with it."""
_UNNAMED = b"\0"
"""ZeroMQ itself names such connections."""
_TURNED_AWAY_NAMES = 1_000
"""Maximum number of peers that are counted by name; others count as OTHERS."""
OTHERS = "(others)"
# Arithmetic with pyzmq's own flags, and its `send_multipart`, take longer than a send.
_DONTWAIT, _SEND_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_HEARTBEAT_MS = 15_000
_SILENCE_MS = 120_000
"""After this long without any byte or heartbeat of the other end, ZeroMQ reconnects. A process that
is stopped for a minute keeps its connection."""
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 15,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
_HEARTBEATS = {
    zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: _SILENCE_MS,
    zmq.HEARTBEAT_TTL: _SILENCE_MS,
}
"""Options that detect half-open connections. Only DEALERs send heartbeats, and a ROUTER answers:
libzmq 4.3.5 aborts the process when a ROUTER sends one over a connection that its peer has replaced
(ROUTER_HANDOVER) and that then breaks (stream_engine_base.cpp:310)."""

log = logging.getLogger(__name__)


class DeadlineExceeded(TimeoutError):
    """A peer did not answer in time."""


class TurnedAway(WireError):
    """The peer belongs to another phase or start of the run."""


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that closes its only socket when both are garbage.

    pyzmq's weak references to sockets are dead by then, so its `destroy` would hang on the open
    socket.
    """

    _own: zmq.Socket[bytes] | None = None

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """The socket."""
        self._own = self.socket(kind)
        self._own.setsockopt(zmq.LINGER, 2_000)
        self._own.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self._own.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        self._own.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        options = {**_KEEPALIVE, **(_HEARTBEATS if kind == zmq.DEALER else {})}
        for option, value in options.items():
            self._own.setsockopt(option, value)
        return self._own

    def destroy(self, linger: int | None = None) -> None:
        if self._own is not None:
            self._own.close(linger)
        super().destroy(linger)


def _decode(frames: list[Frame], endpoint: Endpoint, kinds: Any) -> Any:
    """The message of these frames. Raises WireError, with the endpoint and its message types."""
    try:
        return decode_frames(frames, kinds)
    except WireError as error:
        if endpoint is ANY:
            raise
        raise WireError(
            f"{endpoint.name} endpoint: {error}; allowed are {', '.join(names_of(kinds))}"
        ) from error


def receive_now(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    """Frames of the next message, as views of the receive buffers; None: nothing waits."""
    try:
        frame = socket.recv(_DONTWAIT, copy=False)
    except zmq.Again:
        return None
    frames: list[Frame] = [frame.buffer]
    while frame.more:
        frame = socket.recv(_DONTWAIT, copy=False)
        frames.append(frame.buffer)
    return frames


def send_now(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send without waiting. Raises zmq.ZMQError."""
    *firsts, last = frames
    for frame in firsts:
        socket.send(frame, _SEND_MORE, copy=False)
    socket.send(last, _DONTWAIT, copy=False)


def check_welcome(frames: list[Frame], address: str, label: str) -> None:
    """Raise TurnedAway if a ROUTER with another label answered.

    Raise WireError if it refused MAX_REFUSED messages of this process.
    """
    if len(frames) == 2 and bytes(frames[0]) == _TURNED_AWAY:
        if why := bytes(frames[1]).decode(errors="replace"):
            raise WireError(f"{address} turns this process away: {why}")
        raise TurnedAway(
            f"{address} does not serve this process{_of_phase(label)}: their labels differ "
            "(expert.ports.label). This process is left over from an earlier phase or job, or two "
            "runs share a port; end it, or choose other ports"
        )


def _of_phase(label: str) -> str:
    """` of phase NAME` of a label, or "". The part before the name is secret: never log it."""
    name = label.partition(".")[2]
    return f" of phase {name}" if name else ""


def check_loopback(host: str) -> None:
    """Raise WireError for a bind address that other nodes could reach without keys."""
    if host not in LOOPBACK:
        raise WireError(
            f"refusing to bind {host} without CURVE keys: use 127.0.0.1, or have `megatron-rl "
            "prepare` make keys (ports.keys_dir) before opening a socket to other nodes"
        )


def labelled(name: str, label: str) -> bytes:
    """The identity of a peer on the wire."""
    return (f"{name}{_LABEL_MARK}{label}" if label else name).encode()


def _counted(name: str, counts: Counter[str]) -> str:
    """The name under which a peer is counted, so that a counter stays small."""
    return name if name in counts or len(counts) < _TURNED_AWAY_NAMES else OTHERS


class Router(Closing):
    """A bound ROUTER with many peers, known by the identities of their DEALERs."""

    def __init__(
        self, host: str, port: int, keys: Keys | None = None, *,
        endpoint: Endpoint = ANY, label: str = "",
    ) -> None:  # fmt: skip
        """label: peers with another label are turned away."""
        if keys is None:
            check_loopback(host)
        self._endpoint, self._label = endpoint, label
        self.turned_away: Counter[str] = Counter()
        """Number of rejected messages by sender."""
        self.refused: Counter[str] = Counter()
        """Number of messages by sender that make no sense."""
        self.frames: list[Frame] = []
        """Frames of the latest received message."""
        self._context = _Context()
        self.socket = self._context.open(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A restarted peer takes over the identity of the dead process.
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
        """Queue a message for a peer; False if the peer is gone or its queue is full."""
        try:
            self._send_now([labelled(peer, self._label), *encode_frames(message)])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _send_now(self, frames: Sequence[Frame]) -> None:
        """As `send_now`; an event loop has another way."""
        send_now(self.socket, frames)

    def receive(self, timeout_s: float) -> tuple[str, AnyMessage] | None:
        """Next (peer, message), or None when nothing came in time."""
        until = time.monotonic() + timeout_s
        while True:
            arrived = receive_now(self.socket)
            if arrived is not None and (heard := self._hear(arrived)) is not None:
                return heard
            # Strangers that send all the time must not keep the caller here.
            if (left_s := until - time.monotonic()) <= 0:
                return None
            if arrived is None:
                self.socket.poll(int(left_s * 1000))

    def _hear(self, arrived: list[Frame]) -> tuple[str, AnyMessage] | None:
        """(peer, message) of a received message; None if it is turned away."""
        identity, *self.frames = arrived
        name = bytes(identity).decode(errors="replace")
        peer, _, label = name.partition(_LABEL_MARK)
        # Names come into logs and metrics, so they must not hold control characters.
        if label != self._label or not name.isprintable():
            self._turn_away(bytes(identity))
            return None
        try:
            return peer, _decode(self.frames, self._endpoint, self._endpoint.router_hears)
        except WireError as error:
            error.peer = peer
            raise

    def _turn_away(self, identity: bytes) -> None:
        name = identity.decode(errors="replace")
        name = _counted(name if name.isprintable() else ascii(name), self.turned_away)
        if name not in self.turned_away:
            peer, _, label = name.partition(_LABEL_MARK)
            why = "it is a stranger, or its peer has connected anew"
            if not identity.startswith(_UNNAMED):
                why = "it has another label (expert.ports.label) than this process"
                why += _of_phase(self._label)
            log.warning("%s%s is turned away: %s", peer, _of_phase(label), why)
        self.turned_away[name] += 1
        self._dismiss(identity, "")

    def refuse(self, peer: str, error: WireError) -> None:
        """Count and log a message that makes no sense; at each MAX_REFUSED turn its sender away.

        Its process ends, and the rules for restarts decide about another one.
        """
        name = _counted(peer, self.refused)
        self.refused[name] += 1
        count = self.refused[name]
        is_limit = count % MAX_REFUSED == 0
        if count < MAX_REFUSED or is_limit:
            log.error("message %d of %s is refused: %s", count, peer, error)
        if is_limit and name != OTHERS:
            why = f"{count} of its messages were refused, the last one: {error}. Do all processes "
            self._dismiss(labelled(peer, self._label), f"{why}run the same release?")

    def _dismiss(self, identity: bytes, why: str) -> None:
        try:
            self._send_now([identity, _TURNED_AWAY, why.encode(errors="replace")])
        except zmq.ZMQError as error:
            # The peer is gone, or its queue is full: its next message gets the answer.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Dealer(Closing):
    """A connected DEALER with a stable identity."""

    def __init__(
        self, address: str, identity: str, keys: Keys | None = None, *,
        endpoint: Endpoint = ANY, label: str = "",
    ) -> None:  # fmt: skip
        """label: with another label than the ROUTER's, `receive` raises TurnedAway."""
        self._endpoint, self.address = endpoint, address
        self.label = label
        self._context = _Context()
        self.socket = self._context.open(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, labelled(identity, label))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if keys is not None:
            public, secret = zmq.curve_keypair()
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        self.socket.connect(f"tcp://{address}")

    def redial(self) -> None:
        """Replace the connection by a new one. Messages that were not sent yet are lost.

        TCP retries ever more rarely: after a cut of the network, it may take as long as the cut
        lasted until an old connection carries data again.
        """
        self.socket.disconnect(f"tcp://{self.address}")
        self.socket.connect(f"tcp://{self.address}")

    def send(self, message: AnyMessage) -> None:
        """Queue a message. Raises DeadlineExceeded if the queue to the peer is full."""
        try:
            send_now(self.socket, encode_frames(message))
        except zmq.Again as error:
            raise DeadlineExceeded(
                f"{HIGH_WATER_MESSAGES} messages wait unsent for {self.address}, or it refuses "
                "this process. Look whether it is alive, and whether both have the keys of the run"
            ) from error

    def receive(self, timeout_s: float) -> AnyMessage | None:
        """Next message, or None if none came in time. Raises TurnedAway."""
        frames = self.receive_frames(timeout_s)
        return None if frames is None else self.decode(frames)

    def decode(self, frames: list[Frame]) -> AnyMessage:
        """The message of received frames. Raises WireError."""
        message: AnyMessage = _decode(frames, self._endpoint, self._endpoint.dealer_hears)
        return message

    def receive_frames(self, timeout_s: float) -> list[Frame] | None:
        """Frames of the next message, or None if none came in time. Raises TurnedAway."""
        if timeout_s > 0:
            self.socket.poll(int(timeout_s * 1000))
        if (frames := receive_now(self.socket)) is None:
            return None
        check_welcome(frames, self.address, self.label)
        return frames

    def request(self, message: AnyMessage, timeout_s: float) -> AnyMessage:
        """Send a message and return the next one. Raises DeadlineExceeded after timeout_s."""
        self.send(message)
        deadline = time.monotonic() + timeout_s
        answer = self.receive(deadline - time.monotonic())
        if answer is None:
            raise DeadlineExceeded(
                f"no answer from {self.address} to {type(message).__name__} in {timeout_s:.0f} s"
            )
        return answer

    def close(self) -> None:
        self.socket.close()
        self._context.term()
