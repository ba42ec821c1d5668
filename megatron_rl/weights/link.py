"""Trainer rank 0's conversation with all generators about weights.

ROUTER of the weights endpoint: Hello, Pause, Receive, JoinGroup, Bucket, Load, Resume, Fence, Ping,
LeaveGroup and their Acks. Every wait has a deadline. What one generator does or fails to do is
raised as `GeneratorLost` and concerns that generator alone.
"""

import logging
import time
from collections.abc import Callable

from megatron_rl.protocol.types import Ack, AnyMessage, Failed, Hello, Ping
from megatron_rl.protocol.wire import DeadlineExceeded, Router, WireError

log = logging.getLogger(__name__)

POLL_S = 0.002
PING_S = 0.5


class GeneratorLost(RuntimeError):
    """A generator failed, fell silent or restarted during a publish; the text has its reason."""


class GeneratorLink:
    """Who is there, and requests to them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.peers: dict[str, Hello] = {}
        """The last Hello of each generator that has not been dropped."""
        self._acks: dict[str, set[str]] = {}
        self._failures: dict[str, str] = {}

    def listen(self, wait_s: float = 0.0) -> None:
        """Take in what has arrived; waits for a first message up to wait_s."""
        while (received := self._receive(wait_s)) is not None:
            wait_s = 0.0
            peer, message = received
            match message:
                case Hello():
                    self._greet(peer, message)
                case Ack():
                    self._acks.setdefault(peer, set()).add(message.done)
                case Failed():
                    self._failures[peer] = f"{message.doing}: {message.reason}"

    def _receive(self, wait_s: float) -> tuple[str, AnyMessage] | None:
        try:
            return self._router.receive(wait_s)
        except WireError as error:
            if not error.peer:
                raise
            return error.peer, Failed("message", str(error))

    def _greet(self, peer: str, hello: Hello) -> None:
        known = self.peers.get(peer)
        if known is not None and known.session != hello.session:
            self._failures[peer] = "it restarted"
        self.peers[peer] = hello

    def await_peers(self, number: int, limit_s: float) -> None:
        """Wait until so many generators have said Hello. Raises DeadlineExceeded."""
        ends_at = time.monotonic() + limit_s
        while len(self.peers) < number:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{len(self.peers)} of {number} generators said hello in {limit_s:.0f} s "
                    "(weights.join_timeout_s): see logs/generator-*.log"
                )
            self.listen(left_s)

    def begin(self, peer: str) -> None:
        """Forget what the generator answered to earlier requests."""
        self._acks.pop(peer, None)
        self._failures.pop(peer, None)

    def ask(self, peer: str, message: AnyMessage, ends_at: float) -> None:
        """Send a message and wait until it is obeyed. Raises GeneratorLost."""
        self.tell(peer, message)
        self.await_ack(peer, message, ends_at)

    def tell(self, peer: str, message: AnyMessage) -> None:
        """Send a message. Raises GeneratorLost when the generator is gone."""
        self._acks.get(peer, set()).discard(type(message).__name__)
        if not self._router.send(peer, message):
            raise GeneratorLost(f"{peer} is gone: cannot send {type(message).__name__}")

    def await_ack(self, peer: str, message: AnyMessage, ends_at: float) -> None:
        """Wait until a message that was sent is obeyed. Raises GeneratorLost."""
        name = type(message).__name__
        self.wait(
            peer, lambda: name in self._acks.get(peer, ()), ends_at, f"it did not answer {name}"
        )

    def wait(self, peer: str, is_over: Callable[[], bool], ends_at: float, why: str) -> None:
        """Poll until it is over. Raises GeneratorLost on the generator's failure or the deadline.

        ends_at: monotonic time.
        """
        ping_at = time.monotonic() + PING_S
        while not is_over():
            if peer in self._failures:
                raise GeneratorLost(f"{peer} failed: {self._failures[peer]}")
            now = time.monotonic()
            if now > ends_at:
                raise GeneratorLost(f"{peer}: {why} before the deadline (weights.deadline_s)")
            if now > ping_at:
                self.tell(peer, Ping())
                ping_at = now + PING_S
            self.listen(POLL_S)

    def drop(self, peer: str) -> None:
        """Forget a generator; it comes back with its next Hello."""
        self.peers.pop(peer, None)
        self.begin(peer)
