"""Slow links on one node: the kernel paces what a process sends over TCP.

For measurements where receivers, not the sender, shall be the limit, as on hosts of their own.
Linux alone, no privileges. A sender whose peer's link is full waits in the kernel as it would
before a real one; its other connections go on.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatron_rl.weights.exchange import transport

SO_MAX_PACING_RATE = 47
"""Bytes per second, socket(7); the module `socket` lacks it. TCP paces itself since Linux 4.13."""


@contextmanager
def limited_links(bytes_per_s: int) -> Iterator[None]:
    """In the block, each connection of an exchange over gloo sends at most so much from its start.

    In a sender: an engine rank that a single rank serves takes at most so much. 0: no limit.
    """
    if not bytes_per_s:
        yield
        return
    connect = transport.connect_group

    def connect_limited(*arguments: object) -> None:
        connect(*arguments)
        limit_connections(bytes_per_s)

    with patch.object(transport, "connect_group", connect_limited):
        yield


def limit_connections(bytes_per_s: int) -> int:
    """Limit each TCP connection that this process has now; how many they are.

    gloo does not say which sockets are its own. The others, to a store or between control groups,
    carry little.
    """
    limited = 0
    for link in _tcp_connections():
        link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        limited += 1
    return limited


def _tcp_connections() -> Iterator[socket.socket]:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue  # closed by another thread, or the folder's own
        try:
            link = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # no socket
        with link:
            if link.type == socket.SOCK_STREAM and link.family in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                yield link
