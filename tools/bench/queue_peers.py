"""Scripted peers of the rollout queue: generators, verifiers and data-parallel leaders.

Started by tools.bench.queue, which is told in shared memory (`Control`) what they did.

| process | one thread, which |
|---|---|
| generators, two processes | answers leases in order: at a rate, or as long as few slots wait |
| all others, one process | scores at once; weight syncs a version when every leader has its share |
"""

import collections
import time
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

import zmq

from megatron_rl.protocol import wire
from megatron_rl.protocol.keys import Keys
from megatron_rl.protocol.types import (
    AnyMessage,
    GeneratorReady,
    Lease,
    NextBatch,
    RolloutDone,
    Score,
    ScoreDone,
    VerifierReady,
    WeightsSynced,
)
from tools.bench.queue_load import Load, Template

WINDOW = 24
"""Of one process."""
_STARVED_S = 2.0
"""Without a lease for so long, slots wait for admission: more must come back."""
HEARTBEAT_S = 2.0
"""As generation/worker.py."""
_POLL_MS = 5
_POLL_OTHERS_MS = 100
_LANE_ROOM = 256
_RIGHT = Score(1.0, {"format": 0.1, "correct": 0.9}, "correct")
_WRONG = Score(0.1, {"format": 0.1, "correct": 0.0}, "wrong_answer")


class Control(NamedTuple):
    """Shared by all processes of the benchmark."""

    version: "Synchronized[int]"
    """The synced one; -1: none yet."""
    rate: "Synchronized[float]"
    """Rollouts a second of one process; 0: as many as the queue takes."""
    sent: "Synchronized[int]"
    """Rollouts given back, by all processes."""
    is_over: Event


class Wiring(NamedTuple):
    """Addresses of the queue's endpoints."""

    prompts: str
    verify: str
    batches: str
    keys: Keys | None


def connect_peer(context: zmq.Context, address: str, name: str, keys: Keys | None) -> zmq.Socket:
    """A DEALER of a shared context, as `wire.Dealer` has one of its own."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    if keys is not None:
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    socket.connect(f"tcp://{address}")
    return socket


def send(socket: zmq.Socket, message: AnyMessage) -> None:
    """As `wire.Dealer` sends."""
    socket.send_multipart(wire.encode_frames(message), copy=False)


def receive_now(socket: zmq.Socket) -> list[wire.Frame] | None:
    """Frames of a message that is there; None: there is none."""
    try:
        return [frame.buffer for frame in socket.recv_multipart(zmq.DONTWAIT, copy=False)]
    except zmq.Again:
        return None


class _Generators:
    def __init__(self, load: Load, wiring: Wiring, numbers: range, control: Control) -> None:
        self._load, self._control = load, control
        self._template = Template(load)
        self._context = zmq.Context()
        self._context.max_sockets = len(numbers) + 8
        self._poller = zmq.Poller()
        self._sockets = [
            connect_peer(self._context, wiring.prompts, f"generator-{number:04d}", wiring.keys)
            for number in numbers
        ]
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._places = {socket: place for place, socket in enumerate(self._sockets)}
        self._ready: collections.deque[tuple[int, int, int]] = collections.deque()
        """(generator, lease, index) of what runs, in the order of the leases."""
        self._free_since: list[collections.deque[float]] = [collections.deque() for _ in numbers]
        self._free = 0
        self._leased_at = 0.0
        self._version = -1
        self._began = 0.0
        self._beats = 0
        self.leases: list[tuple[float, float]] = []
        """(when a lease came, seconds since its slot was announced as free)"""

    def run(self) -> None:
        """Until the benchmark is over."""
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
        now = time.monotonic()
        self._free_since[place].append(now)
        self._free += 1
        with self._control.sent.get_lock():
            self._control.sent.value += 1

    def _announce(self, now: float) -> None:
        """Say what all hold after a sync; else the next heartbeats, spread over their time."""
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


def run_generators(
    load: Load, wiring: Wiring, numbers: range, control: Control, results: Connection
) -> None:
    """Entry of the process; sends its leases when the benchmark is over."""
    generators = _Generators(load, wiring, numbers, control)
    generators.run()
    results.send(generators.leases)


class _Others:
    def __init__(self, load: Load, wiring: Wiring, control: Control) -> None:
        self._control = control
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._verifiers = [
            connect_peer(self._context, wiring.verify, f"verifier-{number}", wiring.keys)
            for number in range(load.verifiers)
        ]
        self._leaders = [
            connect_peer(self._context, wiring.batches, f"trainer-{rank}", wiring.keys)
            for rank in range(load.leaders)
        ]
        for socket in (*self._verifiers, *self._leaders):
            self._poller.register(socket, zmq.POLLIN)
        self._has_share = [False] * load.leaders
        self._version = 0
        self._scores = 0

    def run(self) -> None:
        """Until the benchmark is over."""
        beat_at = 0.0
        self._sync()
        while not self._control.is_over.is_set():
            if (now := time.monotonic()) >= beat_at:
                for verifier in self._verifiers:
                    send(verifier, VerifierReady({"answers": _LANE_ROOM}, session=1))
                beat_at = now + HEARTBEAT_S
            self._poller.poll(_POLL_OTHERS_MS)
            for verifier in self._verifiers:
                while (frames := receive_now(verifier)) is not None:
                    self._grade(verifier, frames)
            for rank, leader in enumerate(self._leaders):
                # Its arrays would go to other ranks undecoded.
                while receive_now(leader) is not None:
                    self._has_share[rank] = True
            if all(self._has_share):
                self._has_share = [False] * len(self._leaders)
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


def run_others(load: Load, wiring: Wiring, control: Control) -> None:
    """Entry of the process."""
    _Others(load, wiring, control).run()
