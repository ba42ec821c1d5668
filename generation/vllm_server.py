"""The vLLM process of a generator: `python -m generation.vllm_server JOB.json`, under vLLM's own
interpreter.

Entry and loop; `vllm_requests.py` samples, `vllm_weights.py` takes weights. One thread: it reads
the generator's messages, then takes one step of vLLM's engine core, so that every order runs
between two steps. It ends when the generator closes the connection.
"""

import logging
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from generation.vllm_messages import (
    READY,
    Answer,
    Ask,
    Ends,
    Job,
    Order,
    PauseNow,
    asked_decoder,
)
from generation.vllm_requests import CompletionRequests, open_core
from generation.vllm_weights import Weights, keep_weights, model_of
from megatron_rl.protocol.engine_requests import Abort, Generate, pack, unpack
from megatron_rl.protocol.types import LeaveGroup, Receive, Resume

log = logging.getLogger(__name__)

IDLE_S = 1.0
CHUNK_BYTES = 1 << 16
SEND_S = 60.0
"""Seconds: a generator that reads nothing for this long hangs."""


class Line:
    """The socket to the generator."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SEND_S)
        self._socket.connect(path)
        self._received = bytearray()

    def messages(self, wait_s: float) -> Iterator[Any]:
        """Messages that have arrived; waits for one. Raises EOFError without a generator."""
        while wait([self._socket], wait_s):
            chunk = self._socket.recv(CHUNK_BYTES)
            if not chunk:
                raise EOFError("the generator hung up")
            self._received += chunk
            wait_s = 0.0
        yield from unpack(self._received, asked_decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError when the generator is gone."""
        self._socket.sendall(pack(message))


class Server:
    """Executes the orders of the generator."""

    def __init__(self, line: Line, requests: CompletionRequests, weights: Weights) -> None:
        self._line, self._requests, self._weights = line, requests, weights

    def run(self) -> None:
        """Serve until the generator closes the connection: EOFError or OSError."""
        while True:
            wait_s = 0.0 if self._requests.are_runnable else IDLE_S
            for message in self._line.messages(wait_s):
                self._take(message)
            if ended := self._requests.step():
                self._line.send(Ends(ended))

    def _take(self, message: Generate | Abort | Ask) -> None:
        match message:
            case Generate():
                if refused := self._requests.add(message):
                    self._line.send(Ends(refused))
            case Abort(names):
                self._requests.abort(names)
            case Ask(number, order):
                self._line.send(Answer(number, self._obey(order)))

    def _obey(self, order: Order) -> str:
        """Execute an order; return why it failed, "": it did not."""
        match order:
            case PauseNow(recomputes):
                self._requests.pause(recomputes=recomputes)
            case Receive():
                if not self._requests.is_paused:
                    return "Receive: weights came outside a weight sync: pause first"
                self._weights.rank.take(order)
            case LeaveGroup():
                self._weights.rank.leave()
            case Resume(version):
                self._weights.repack()
                self._requests.resume(version)
        return ""


def main() -> None:
    """Load the model, report it, serve."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    line = Line(job.socket)
    keep_weights()
    core = open_core(job)
    weights = Weights(model_of(core), Path(job.model))
    server = Server(line, CompletionRequests(core, job), weights)
    line.send(Answer(READY, ""))
    try:
        server.run()
    except EOFError as error:
        log.warning("%s", error)


if __name__ == "__main__":
    main()
