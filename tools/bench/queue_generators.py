"""A process of many scripted generators: a DEALER each, which answers its leases in order.

Started by tools.bench.queue. One thread. Completions are given back in the order in which they were
leased, as when all are equally long: at a rate, or, to find the highest one, as long as fewer than
`WINDOW` slots wait for their next lease.
"""

import collections
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

import zmq

from megatron_rl.protocol import wire
from megatron_rl.protocol.types import GeneratorReady, Lease, RolloutDone
from tools.bench.queue_load import Load, Template, Wiring, connect_peer, receive_now, send

WINDOW = 24
"""Of one process."""
_STARVED_S = 2.0
"""Without a lease for so long, slots wait for admission: more must come back."""
HEARTBEAT_S = 2.0
"""As generation/worker.py."""
_POLL_MS = 5


class Control(NamedTuple):
    """Shared by all processes of the benchmark."""

    version: "Synchronized[int]"
    """The synced one; -1: none yet."""
    rate: "Synchronized[float]"
    """Rollouts a second of one process; 0: as many as the queue takes."""
    sent: "Synchronized[int]"
    """Rollouts given back, by all processes."""
    is_over: Event


@dataclass
class Measured:
    leases: list[tuple[float, float]] = field(default_factory=list)
    """(when it came, seconds since its slot was announced as free)"""


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
        self.measured = Measured()

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
                self.measured.leases.append((self._leased_at, waited_s))
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
    """Entry of the process; sends what it measured when the benchmark is over."""
    generators = _Generators(load, wiring, numbers, control)
    generators.run()
    results.send(generators.measured)
