"""Keeps the launchers of all nodes in the same phase.

Used by `nodes.py`, in its one thread. The first node begins a phase when every other node has ended
its processes of the phase before. All nodes send a heartbeat about once a second. A node that
leaves with an error says so at once; a silent node (killed, or without network) is missed after
`expert.nodes.silence_timeout_s`. In both cases every other node raises NodeLost and ends its
processes.
"""

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Self

import msgspec

from megatron_rl.backend.environment import address_towards
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, NodesConfig
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.endpoints import NODES
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.node_messages import NodeState, PhaseKind, RoleRestart, RunPhase
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.types import AnyMessage
from megatron_rl.protocol.wire import DeadlineExceeded, Dealer, Router, WireError

BEAT_S = 1.0
_LAST_BEATS = 5
_ERROR_CHARS = 4000
_TOLD_RESTARTS = 64
Look = Callable[[], None]
"""Waits a moment, checks the node's processes, and calls `exchange`."""

log = logging.getLogger(__name__)


class NodeLost(DeadlineExceeded):
    """Another node of the run is gone; the text names it and the cause."""


class NodeRegistry:
    """The first node's knowledge of the other nodes. No sockets, no clock."""

    def __init__(self, nodes: int, limits: NodesConfig, now: float) -> None:
        self._nodes, self._limits = nodes, limits
        self._opened_at = now
        self._states: dict[int, NodeState] = {}
        self._heard_at: dict[int, float] = {}
        self._restarts: list[RoleRestart] = []

    def note(self, state: NodeState, now: float) -> None:
        """Take in a node's state. Raises InputError for wrong node numbers."""
        if state.nodes != self._nodes or not 1 <= state.node < self._nodes:
            raise InputError(
                f"a node was started as --node {state.node} of --nodes {state.nodes}, the first "
                f"one with --nodes {self._nodes}: use the same --nodes everywhere and a unique "
                "--node on each node"
            )
        known = self._states.get(state.node)
        if known is not None and known.session != state.session:
            raise InputError(f"--node {state.node} was started twice: give each its own place")
        if known is None:
            log.info("node %d has joined", state.node)
        last = known.restarts[-1].number if known is not None and known.restarts else 0
        self._restarts += [one for one in state.restarts if one.number > last]
        self._states[state.node], self._heard_at[state.node] = state, now

    def take_restarts(self) -> list[RoleRestart]:
        """Restarts on other nodes since the last call."""
        taken, self._restarts = self._restarts, []
        return taken

    def find_lost(self, now: float) -> str:
        """Text about a node that is gone; "": none."""
        for node in range(1, self._nodes):
            state = self._states.get(node)
            if state is None:
                if now - self._opened_at > self._limits.start_timeout_s:
                    limit_s = self._limits.start_timeout_s
                    return f"node {node} was not heard within {limit_s:.0f} s of the first one"
            elif state.error:
                return f"node {node} has left the run: {state.error}"
            elif now - self._heard_at[node] > self._limits.silence_timeout_s:
                silent_s = now - self._heard_at[node]
                return f"node {node} has been silent for {silent_s:.0f} s"
        return ""

    def given_up(self) -> Counter[str]:
        """Given-up replicas of the other nodes, by kind."""
        return sum((Counter(state.given_up) for state in self._states.values()), Counter())

    def addresses(self) -> dict[int, str]:
        """Where each of the other nodes is reached, of those that were heard."""
        return {node: state.address for node, state in self._states.items()}

    def behind(self, number: int) -> list[int]:
        """Nodes that have not ended their processes of a phase."""
        return [
            node
            for node in range(1, self._nodes)
            if node not in self._states or self._states[node].ended < number
        ]


