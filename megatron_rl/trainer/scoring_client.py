"""Requests to the scorer process for the reference's logprobs of sequences.

Used by trainer ranks. The leader of each model replica asks for its whole batch, and all ranks of
the replica get the logprobs. A scorer that was restarted has lost its requests, so the client
repeats a request without an answer. A slow scorer recognises the repetition, and answers once.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from megatron.core import parallel_state

from megatron_rl.config.tree import Config
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.endpoints import SCORER
from megatron_rl.protocol.keys import Keys, load_keys
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.scorer_messages import LogprobRequest, LogprobsDone, LogprobsFailed
from megatron_rl.protocol.types import Stop, TrainSequence
from megatron_rl.protocol.wire import DeadlineExceeded, Dealer, WireError
from megatron_rl.trainer.leader import TURN_S, Leader
from megatron_rl.trainer.model.collate import rows_of

ASK_AGAIN_S = 10.0
"""A request without an answer is repeated after this time."""


class ScoringClient(Closing):
    """A leader's connection to the scorer; one batch of sequences at a time."""

    def __init__(
        self, address: str, name: str, *, keys: Keys | None, label: str,
        max_open: int, answer_within_s: float,
    ) -> None:  # fmt: skip
        """max_open: requests at once. answer_within_s: the longest wait for the next answer."""
        self._dealer = Dealer(address, name, keys, endpoint=SCORER, label=label)
        self._max_open = max_open
        self._answer_within_s = answer_within_s
        self._next_id = 0
        self._waiting: deque[LogprobRequest] = deque()
        self._open: dict[int, tuple[LogprobRequest, float]] = {}
        """By request_id, with the time when it was last sent."""
        self._found: dict[int, np.ndarray] = {}
        self._wanted: dict[int, np.ndarray] = {}
        """Request -> indices of the target tokens among the tokens it scores."""
        self._progress_at = 0.0
        self.asked_again = 0
        """Requests that were repeated, since the connection was opened."""

    def begin(self, sequences: Sequence[TrainSequence]) -> None:
        """Request the logprobs of the target tokens of these sequences."""
        assert not self._open and not self._waiting, "a batch at a time"
        self._found, self._progress_at = {}, time.monotonic()
        self._wanted = {}
        for token_ids, targets in rows_of(sequences):
            if len(targets):  # a branch may have only tokens that another one learns
                first = int(targets[0])
                self._waiting.append(LogprobRequest(self._next_id, token_ids, first))
                self._wanted[self._next_id] = targets - first
                self._next_id += 1

    def take(self, limit_s: float) -> np.ndarray | None:
        """[target tokens of all sequences, end to end] float32; None: not within limit_s.

        Raises TrainingStopped for a sequence that the engine refuses, DeadlineExceeded after
        answer_within_s without an answer.
        """
        until = time.monotonic() + limit_s
        while len(self._found) < len(self._wanted):
            self._ask()
            now = time.monotonic()
            gives_up_at = self._progress_at + self._answer_within_s
            if now >= gives_up_at:
                raise DeadlineExceeded(
                    f"the scorer gave no answer in {self._answer_within_s:.0f} s "
                    f"(expert.scorer.answer_within_s), and {len(self._wanted) - len(self._found)} "
                    f"of {len(self._wanted)} sequences have no logprobs of the reference: see "
                    "logs/scorer-0.log and logs/scorer-0-sglang.log"
                )
            if now >= until:
                return None
            self._receive(min(until, gives_up_at) - now)
        parts = [self._found[number][targets] for number, targets in self._wanted.items()]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def _ask(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._open) < self._max_open:
            self._send(self._waiting.popleft(), now)
        for request, asked_at in list(self._open.values()):
            if now - asked_at > ASK_AGAIN_S:
                self.asked_again += 1
                self._send(request, now)

    def _send(self, request: LogprobRequest, now: float) -> None:
        self._dealer.send(request)
        self._open[request.request_id] = request, now

    def _receive(self, limit_s: float) -> None:
        # Not longer than until a request is due again; at least what a socket can wait.
        message = self._dealer.receive(max(0.001, min(limit_s, ASK_AGAIN_S)))
        match message:
            case None:
                return
            case LogprobsDone(request_id, logprobs):
                self._note(request_id, logprobs)
            case LogprobsFailed(request_id, reason):
                if request_id in self._open:
                    raise TrainingStopped(
                        "the engine of algorithm.reference refuses a sequence of the batch: "
                        f"{reason}"
                    )
            case _:
                raise WireError(f"the scorer sent a {type(message).__name__}")

    def _note(self, request_id: int, logprobs: np.ndarray) -> None:
        # Asked twice, answered twice: the first answer counts.
        request, _ = self._open.pop(request_id, (None, 0.0))
        if request is None:
            return
        expected = len(request.token_ids) - request.start
        if len(logprobs) != expected:
            raise WireError(f"the scorer sent {len(logprobs)} logprobs of {expected} tokens")
        self._found[request_id] = logprobs
        self._progress_at = time.monotonic()

    def stop(self) -> None:
        """Let the scorer end."""
        self._dealer.send(Stop("the trainer has ended"))

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()


class Scorer:
    """The scorer process, as all ranks of a replica see it."""

    def __init__(self, leader: Leader, client: ScoringClient | None) -> None:
        """client: on the leader of the replica, None on its other ranks."""
        self._leader, self.client = leader, client
        self.metrics: list[Metric] = []
        """Of the last call of `score`, as this rank's replica saw it."""

    def score(self, sequences: Sequence[TrainSequence]) -> np.ndarray:
        """[target tokens of all sequences, end to end] float32, on all ranks of the replica.

        Every trainer rank must call it. Raises as `ScoringClient.take`.
        """
        started = time.monotonic()
        again = self.client.asked_again if self.client else 0
        if self.client is not None:
            self.client.begin(sequences)
        frame = self._leader.read(self._poll)
        self.metrics = [
            Metric("wait/reference_s", time.monotonic() - started, "max"),
            Metric("scorer/requests", len(sequences), "sum"),
            Metric("scorer/tokens", sum(len(s.token_ids) for s in sequences), "sum"),
        ]
        if self.client is not None:
            self.metrics += [Metric("scorer/asked_again", self.client.asked_again - again, "sum")]
        return np.frombuffer(frame, dtype=np.float32)[1:]

    def _poll(self) -> bytearray:
        assert self.client is not None
        found = self.client.take(TURN_S)
        # An empty frame says "not yet": a first number stands before the logprobs, if any.
        return (
            bytearray() if found is None else bytearray(np.append(np.float32(0), found).tobytes())
        )


@contextmanager
def open_scorer(cfg: Config, leader: Leader, address: str) -> Iterator[Scorer | None]:
    """The scorer of the run, where it holds the reference.

    Ends the process when the block ends well, unless it is also a judge.

    address: of its node.
    """
    if not cfg.algorithm.needs_scorer:
        yield None
        return
    if not leader.is_this_rank:
        yield Scorer(leader, None)
        return
    dp_rank, ports = parallel_state.get_data_parallel_rank(), cfg.ports
    client = ScoringClient(
        ports.scorer_at(address),
        f"trainer-{dp_rank}-reference",
        keys=load_keys(ports.keys_dir),
        label=ports.label,
        max_open=cfg.scorer.max_running,
        answer_within_s=cfg.scorer.answer_within_s,
    )
    with client:
        yield Scorer(leader, client)
        # A judge serves environments until the phase ends.
        if dp_rank == 0 and cfg.judge_folder is None:
            client.stop()
