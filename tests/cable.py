"""A network cable between two sockets of a test, which can be cut."""

import contextlib
import socket
import struct
import threading
import time


class Cable:
    """Forwards connections to a port; what is sent over one that was cut is held back."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends = list[socket.socket]()
        self._cut = set[int]()
        self._held = list[tuple[socket.socket, bytes]]()
        self.is_cut_for_ever = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._ends) // 2

    def cut(self) -> None:
        """Cut the connections that there are."""
        self._cut = set(range(self.connections))

    def break_off(self) -> None:
        """Deliver what was sent over the connections that were cut, and reset them."""
        for target, data in self._held:
            target.sendall(data)
        time.sleep(0.5)
        for number in self._cut:
            for end in self._ends[2 * number : 2 * number + 2]:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # The other side may have gone already.
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RD)
                end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            number = self.connections
            self._ends += near, far
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(number, *pair), daemon=True).start()

    def _carry(self, number: int, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if number not in self._cut and not self.is_cut_for_ever:
                    target.sendall(data)
                else:
                    self._held.append((target, data))
        except OSError:
            return

    def close(self) -> None:
        for one in (self._listener, *self._ends):
            one.close()
