"""A process of scripted verifiers and data-parallel leaders, which answer at once.

Started by tools.bench.queue. One thread. When every leader has its share of a batch the next
version is synced, and the next batch asked for.
"""

import time

import zmq

from megatron_rl.protocol import wire
from megatron_rl.protocol.types import (
    NextBatch,
    Score,
    ScoreDone,
    VerifierReady,
    WeightsSynced,
)  # fmt: skip
from tools.bench.queue_generators import HEARTBEAT_S, Control
from tools.bench.queue_load import Load, Wiring, connect_peer, receive_now, send

_POLL_MS = 100
_LANE_ROOM = 256
_RIGHT = Score(1.0, {"format": 0.1, "correct": 0.9}, "correct")
_WRONG = Score(0.1, {"format": 0.1, "correct": 0.0}, "wrong_answer")


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
            self._poller.poll(_POLL_MS)
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