class NodeLink(Closing):
    """A node's end of the link; tells the others the error with which the context is left."""

    _phase: RunPhase | None = None

    def __init__(self, addresses: dict[int, str]) -> None:
        self.addresses = addresses
        """Where each node is reached, of those that are known so far."""
        self.given_up: dict[str, int] = {}
        """Given-up replicas of this node, by kind; sent to the others."""
        self.given_up_elsewhere: dict[str, int] = {}
        """Given-up replicas of all other nodes, by kind."""
        self.missing: list[str] = []
        """Replicas that the queue misses, as the first node says."""

    @property
    def is_ending(self) -> bool:
        """Whether the phase's queue has ended."""
        return self._phase is not None and self._phase.is_ending

    @abstractmethod
    def exchange(self, now: float) -> None:
        """Send and receive heartbeats. Raises NodeLost."""

    @abstractmethod
    def leave(self, error: str) -> None:
        """Tell the others why this node ends before the run does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.leave(_text_of(error)[:_ERROR_CHARS])
        finally:
            self.close()


def _text_of(error: BaseException) -> str:
    if isinstance(error, Interrupted):
        return f"it was ended by signal {int(error.code) - 128}"
    return str(error) or type(error).__name__


class FirstNodeLink(NodeLink):
    """The end of the node that decides; on the only node of a run it opens no socket."""

    def __init__(self, config: Config, nodes: int) -> None:
        ports = config.ports
        super().__init__({0: ports.host})
        self._limits = config.nodes
        self._router = None
        if nodes > 1:
            keys = load_keys(ports.keys_dir)
            self._router = Router(ports.host, ports.nodes, keys, endpoint=NODES, label=ports.label)
        self._attendance = NodeRegistry(nodes, config.nodes, time.monotonic())
        self._peers: set[str] = set()

    def begin(self, phase: RunPhase, look: Look) -> RunPhase:
        """Begin a phase once all other nodes have ended the one before; returns it with its number.

        Raises NodeLost.
        """
        last = 0 if self._phase is None else self._phase.number
        until = time.monotonic() + self._limits.end_timeout_s
        while last and (behind := self._attendance.behind(last)):
            if time.monotonic() > until:
                raise NodeLost(
                    f"nodes {behind} have not ended phase {last} ({self._phase.kind}) "
                    f"{self._limits.end_timeout_s:.0f} s after the first node did "
                    "(expert.nodes.end_timeout_s)"
                )
            look()
        self._tell(msgspec.structs.replace(phase, number=last + 1))
        assert self._phase is not None
        return self._phase

    def end_run(self, look: Look) -> None:
        """Tell all nodes that the run is over, and wait a few beats for their answers."""
        phase = self.begin(RunPhase(0, PhaseKind.END), look)
        until = time.monotonic() + _LAST_BEATS * BEAT_S
        # `exchange` answers each further state with the phase: the first message may be lost.
        while self._attendance.behind(phase.number) and time.monotonic() < until:
            look()

    def end_phase(self) -> None:
        """Tell all nodes that the phase's queue has ended."""
        assert self._phase is not None
        self._tell(msgspec.structs.replace(self._phase, is_ending=True))

    def take_restarts(self) -> list[RoleRestart]:
        """Restarts on other nodes since the last call."""
        return self._attendance.take_restarts()

    def exchange(self, now: float) -> None:
        if self._router is None:
            return
        while self._receive(self._router, now):
            pass
        self.given_up_elsewhere = dict(self._attendance.given_up())
        self.addresses |= self._attendance.addresses()
        if lost := self._attendance.find_lost(now):
            raise NodeLost(lost)

    def _receive(self, router: Router, now: float) -> bool:
        """Handle the next message, if there is one; returns whether another may wait."""
        try:
            received = router.receive(0)
        except WireError as error:
            # A node whose states cannot be read is missed like a silent one.
            router.refuse(error.peer, error)
            return True
        if received is None:
            return False
        peer, message = received
        assert isinstance(message, NodeState), "the endpoint takes nothing else"
        self._attendance.note(message, now)
        self._peers.add(peer)
        if self._phase is not None:
            router.send(peer, self._told(self._phase))
        return True

    def _told(self, phase: RunPhase) -> RunPhase:
        given_up = dict(Counter(self.given_up) + self._attendance.given_up())
        return msgspec.structs.replace(
            phase, given_up=given_up, addresses=self.addresses, missing=self.missing
        )

    def leave(self, error: str) -> None:
        phase = self._phase or RunPhase(number=0, kind=PhaseKind.END)
        self._tell(msgspec.structs.replace(phase, error=error))

    def _tell(self, phase: RunPhase) -> None:
        self._phase = phase
        if self._router is None:
            return
        for peer in self._peers:
            # An unreachable node gets the phase in answer to its next state.
            self._router.send(peer, self._told(phase))

    def close(self) -> None:
        if self._router is not None:
            self._router.close()


class OtherNodeLink(NodeLink):
    """The end of a node other than the first."""

    def __init__(self, config: Config, node: int, nodes: int) -> None:
        ports = config.ports
        address = address_towards(ports.host)
        super().__init__({node: address})
        self._limits = config.nodes
        self._dealer = Dealer(
            f"{ports.host}:{ports.nodes}", f"node-{node}", load_keys(ports.keys_dir),
            endpoint=NODES, label=ports.label,
        )  # fmt: skip
        self._state = NodeState(node, nodes, address, session=time.time_ns(), ended=0)
        self._heard_at = time.monotonic()
        self._next_beat_at = 0.0
        self._restarts = 0

    def next_phase(self, look: Look) -> RunPhase:
        """Report that the phase before has ended here, and wait for the next.

        The first node bounds the wait while it is heard. Raises NodeLost.
        """
        if self._phase is not None:
            self._say(ended=self._phase.number)
        while self._phase is None or self._phase.number == self._state.ended:
            look()
        if self._phase.kind == PhaseKind.END:
            self._say(ended=self._phase.number)
        return self._phase

    def exchange(self, now: float) -> None:
        if now >= self._next_beat_at:
            self._say(given_up=self.given_up)
            self._next_beat_at = now + BEAT_S
        while (message := self._dealer.receive(0)) is not None:
            self._take(message)
            self._heard_at = now
        if now - self._heard_at > self._limit_s:
            silent_s = now - self._heard_at
            raise NodeLost(
                f"the first node ({self._dealer.address}) has been silent for {silent_s:.0f} s"
            )

    @property
    def _limit_s(self) -> float:
        is_known = self._phase is not None
        return self._limits.silence_timeout_s if is_known else self._limits.start_timeout_s

    def _take(self, message: AnyMessage) -> None:
        if not isinstance(message, RunPhase):
            raise WireError(f"the first node sent {type(message).__name__}")
        if message.error:
            raise NodeLost(f"the first node has left the run: {message.error}")
        self._phase, self.missing = message, message.missing
        self.addresses |= message.addresses
        self.given_up_elsewhere = dict(Counter(message.given_up) - Counter(self._state.given_up))

    def tell_restart(self, restart: RoleRestart) -> None:
        """Report a restarted role of this node to the first node."""
        self._restarts += 1
        told = msgspec.structs.replace(restart, number=self._restarts)
        self._say(restarts=(*self._state.restarts, told)[-_TOLD_RESTARTS:])

    def leave(self, error: str) -> None:
        self._say(error=error)

    def _say(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._dealer.send(self._state)

    def close(self) -> None:
        self._dealer.close()
