"""The simulated verifiers: so many servers, first come first served.

Used by the simulation. One peer of the queue stands for all nodes' pools.
"""

import random
from collections import deque
from functools import partial

from megatron_rl.config.reward import WORKER_POOLS
from megatron_rl.protocol.types import (
    ClassDone,
    ClassRequest,
    Score,
    ScoreDone,
    ScoreRequest,
    VerifierReady,
)  # fmt: skip
from megatron_rl.rollout_queue.coordinator import VERIFY, Coordinator
from megatron_rl.simulation.events import EventClock
from megatron_rl.simulation.machines import VerifierModel
from megatron_rl.simulation.workload import Workload

NAME = "verifier"
PENDING_PER_SERVER = 64
"""Requests that the queue may have given to a pool of many servers, for each."""


class Verifiers:
    """All verifiers."""

    def __init__(
        self,
        clock: EventClock,
        queue: Coordinator,
        model: VerifierModel,
        workload: Workload,
        *,
        max_pending: int,
    ) -> None:
        """max_pending: requests that a real pool takes (verifier.answers)."""
        self._clock, self._queue, self._model, self._workload = clock, queue, model, workload
        self._room = max(max_pending, model.servers * PENDING_PER_SERVER)
        self._draw = random.Random(f"{workload.seed}/grading")
        self._waiting: deque[ScoreRequest] = deque()
        self._busy = 0
        self.busy_s = 0.0
        """Of all servers together, of what they have begun."""
        self.waited_s = 0.0
        """Of all requests together, until a server took them."""
        self.graded = 0
        """Requests that a server took."""
        self._arrived: dict[int, float] = {}

    def announce(self) -> None:
        """The state of the pool, as heartbeat too."""
        ready = VerifierReady(dict.fromkeys(WORKER_POOLS, self._room), 1)
        self._queue.handle(VERIFY, NAME, ready, self._clock.now)

    def take(self, request: ScoreRequest) -> None:
        """Grade it as soon as a server is free."""
        self._arrived[request.request_id] = self._clock.now
        self._waiting.append(request)
        self._serve()

    def take_classes(self, request: ClassRequest) -> None:
        """Wrong answers are all different; that takes no time."""
        done = ClassDone(request.request_id, list(range(len(request.texts))))
        handle = partial(self._queue.handle, VERIFY, NAME, done)
        self._clock.at(self._clock.now, lambda: handle(self._clock.now))

    def reset(self) -> None:
        """Count from here on."""
        self.busy_s = self.waited_s = 0.0
        self.graded = 0

    def _serve(self) -> None:
        times = self._model.service_s
        while self._waiting and self._busy < self._model.servers:
            request = self._waiting.popleft()
            seconds = times[int(self._draw.random() * len(times))]
            self._busy += 1
            self.graded += 1
            self.busy_s += seconds
            self.waited_s += self._clock.now - self._arrived.pop(request.request_id)
            self._clock.at(self._clock.now + seconds, partial(self._finish, request))

    def _finish(self, request: ScoreRequest) -> None:
        self._busy -= 1
        is_correct = self._workload.is_correct(request.seed, int(request.text))
        score = Score(
            1.0 if is_correct else 0.1,
            {"format": 0.1, "correct": 0.9 if is_correct else 0.0},
            "correct" if is_correct else "wrong_answer",
        )
        self._queue.handle(VERIFY, NAME, ScoreDone(request.request_id, score), self._clock.now)
        self._serve()
