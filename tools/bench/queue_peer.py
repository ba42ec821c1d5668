"""The scripted peers of tools.bench.queue, and its floor. Each process has one thread.

| process | work |
|---|---|
| generators, two processes | answer leases in order: at a rate, or while few slots wait |
| other peers, one process | grade at once; sync a version when every leader has its share |
| floor: queue_peer FOLDER | replaces the rollout queue: equally many bytes, nothing decoded |

Peers report through shared memory (`Control`).
"""

import collections
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from megatron_rl.config.tree import PortsConfig
from megatron_rl.protocol import wire
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.types import (
    AnyMessage,
    ChatMessage,
    GeneratorReady,
    Lease,
    NextBatch,
    Prompt,
    Rollout,
    RolloutDone,
    Sampling,
    Score,
    ScoreDone,
    ScoreRequest,
    VerifierReady,
    VersionSpan,
    WeightsSynced,
)
from tools.bench.children import read_job

PROMPT_TOKENS = 340
"""Mean of tools/bench/packing.py."""
COMPLETION_TOKENS = 32_768
_CHARS_PER_TOKEN = 4
WINDOW = 24
"""A process returns rollouts while fewer of its slots are free."""
_STARVED_S = 2.0
"""Without a lease for this time, admission waits: more rollouts must come back."""
HEARTBEAT_S = 2.0
"""As in generation/worker.py."""
_POLL_MS = 5
_POLL_OTHERS_MS = 100
_VERIFIER_SLOTS = 256
_RIGHT = Score(1.0, {"format": 0.1, "correct": 0.9}, "correct")
_WRONG = Score(0.1, {"format": 0.1, "correct": 0.0}, "wrong_answer")


class Load(msgspec.Struct, frozen=True):
    """Load of the scripted peers."""

    generators: int = 1000
    slots: int = 2
    """Concurrent completions of a generator."""
    tokens: int = COMPLETION_TOKENS
    """Completion length."""
    choices_per_token: int = 0
    """uint8 expert choices per token, layers x experts per token; 0: no router replay."""
    prompts_per_batch: int = 128
    group_size: int = 16
    max_staleness: int = 3
    verifiers: int = 8
    leaders: int = 16
    """Data-parallel ranks."""

    @property
    def batch(self) -> int:
        return self.prompts_per_batch * self.group_size

    @property
    def held_bound(self) -> int:
        """Maximum of untrained completions by admission."""
        return (self.max_staleness + 1) * self.batch

    @property
    def rollout_bytes(self) -> int:
        """Arrays and text of a rollout."""
        arrays = 4 * (PROMPT_TOKENS + 2 * self.tokens)
        choices = (PROMPT_TOKENS + self.tokens - 1) * self.choices_per_token
        return arrays + choices + _CHARS_PER_TOKEN * self.tokens


class Template:
    """Makes rollouts that share their arrays, because drawing new ones takes too long."""

    def __init__(self, load: Load) -> None:
        chance = np.random.default_rng(0)
        self._prompt_ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        self._token_ids = chance.integers(0, 131_072, load.tokens, dtype=np.int32)
        self._logprobs = -chance.random(load.tokens, dtype=np.float32)
        count = (PROMPT_TOKENS + load.tokens - 1) * load.choices_per_token
        self._choices = chance.integers(0, 128, count, dtype=np.uint8)
        self._text = "".join(map(chr, chance.integers(97, 123, _CHARS_PER_TOKEN * load.tokens)))

    def rollout(self, lease_id: int, index: int, version: int) -> Rollout:
        """A completion whose second half was sampled under the version."""
        tokens, half = len(self._token_ids), len(self._token_ids) // 2
        begun = max(0, version - 1)
        return Rollout(
            lease_id,
            index,
            self._prompt_ids,
            self._token_ids,
            self._logprobs,
            [VersionSpan(begun, 0, half), VersionSpan(version, half, tokens)],
            "stop",
            self._text,
            expert_choices=self._choices,
        )


class Control(NamedTuple):
    """Shared by all processes of the benchmark."""

    version: "Synchronized[int]"
    """Synced policy version; -1: none."""
    rate: "Synchronized[float]"
    """Rollouts/s of one process; 0: the queue's capacity."""
    sent: "Synchronized[int]"
    """Returned rollouts of all processes."""
    is_over: Event


