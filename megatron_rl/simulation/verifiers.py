"""The simulated verifiers: servers that grade in order of arrival.

One peer of the queue stands for the worker pools of all nodes.
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
from megatron_rl.rollout_queue.coordinator import VERIFY
from megatron_rl.simulation.queue import VirtualRun

NAME = "verifier"
PENDING_PER_SERVER = 64
"""Requests per server that the queue may give to a pool of many servers."""


class Verifiers:
    def __init__(self, run: VirtualRun) -> None:
        self._run, self._model = run, run.model.verifier
        pending = run.config.verifier.answers.max_pending
        self._slots = max(pending, self._model.servers * PENDING_PER_SERVER)
        self._draw = random.Random(f"{run.workload.seed}/grading")
        self._waiting: deque[tuple[float, ScoreRequest]] = deque()
        """(arrival time, request)"""
        self._busy = 0
        self.reset()

    def reset(self) -> None:
        self.busy_s = 0.0
        """Grading time of all started requests."""
        self.waited_s = 0.0
        """Wait of all started requests for a server."""
        self.graded = 0
        """Started requests."""

    def announce(self) -> None:
        """Announce the pools to the queue; also their heartbeat."""
        ready = VerifierReady(dict.fromkeys(WORKER_POOLS, self._slots), 1)
        self._run.say(VERIFY, NAME, ready)

    def take(self, request: ScoreRequest) -> None:
        """Grade a completion as soon as a server is free."""
        self._waiting.append((self._run.now, request))
        self._serve()

    def take_classes(self, request: ClassRequest) -> None:
        """Put every wrong answer into its own class, in no time."""
        done = ClassDone(request.request_id, list(range(len(request.texts))))
        self._run.later(0.0, lambda: self._run.say(VERIFY, NAME, done))

    def _serve(self) -> None:
        times = self._model.service_s
        while self._waiting and self._busy < self._model.servers:
            arrived_at, request = self._waiting.popleft()
            seconds = times[int(self._draw.random() * len(times))]
            self._busy += 1
            self.graded += 1
            self.busy_s += seconds
            self.waited_s += self._run.now - arrived_at
            self._run.later(seconds, partial(self._finish, request))

    def _finish(self, request: ScoreRequest) -> None:
        self._busy -= 1
        is_correct = self._run.workload.is_correct(request.seed, int(request.text))
        score = Score(
            1.0 if is_correct else 0.1,
            {"format": 0.1, "correct": 0.9 if is_correct else 0.0},
            "correct" if is_correct else "wrong_answer",
        )
        self._run.say(VERIFY, NAME, ScoreDone(request.request_id, score))
        self._serve()
