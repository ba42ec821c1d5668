"""`python -m tools.bench.queue_floor`: what three bare ROUTERs need for the same messages.

Started by tools.bench.queue in the place of the rollout queue: as many bytes come in and go
out, but nothing is decoded. Each completion is answered by the same lease and the same score
request, and after each batch every leader gets a share as large as its part of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import zmq

from megatron_rl.config.files import load_config
from megatron_rl.protocol import wire
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.types import (
    ChatMessage,
    Lease,
    NextBatch,
    Prompt,
    Sampling,
    ScoreRequest,
)  # fmt: skip
from tools.bench.queue_load import Load, Template

Answer = tuple[str, bytes, bytes]
"""(endpoint, peer, frame)."""
_LARGE = 1000
"""Bytes that only a completion exceeds."""
_POLL_MS = 1000
_BURST_S = 0.005
"""As the queue's server, so that no endpoint starves another."""


class Floor:
    """Counts completions, and answers."""

    def __init__(self, load: Load) -> None:
        self._load = load
        prompt = Prompt("p", "math", [ChatMessage("user", "question")], "1")
        self._lease = wire.encode(Lease(0, prompt, [0], Sampling(load.tokens, 1.0)))
        text = Template(load).rollout(0, 0, 0).text
        request = ScoreRequest(0, "math", "1", "", text, load.tokens, is_finished=True)
        self._request = wire.encode(request)
        self._share = bytes(load.sequence_bytes * load.batch // load.leaders)
        self._leaders: list[bytes] = []
        self._completions = 0
        self._generators: set[bytes] = set()

    def answers(self, endpoint: str, peer: bytes, frames: Sequence[zmq.Frame]) -> list[Answer]:
        """What is said to a message."""
        load = self._load
        if endpoint == "batches":
            if isinstance(wire.decode(frames[0].bytes), NextBatch):
                self._leaders.append(peer)
            return []
        if endpoint == "verify":
            return []
        if sum(map(len, frames)) < _LARGE:
            count = 0 if peer in self._generators else load.slots
            self._generators.add(peer)
            return [("prompts", peer, self._lease)] * count
        self._completions += 1
        verifier = f"verifier-{self._completions % load.verifiers}".encode()
        found = [("verify", verifier, self._request), ("prompts", peer, self._lease)]
        if self._completions % load.batch == 0:
            found += [("batches", leader, self._share) for leader in self._leaders]
            self._leaders = []
        return found


def serve(floor: Floor, sockets: dict[str, zmq.Socket]) -> None:
    """Until a signal ends the process."""
    poller = zmq.Poller()
    for socket in sockets.values():
        poller.register(socket, zmq.POLLIN)
    endpoints = {socket: endpoint for endpoint, socket in sockets.items()}
    while True:
        for ready, _ in poller.poll(_POLL_MS):
            until = time.monotonic() + _BURST_S
            while time.monotonic() < until and ready.poll(0):
                peer, *frames = ready.recv_multipart(copy=False)
                for endpoint, to, answer in floor.answers(endpoints[ready], peer.bytes, frames):
                    _send(sockets[endpoint], [to, answer])


def _send(socket: zmq.Socket, frames: list[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.ZMQError as error:
        # A verifier whose handshake takes longer than those of generators: as the queue does.
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="three bare ROUTERs")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--load", required=True, help="JSON of tools.bench.queue_load.Load")
    options = parser.parse_args()
    config = load_config(options.config)
    ports, keys = config.ports, load_keys(config.ports.keys_dir)
    with ExitStack() as stack:
        routers = {
            endpoint: stack.enter_context(wire.Router(ports.host, port, keys))
            for endpoint, port in (
                ("prompts", ports.prompts),
                ("verify", ports.verify),
                ("batches", ports.batches),
            )
        }
        sockets = {endpoint: router.socket for endpoint, router in routers.items()}
        serve(Floor(Load(**json.loads(options.load))), sockets)


if __name__ == "__main__":
    sys.exit(main())
