"""Entry of the verifier: `python -m verification.worker --config RUN_DIR/config.toml`.

A DEALER "verifier" (or "verifier-INDEX") connected to the queue's verify endpoint. Sends
VerifierReady at start and every 2 s, receives ScoreRequest and ClassRequest, answers ScoreDone,
ClassDone or ScoreFailed, ends on Stop. After SIGUSR2 it takes no further request, and leaves the
run when it has answered its own. One thread:

| waits for | woken by | does |
|---|---|---|
| a request | the socket | scores it where text decides, else pool.submit; or desk.take |
| a grading process | the pool's descriptor | pool.collect, sends what is finished |
| remaining quick comparisons | the poll, which does not block | desk.advance |
| the earliest deadline | the poll's timeout | pool.collect kills late processes |
| the next heartbeat | the poll's timeout | sends VerifierReady |

The queue keeps to the room of each worker pool, so the socket is always read: no worker pool waits
behind another. Both count a request in every worker pool that a step of its task needs
(`RewardConfig.steps_of`). The worker refuses requests beyond MAX_OVERBOOKING times that
room, which a restarted queue may send.
"""

import argparse
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import zmq

from megatron_rl.config.files import load_config
from megatron_rl.config.reward import WORKER_POOLS
from megatron_rl.config.tree import Config
from megatron_rl.protocol.endpoints import VERIFY
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.process import (
    LEAVING_SIGNAL,
    note_ready,
    note_started,
    run_main,
    set_up_logging,
    verifier_name,
)
from megatron_rl.protocol.types import (
    AnyMessage,
    ClassDone,
    ClassRequest,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
    Stop,
    VerifierReady,
)
from megatron_rl.protocol.wire import Dealer, WireError
from verification.classes import ClassDesk
from verification.draft import Draft
from verification.pool.pool import Pool
from verification.rules import RewardRules
from verification.score import screen
from verification.settings import check_sources
from verification.verdict import GradingError

HEARTBEAT_S = 2.0
LEAVING_BEAT_S = 0.2
GOODBYE_S = 5.0
"""Wait of a leaving verifier for the queue's last word."""
BURST_MESSAGES = 64
"""Requests taken before the pool gets its turn."""
MAX_OVERBOOKING = 2
"""A restarted queue does not know the requests of its predecessor."""
log = logging.getLogger(__name__)


class Leave(NamedTuple):
    """The request to leave the run."""

    asked: threading.Event
    limit_s: float
    """Seconds to answer all requests."""


