"""Trainer rank 0's messages with all generators about weights.

ROUTER of the weights endpoint: StartRequest, MayStart, Hello, Release, Reclaim, Pause, Receive,
Resume, Fence, Ping, LeaveGroup and their Acks. Every wait has a deadline.
A failure of one generator is returned as its reason, and concerns that generator alone.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.tree import PortsConfig
from megatron_rl.protocol.endpoints import WEIGHTS, names_of
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.types import (
    Ack,
    AnyMessage,
    Failed,
    Fence,
    Hello,
    MayStart,
    Ping,
    Resume,
    StartRequest,
)
from megatron_rl.protocol.wire import DeadlineExceeded, Router, WireError

log = logging.getLogger(__name__)

POLL_S = 0.002
"""Seconds between two polls of a condition: no message announces a key in a store."""
_ORDERS = frozenset(names_of(WEIGHTS.dealer_hears))
PING_S = 0.5
"""Sending is what notices a socket that is gone: ROUTER sockets report no lost connection."""


def open_router(ports: PortsConfig) -> Router:
    """Rank 0's socket for all generators. Raises WireError."""
    keys = load_keys(ports.keys_dir)
    return Router(ports.host, ports.weights, keys, endpoint=WEIGHTS, label=ports.label)


class GeneratorLink:
    """The generators that are present, and requests to them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.peers: dict[str, Hello] = {}
        """The last Hello of each generator that has not been dropped."""
        self._sessions: dict[str, int] = {}
        """Session of each generator being served, since `begin`."""
        self._acks: dict[str, set[str]] = {}
        self._failures: dict[str, str] = {}
        self.may_start = True
        """Whether engines that ask before they start have room."""
        self._starting: dict[str, int] = {}
        """Session of each generator that may start and has not said Hello yet."""
        self._waiting: set[str] = set()
        """Generators that have asked, and wait until they may start."""

    def listen(self, wait_s: float = 0.0) -> None:
        """Handle all messages that have arrived; wait for a first one up to wait_s."""
        while (received := self._receive(wait_s)) is not None:
            wait_s = 0.0
            peer, message = received
            match message:
                case StartRequest(session):
                    self._let_start(peer, session)
                case Hello():
                    self._greet(peer, message)
                # Messages of strangers are ignored.
                case Ack() if self._knows(peer):
                    self._acks.setdefault(peer, set()).add(message.done)
                case Failed() if self._knows(peer):
                    self._failures[peer] = f"{message.doing}: {message.reason}"

    def _knows(self, peer: str) -> bool:
        return peer in self.peers or peer in self._sessions

    def _receive(self, wait_s: float) -> tuple[str, AnyMessage] | None:
        try:
            received = self._router.receive(wait_s)
        except WireError as error:
            return self._refuse(error.peer, error)
        if received is not None:
            peer, message = received
            if isinstance(message, Ack) and message.done not in _ORDERS:
                return self._refuse(peer, WireError(f"there is no order {message.done!r}"))
        return received

    def _refuse(self, peer: str, error: WireError) -> tuple[str, AnyMessage]:
        """A message of one generator must not end training for the others."""
        self._router.refuse(peer, error)
        return peer, Failed("message", str(error))

    def _greet(self, peer: str, hello: Hello) -> None:
        # A generator that is not served repeats its Hello: only a new session is a restart.
        known = self.peers.get(peer)
        if known is not None and known.session != hello.session:
            self._failures[peer] = "it restarted"
        self.peers[peer] = hello
        self._starting.pop(peer, None)
        self._waiting.discard(peer)

    def _let_start(self, peer: str, session: int) -> None:
        if self._starting.get(peer, session) != session:
            # The session that was told to start has ended.
            del self._starting[peer]
        if self.peers.pop(peer, None) is not None:
            self._failures[peer] = "it restarted"
        # A generator repeats its request, so one that must wait needs no answer.
        self._waiting.add(peer)
        if self.may_start and self._router.send(peer, MayStart()):
            self._starting[peer] = session
            self._waiting.discard(peer)

    def await_requests(self, number: int, limit_s: float) -> bool:
        """Wait until `number` generators have said Hello, or wait until they may start.

        Returns False if limit_s passed before.
        """
        return self._listen_until(lambda: len(self.peers.keys() | self._waiting) >= number, limit_s)

    def _listen_until(self, is_over: Callable[[], bool], limit_s: float) -> bool:
        ends_at = time.monotonic() + limit_s
        while not is_over() and (left_s := ends_at - time.monotonic()) > 0:
            self.listen(left_s)
        return is_over()

    def await_starts(self, ends_at: float) -> None:
        """Wait until no engine is starting: each is ready, lost, or given up at `ends_at`."""
        ping_at = time.monotonic()
        while self._starting and time.monotonic() < ends_at:
            if time.monotonic() >= ping_at:
                for peer in list(self._starting):
                    if not self._router.send(peer, Ping()):
                        del self._starting[peer]
                ping_at = time.monotonic() + PING_S
            self.listen(POLL_S)
        for peer in self._starting:
            log.warning("%s: its engine is not ready, and keeps the memory that it has", peer)
        self._starting.clear()

    def await_peers(self, number: int, limit_s: float, *, least: int | None = None) -> None:
        """Wait until `number` generators have said Hello, or limit_s has passed.

        least: how many must have said Hello by then; None: all. Raises DeadlineExceeded.
        """
        if self._listen_until(lambda: len(self.peers) >= number, limit_s):
            return
        text = (
            f"{len(self.peers)} of {number} generators said hello in {limit_s:.0f} s "
            "(expert.weights.join_timeout_s): see logs/generator-*.log"
        )
        if len(self.peers) < (number if least is None else least):
            raise DeadlineExceeded(text)
        log.warning("training begins without the others: %s", text)

    def pop_leaving(self) -> list[str]:
        """Forget the generators that leave; returns their names. They may say so again."""
        leaving = sorted(peer for peer, hello in self.peers.items() if hello.is_leaving)
        for peer in leaving:
            self.drop(peer)
        return leaving

    def begin(self, peer: str, session: int) -> None:
        """Start to serve a generator: its answers to earlier requests no longer count.

        session: of the Hello for which the messages are made. No later message goes to another
        session, even if its Hello came while another generator was served.
        """
        self._forget_answers(peer)
        self._sessions[peer] = session

    def _forget_answers(self, peer: str) -> None:
        self._acks.pop(peer, None)
        self._failures.pop(peer, None)

    def _has_restarted(self, peer: str) -> bool:
        """Whether the generator has said Hello with another session than the one being served."""
        hello = self.peers.get(peer)
        return hello is not None and self._sessions.get(peer, hello.session) != hello.session

    def tell(self, peer: str, message: AnyMessage) -> str:
        """Send a message. Returns why the generator is lost; "": it is not."""
        if self._has_restarted(peer):
            return f"{peer} failed: it restarted"
        # An Ack that is still here answered an earlier message of this kind.
        self._acks.get(peer, set()).discard(type(message).__name__)
        if self._router.send(peer, message):
            return ""
        return f"{peer} is gone: cannot send {type(message).__name__}"

    def await_acks(
        self, peers: Collection[str], message: AnyMessage, ends_at: Callable[[], float]
    ) -> dict[str, str]:
        """As `await_all`, for the Acks of a message that was sent to all of them."""
        name = type(message).__name__
        why = f"it did not answer {name}"
        return self.await_all(peers, lambda peer: name in self._acks.get(peer, ()), ends_at, why)

    def await_all(
        self,
        peers: Collection[str],
        is_over: Callable[[str], bool],
        ends_at: Callable[[], float],
        why: str,
    ) -> dict[str, str]:
        """Poll until it is over for each generator; the reasons of those that were lost before.

        ends_at: monotonic time of the deadline, asked anew at each poll. why: text for those for
        which it is not over by then.
        """
        lost: dict[str, str] = {}
        waiting, ping_at = set(peers), time.monotonic() + PING_S
        # First the check: an answer that came together with a later failure counts.
        while waiting := {peer for peer in waiting if not is_over(peer)}:
            now = time.monotonic()
            for peer in sorted(waiting):
                if peer in self._failures:
                    lost[peer] = f"{peer} failed: {self._failures[peer]}"
                elif now > ping_at and (reason := self.tell(peer, Ping())):
                    lost[peer] = reason
                elif now > ends_at():
                    lost[peer] = f"{peer}: {why} before the deadline (expert.weights.deadline_s)"
            if now > ping_at:
                ping_at = now + PING_S
            waiting -= lost.keys()
            if waiting:
                # Messages of all generators: those of others are kept for their turn.
                self.listen(POLL_S)
        return lost

    def drop(self, peer: str) -> None:
        """Forget a generator; its next Hello, which may have arrived already, brings it back."""
        if not self._has_restarted(peer):
            self.peers.pop(peer, None)
        self._sessions.pop(peer, None)
        self._forget_answers(peer)


@dataclass
class Outcome:
    """Result of one weight sync on rank 0; other ranks know only `failed`."""

    failed: dict[str, str] = field(default_factory=dict)
    """Dropped generator -> reason."""
    pauses_s: list[float] = field(default_factory=list)
    """Seconds for which each generator was paused."""
    wire_bytes: int = 0
    peak_bytes: int = 0
    """Peak memory of buffers on an engine rank."""
    damaged: int = 0
    """Parcels whose digest did not match their content."""
    transfers_s: list[float] = field(default_factory=list)
    """Seconds in which the slowest rank of each generator received, if the method reports them."""


class Conversation:
    """Requests to all generators of a weight sync; a lost generator is left out from then on."""

    def __init__(
        self,
        link: GeneratorLink,
        members: Mapping[str, Hello],
        outcome: Outcome,
        deadline_s: float,
    ) -> None:
        """outcome: lost generators are added to it."""
        self._link, self._deadline_s = link, deadline_s
        self._started = time.monotonic()
        self.outcome = outcome
        self.present = dict(members)
        """Those that are not lost."""
        for name, hello in members.items():
            link.begin(name, hello.session)

    def ask(self, message: AnyMessage, names: Sequence[str] | None = None) -> None:
        """Send to generators, and wait for all Acks within one deadline. names: None: to all."""
        # All are told before the first wait: they work at the same time.
        asked = list(self.present if names is None else names)
        self.tell(dict.fromkeys(asked, message))
        self.await_acks(asked, message)

    def tell(self, messages: Mapping[str, AnyMessage]) -> None:
        """Send the generators that remain a message each, by name."""
        for name, message in messages.items():
            if name in self.present and (reason := self._link.tell(name, message)):
                self.lose({name: reason})

    def await_acks(self, names: Sequence[str], message: AnyMessage) -> None:
        """Wait until those that remain have answered such a message, within one deadline."""
        ends_at = time.monotonic() + self._deadline_s
        present = [name for name in names if name in self.present]
        self.lose(self._link.await_acks(present, message, lambda: ends_at))

    def lose(self, reasons: Mapping[str, str]) -> None:
        """Continue without generators, which serve nothing until a weight sync succeeds."""
        for name, reason in reasons.items():
            del self.present[name]
            self.outcome.failed[name] = reason
            if unheard := self._link.tell(name, Fence(reason)):
                log.info("%s", unheard)

    def resume(self, version: int, names: Sequence[str]) -> None:
        """Let these generators continue."""
        self.ask(Resume(version), names)
        held = [name for name in names if name in self.present]
        self.outcome.pauses_s += [time.monotonic() - self._started] * len(held)
