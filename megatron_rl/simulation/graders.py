"""The simulated verifiers: so many servers, first come first served.

Used by the simulation. One peer of the queue stands for all nodes' pools.
"""

import random
from collections import deque
from collections.abc import Callable
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
from megatron_rl.simulation.events import Agenda
from megatron_rl.simulation.machines import VerifierModel
from megatron_rl.simulation.workload import Workload

NAME = "verifier"
PENDING_PER_SERVER = 64
"""Requests that the queue may have given to a pool of many servers, for each."""


class Graders:
    """All verifiers."""

    def __init__(
        self,
        agenda: Agenda,
        queue: Coordinator,
        model: VerifierModel,
        workload: Workload,
        *,
        max_pending: int,
        on_change: Callable[[], None],
    ) -> None:
        """max_pending: of a real pool (verifier.answers); on_change: it begins or ends work."""
        self._agenda, self._queue, self._model, self._workload = agenda, queue, model, workload
        self._room = max(max_pending, model.servers * PENDING_PER_SERVER)
        self._draw = random.Random(f"{workload.seed}/grading")
        self._on_change = on_change
        self._waiting: deque[ScoreRequest] = deque()
        self._busy = 0
        self.busy_s = 0.0
        """Of all servers together, of what they have begun."""
        self.waited_s = 0.0
        """Of all requests together, until a server took them."""
        self.graded = 0
        """Requests that a server took."""
        self._arrived: dict[int, float] = {}
        self._speed = 1.0

    @property
    def is_working(self) -> bool:
        """Whether anything is graded."""
        return self._busy > 0

    def set_speed(self, speed: float) -> None:
        """Rounds that begin are served with another share of the full speed from now on."""
        self._speed = speed

    def announce(self) -> None:
        """The state of the pool, as heartbeat too."""
        ready = VerifierReady(dict.fromkeys(WORKER_POOLS, self._room), 1)
        self._queue.handle(VERIFY, NAME, ready, self._agenda.now)

    def take(self, request: ScoreRequest) -> None:
        """Grade it as soon as a server is free."""
        self._arrived[request.request_id] = self._agenda.now
        self._waiting.append(request)
        self._serve()

    def take_classes(self, request: ClassRequest) -> None:
        """Wrong answers are all different; that takes no time."""
        done = ClassDone(request.request_id, list(range(len(request.texts))))
        handle = partial(self._queue.handle, VERIFY, NAME, done)
        self._agenda.at(self._agenda.now, lambda: handle(self._agenda.now))

    def reset(self) -> None:
        """Count from here on."""
        self.busy_s = self.waited_s = 0.0
        self.graded = 0

    def _serve(self) -> None:
        while self._waiting and self._busy < self._model.servers:
            taken, seconds = self._take_round()
            self._busy += 1
            self.graded += len(taken)
            self.busy_s += seconds
            for request in taken:
                self.waited_s += self._agenda.now - self._arrived.pop(request.request_id)
            self._agenda.at(self._agenda.now + seconds, partial(self._finish, taken))
        self._on_change()

    def _take_round(self) -> tuple[list[ScoreRequest], float]:
        """What a server grades now, and for how long."""
        if self._model.round_s is None:
            times = self._model.service_s
            return [self._waiting.popleft()], times[int(self._draw.random() * len(times))]
        taken = list(self._waiting)
        self._waiting.clear()
        base_s, each_s = self._model.round_s
        return taken, (base_s + each_s * len(taken)) / self._speed

    def _finish(self, graded: list[ScoreRequest]) -> None:
        self._busy -= 1
        for request in graded:
            self._tell(request)
        self._serve()

    def _tell(self, request: ScoreRequest) -> None:
        is_correct = self._workload.is_correct(request.seed, int(request.text))
        score = Score(
            1.0 if is_correct else 0.1,
            {"format": 0.1, "correct": 0.9 if is_correct else 0.0},
            "correct" if is_correct else "wrong_answer",
        )
        self._queue.handle(VERIFY, NAME, ScoreDone(request.request_id, score), self._agenda.now)
