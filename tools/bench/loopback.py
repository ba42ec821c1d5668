"""What two processes of this machine can say to each other: TCP and ZeroMQ over loopback.

Used by tools.bench.limits. The peer is a process of its own.
"""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import zmq

HOST = "127.0.0.1"
MESSAGE_BYTES = 16 << 20
MESSAGES = 16
SMALL_BYTES = 64
ROUND_TRIPS = 500
TIMEOUT_S = 60.0


def loopback() -> dict[str, dict[str, float]]:
    """Bytes/s and round trip of TCP and of ZeroMQ."""
    return {"tcp": _beside(_tcp_peer, _tcp_side), "zeromq": _beside(_zmq_peer, _zmq_side)}


def _beside(
    peer: Callable[[Connection], None], side: Callable[[int], dict[str, float]]
) -> dict[str, float]:
    """Start the peer, learn its port, measure."""
    # spawn: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError(f"the peer did not start in {TIMEOUT_S:.0f} s")
        return side(ours.recv())
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _measure(send: Callable[[bytes], None], receive: Callable[[int], object]) -> dict[str, float]:
    """The peer answers each large message with one byte after the last, each small one whole."""
    payload, small = bytes(MESSAGE_BYTES), bytes(SMALL_BYTES)
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(MESSAGES):
            send(payload)
        receive(1)
        rates.append(MESSAGES * MESSAGE_BYTES / (time.perf_counter() - started))
    trips = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        send(small)
        receive(SMALL_BYTES)
        trips.append(time.perf_counter() - started)
    return {"bytes_per_s": max(rates), "round_trip_s": statistics.median(trips)}


def _answer(receive: Callable[[int], object], send: Callable[[bytes], None]) -> None:
    """The peer's part of `_measure`."""
    for _ in range(3):
        for _ in range(MESSAGES):
            receive(MESSAGE_BYTES)
        send(b"1")
    for _ in range(ROUND_TRIPS):
        receive(SMALL_BYTES)
        send(bytes(SMALL_BYTES))


def _receive_exactly(connection: socket.socket) -> Callable[[int], None]:
    buffer = bytearray(MESSAGE_BYTES)

    def receive(count: int) -> None:
        view = memoryview(buffer)[:count]
        while view:
            got = connection.recv_into(view)
            if not got:
                raise ConnectionError("the peer closed the connection")
            view = view[got:]

    return receive


def _tcp_peer(pipe: Connection) -> None:
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(TIMEOUT_S)
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(_receive_exactly(connection), connection.sendall)


def _tcp_side(port: int) -> dict[str, float]:
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _measure(connection.sendall, _receive_exactly(connection))


def _pair(context: zmq.Context) -> zmq.Socket:
    pair = context.socket(zmq.PAIR)
    pair.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
    pair.setsockopt(zmq.SNDTIMEO, int(TIMEOUT_S * 1000))
    pair.setsockopt(zmq.LINGER, 1000)
    return pair


def _zmq_peer(pipe: Connection) -> None:
    with zmq.Context() as context, _pair(context) as pair:
        pipe.send(pair.bind_to_random_port(f"tcp://{HOST}"))
        _answer(lambda _: pair.recv(copy=False), pair.send)


def _zmq_side(port: int) -> dict[str, float]:
    with zmq.Context() as context, _pair(context) as pair:
        pair.connect(f"tcp://{HOST}:{port}")
        return _measure(lambda data: pair.send(data, copy=False), lambda _: pair.recv(copy=False))