def connect(
    context: zmq.Context, ports: PortsConfig, endpoint: str, names: Sequence[str]
) -> list[zmq.Socket]:
    """DEALERs in a shared context; `wire.Dealer` makes a context per socket."""
    keys = load_keys(ports.keys_dir)
    sockets = []
    for name in names:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name.encode())
        if keys is not None:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        socket.connect(f"tcp://{ports.host}:{getattr(ports, endpoint)}")
        sockets.append(socket)
    return sockets


def send(socket: zmq.Socket, message: AnyMessage) -> None:
    """Send as `wire.Dealer` does."""
    socket.send_multipart(wire.encode_frames(message), copy=False)


def receive_now(socket: zmq.Socket) -> list[wire.Frame] | None:
    """Frames of a received message; None: there is none."""
    try:
        return [frame.buffer for frame in socket.recv_multipart(zmq.DONTWAIT, copy=False)]
    except zmq.Again:
        return None


class _Generators:
    def __init__(self, load: Load, ports: PortsConfig, numbers: range, control: Control) -> None:
        self._load, self._control = load, control
        self._template = Template(load)
        self._context = zmq.Context()
        self._context.max_sockets = len(numbers) + 8
        self._poller = zmq.Poller()
        names = [f"generator-{number:04d}" for number in numbers]
        self._sockets = connect(self._context, ports, "prompts", names)
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._places = {socket: place for place, socket in enumerate(self._sockets)}
        self._ready: collections.deque[tuple[int, int, int]] = collections.deque()
        """(generator, lease, index) of running completions, in the order of the leases."""
        self._free_since: list[collections.deque[float]] = [collections.deque() for _ in numbers]
        self._free = 0
        self._leased_at = 0.0
        self._version = -1
        self._began = 0.0
        self._beats = 0
        self.leases: list[tuple[float, float]] = []
        """(time of a lease, seconds since its slot was announced free)"""

    def run(self) -> None:
        next_at = time.monotonic()
        while not self._control.is_over.is_set():
            for socket, _ in self._poller.poll(_POLL_MS):
                self._receive(self._places[socket])
            now = time.monotonic()
            self._announce(now)
            if rate := self._control.rate.value:
                while self._ready and next_at <= now:
                    self._give_back()
                    next_at += 1 / rate
                continue
            next_at = now
            is_starved = now - self._leased_at > _STARVED_S
            while self._ready and (self._free < WINDOW or is_starved):
                self._give_back()
                is_starved = False
        self._context.destroy(linger=0)

    def _receive(self, place: int) -> None:
        while (frames := receive_now(self._sockets[place])) is not None:
            message = wire.decode_frames(frames)
            if not isinstance(message, Lease):
                continue
            self._leased_at = time.monotonic()
            for index in message.indices:
                self._ready.append((place, message.lease_id, index))
                waited_s = self._leased_at - self._free_since[place].popleft()
                self.leases.append((self._leased_at, waited_s))
            self._free -= len(message.indices)

    def _give_back(self) -> None:
        place, lease_id, index = self._ready.popleft()
        rollout = self._template.rollout(lease_id, index, self._version)
        send(self._sockets[place], RolloutDone(rollout))
        self._free_since[place].append(time.monotonic())
        self._free += 1
        with self._control.sent.get_lock():
            self._control.sent.value += 1

    def _announce(self, now: float) -> None:
        """Announce all generators after a weight sync; else send due heartbeats."""
        count, version = len(self._sockets), self._control.version.value
        if version != self._version:
            if self._version < 0:
                self._began, self._free = now, count * self._load.slots
                for waits in self._free_since:
                    waits.extend([now] * self._load.slots)
            self._version = version
            for place in range(count):
                self._send_state(place)
        while version >= 0 and self._beats < (now - self._began) * count / HEARTBEAT_S:
            self._send_state(self._beats % count)
            self._beats += 1

    def _send_state(self, place: int) -> None:
        state = GeneratorReady(self._load.slots, self._version, session=1)
        send(self._sockets[place], state)