class Verifier:
    """Serves one queue until it says Stop."""

    def __init__(
        self,
        dealer: Dealer,
        pool: Pool,
        desk: ClassDesk,
        *,
        rules: RewardRules,
        capacity: dict[str, int],
        leave: Leave,
    ) -> None:
        self._dealer = dealer
        self._pool = pool
        self._desk = desk
        self._rules = rules
        self._capacity, self._session = capacity, time.time_ns()
        self._owed: set[int] = set()
        """Requests that the queue waits for."""
        self._next_heartbeat_s = 0.0
        self._scored = 0
        self._leave = leave
        self._leaves_at: float | None = None
        """Monotonic time at which it gives back its requests; None: it stays."""

    def run(self) -> None:
        """Serve; returns after Stop, and after it has left the run."""
        note_started()
        poller = zmq.Poller()
        poller.register(self._pool.fileno(), zmq.POLLIN)
        poller.register(self._dealer.socket, zmq.POLLIN)
        while True:
            self._send_heartbeat_if_due()
            poller.poll(self._patience_ms())
            stop = self._receive()
            self._send_finished()
            if stop is not None:
                log.info("told to stop (%s) after %d scores", stop.reason, self._scored)
                return
            if self._leaves_at is not None and time.monotonic() > self._leaves_at + GOODBYE_S:
                log.info("leaves without an answer of the queue, after %d scores", self._scored)
                return

    def _send_finished(self) -> None:
        for finished in self._pool.collect():
            own = self._desk.take_verdict(finished) if self._desk.owns(finished) else [finished]
            for answer in own:
                self._answer(answer)
        for answer in self._desk.advance(time.monotonic()):
            self._answer(answer)

    def _patience_ms(self) -> int:
        if self._desk.has_work:
            return 0
        wake_s = self._next_heartbeat_s
        if self._pool.next_deadline_s is not None:
            wake_s = min(wake_s, self._pool.next_deadline_s)
        return max(0, int((wake_s - time.monotonic()) * 1000) + 1)

    def _send_heartbeat_if_due(self) -> None:
        now = time.monotonic()
        if self._leave.asked.is_set() and self._leaves_at is None:
            self._leaves_at, self._next_heartbeat_s = now + self._leave.limit_s, now
        if now >= self._next_heartbeat_s:
            is_leaving = self._leaves_at is not None
            if self._leaves_at is not None and now > self._leaves_at:
                self._owed.clear()
            self._dealer.send(
                VerifierReady(self._capacity, self._session, sorted(self._owed), is_leaving)
            )
            self._next_heartbeat_s = now + (LEAVING_BEAT_S if is_leaving else HEARTBEAT_S)

    def _receive(self) -> Stop | None:
        for _ in range(BURST_MESSAGES):
            message = self._dealer.receive(0)
            if message is None:
                return None
            if isinstance(message, Stop):
                return message
            self._take(message)
        return None

    def _take(self, message: AnyMessage) -> None:
        if not isinstance(message, ScoreRequest | ClassRequest):
            raise WireError(f"the verifier received {type(message).__name__} from the queue")
        if message.request_id < 0:
            raise WireError(f"request {message.request_id} came from the queue: ids begin at 0")
        if self._leaves_at is not None:
            # It crossed the announcement, which does not name it.
            return
        self._owed.add(message.request_id)
        try:
            if isinstance(message, ClassRequest):
                self._take_classes(message)
                return
            found = screen(message, self._rules)
            if isinstance(found, Draft):
                self._submit(found)
                return
        except GradingError as error:
            self._answer(ScoreFailed(message.request_id, str(error)))
            return
        self._answer(ScoreDone(message.request_id, found))

    def _answer(self, answer: ScoreDone | ScoreFailed | ClassDone) -> None:
        self._dealer.send(answer)
        self._owed.discard(answer.request_id)
        self._scored += 1

    def _take_classes(self, request: ClassRequest) -> None:
        self._rules.task(request.task)  # GradingError where it is unknown.
        pool = self._rules.reward.class_step(request.task).pool
        if self._desk.pending >= MAX_OVERBOOKING * self._capacity[pool]:
            raise GradingError(f"{self._desk.pending} class requests are pending: no room")
        self._desk.take(request)

    def _submit(self, draft: Draft) -> None:
        for _, pool in draft.steps:
            taken = self._pool.taken[pool]
            if taken >= MAX_OVERBOOKING * self._capacity[pool]:
                raise GradingError(f"{taken} requests are pending: no room in worker pool {pool!r}")
        self._pool.submit(draft)


def serve(config: Config, role: str, asked: threading.Event | None = None) -> None:
    """Connect to the queue of a run under the name `role` and grade until told to stop.

    asked: asks it to leave the run.
    """
    leave = Leave(asked or threading.Event(), config.nodes.leave_timeout_s)
    check_sources(config.prompts)
    rules = RewardRules.of(config)
    address = f"{config.ports.host}:{config.ports.verify}"
    keys = load_keys(config.ports.keys_dir)
    with (
        Dealer(address, role, keys, endpoint=VERIFY, label=config.ports.label) as dealer,
        Pool(config.verifier, rules) as pool,
    ):
        capacity = {name: config.verifier.pool(name).max_pending for name in WORKER_POOLS}
        log.info("verifier serves %s, room by worker pool: %s", address, capacity)
        note_ready()
        desk = ClassDesk(pool, rules, answer_within_s=config.verifier.answer_within_s)
        Verifier(dealer, pool, desk, rules=rules, capacity=capacity, leave=leave).run()


def main() -> int:
    """Entry of the process; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0, help="which verifier of the run this is")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    role = verifier_name(arguments.index)
    return run_main(role, lambda: _main(arguments.config, arguments.overrides, role))


def _main(path: Path, overrides: list[str], role: str) -> None:
    set_up_logging(role)
    config = load_config(path, overrides)
    set_up_logging(role, config.run.dir / "logs", in_background=True)
    asked = threading.Event()
    signal.signal(LEAVING_SIGNAL, lambda number, frame: asked.set())
    serve(config, role, asked)


if __name__ == "__main__":
    sys.exit(main())