class _Others:
    def __init__(self, load: Load, ports: PortsConfig, control: Control) -> None:
        self._control = control
        self._context = zmq.Context()
        verifiers = [f"verifier-{number}" for number in range(load.verifiers)]
        leaders = [f"trainer-{rank}" for rank in range(load.leaders)]
        self._verifiers = connect(self._context, ports, "verify", verifiers)
        self._leaders = connect(self._context, ports, "batches", leaders)
        self._version = 0
        self._scores = 0
        self.leases: list[tuple[float, float]] = []

    def run(self) -> None:
        poller, beat_at, has_share = zmq.Poller(), 0.0, [False] * len(self._leaders)
        for socket in (*self._verifiers, *self._leaders):
            poller.register(socket, zmq.POLLIN)
        self._sync()
        while not self._control.is_over.is_set():
            if (now := time.monotonic()) >= beat_at:
                for verifier in self._verifiers:
                    send(verifier, VerifierReady({"answers": _VERIFIER_SLOTS}, session=1))
                beat_at = now + HEARTBEAT_S
            poller.poll(_POLL_OTHERS_MS)
            for verifier in self._verifiers:
                while (frames := receive_now(verifier)) is not None:
                    self._grade(verifier, frames)
            for rank, leader in enumerate(self._leaders):
                # A leader passes the arrays to its other ranks undecoded.
                while receive_now(leader) is not None:
                    has_share[rank] = True
            if all(has_share):
                has_share = [False] * len(self._leaders)
                self._version += 1
                self._sync()
        self._context.destroy(linger=0)

    def _grade(self, verifier: zmq.Socket, frames: list[wire.Frame]) -> None:
        request = wire.decode_frames(frames)
        # Neighbours differ, so that no group has zero variance.
        self._scores += 1
        send(verifier, ScoreDone(request.request_id, (_RIGHT, _WRONG)[self._scores % 2]))

    def _sync(self) -> None:
        for rank, leader in enumerate(self._leaders):
            send(leader, NextBatch(self._version, rank, len(self._leaders)))
        self._control.version.value = self._version
        send(self._leaders[0], WeightsSynced(self._version))


def run_peers(
    load: Load, ports: PortsConfig, numbers: range, control: Control, results: Connection
) -> None:
    """Run a process of peers; sends the leases of its generators at the end.

    numbers: its generators; empty: the process is the verifiers and leaders.
    """
    peers = _Generators(load, ports, numbers, control) if numbers else _Others(load, ports, control)
    peers.run()
    results.send(peers.leases)


_LARGE = 1000
"""Bytes that only a completion exceeds."""
_FLOOR_POLL_MS = 1000
_BURST_S = 0.005
"""As in the queue's server, so that no endpoint starves another."""


class Floor:
    """Answers each completion with the same lease and the same score request.

    After each batch every leader gets as many bytes as its share of the completions.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        prompt = Prompt("p", "math", [ChatMessage("user", "question")], "1")
        self._lease = wire.encode(Lease(0, prompt, [0], Sampling(load.tokens, 1.0)))
        text = Template(load).rollout(0, 0, 0).text
        request = ScoreRequest(0, "math", "1", "", text, load.tokens, is_finished=True)
        self._request = wire.encode(request)
        trained_bytes = load.rollout_bytes - _CHARS_PER_TOKEN * load.tokens  # no text
        self._share = bytes(trained_bytes * load.batch // load.leaders)
        self._leaders: list[bytes] = []
        self._completions = 0
        self._generators: set[bytes] = set()

    def answers(
        self, endpoint: str, peer: bytes, frames: Sequence[zmq.Frame]
    ) -> list[tuple[str, bytes, bytes]]:
        """(endpoint, peer, frame) of each answer."""
        load = self._load
        if endpoint != "prompts":
            if endpoint == "batches" and isinstance(wire.decode(frames[0].bytes), NextBatch):
                self._leaders.append(peer)
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


def run_floor() -> None:
    """Run the floor, three bare ROUTERs, until a signal ends it."""
    config, load = read_job(Load)
    ports, keys = config.ports, load_keys(config.ports.keys_dir)
    floor, poller = Floor(load), zmq.Poller()
    with ExitStack() as stack:
        sockets = {
            name: stack.enter_context(wire.Router(ports.host, getattr(ports, name), keys)).socket
            for name in ("prompts", "verify", "batches")
        }
        names = {socket: name for name, socket in sockets.items()}
        for socket in names:
            poller.register(socket, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll(_FLOOR_POLL_MS):
                until = time.monotonic() + _BURST_S
                while time.monotonic() < until and ready.poll(0):
                    peer, *frames = ready.recv_multipart(copy=False)
                    for name, to, answer in floor.answers(names[ready], peer.bytes, frames):
                        _send(sockets[name], [to, answer])


def _send(socket: zmq.Socket, frames: list[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    except zmq.ZMQError as error:
        # The handshake of a verifier is not over: the queue ignores that too.
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise


if __name__ == "__main__":
    sys.exit(run_floor())
