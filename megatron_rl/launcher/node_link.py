"""Keeps the launchers of all nodes in the same phase.

Used by `nodes.py`, in its one thread. The first node begins a phase when every other node has ended
its processes of the phase before. All nodes send a heartbeat about once a second. A node that
leaves with an error says so at once; a silent node (killed, or without network) is missed after
`expert.nodes.silence_timeout_s`. If the node has the queue, trainer ranks, the scorer or a part of
an engine across nodes, or too few replicas are left, every other node raises NodeLost and ends its
processes. Else the run continues without it, and it may come back. A trainer on several nodes waits
`expert.nodes.wait_s` for a silent one (`shared_trainer.py`). Nodes that join later are numbered
after the configured ones.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Self

import msgspec

from megatron_rl.backend.environment import address_towards
from megatron_rl.config.tree import Config
from megatron_rl.launcher.node_errors import (
    NodeLost,
    end_after,
    has_role_failed,
    signal_of,
    text_of,
)
from megatron_rl.launcher.node_registry import Least, NodeRegistry, PlaceTaken, sum_of
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.endpoints import NODES
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.node_messages import (
    NodeState,
    PhaseKind,
    RoleRestart,
    RunPhase,
    TrainerOrder,
    TrainerPart,
)
from megatron_rl.protocol.wire import Dealer, Router, WireError

BEAT_S = 1.0
REDIAL_S = 5.0
"""A node that has not heard the first one for so long connects anew, again and again."""
_LAST_BEATS = 5
_ERROR_CHARS = 4000
_TOLD_RESTARTS = 64
Look = Callable[[], None]
"""Waits a moment, checks the node's processes, and calls `exchange`."""

log = logging.getLogger(__name__)


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

    @property
    def awaits_first(self) -> bool:
        """Whether it has never heard the first node, which the run may still lack."""
        return False

    @property
    def order(self) -> TrainerOrder:
        """What a trainer on several nodes is to do."""
        return TrainerOrder() if self._phase is None else self._phase.trainer

    @abstractmethod
    def exchange(self, now: float) -> None:
        """Send and receive heartbeats. Raises the errors of `end_after`, PlaceTaken."""

    @abstractmethod
    def leave(self, error: BaseException) -> None:
        """Tell the others why this node ends before the run does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.leave(error)
        finally:
            self.close()


def _generators(config: Config) -> Least:
    return Least(config.generator.replicas, config.generator.min_replicas)


class FirstNodeLink(NodeLink):
    """The end of the node that decides."""

    def __init__(self, config: Config, nodes: int, gpus_per_node: int = 0) -> None:
        """gpus_per_node: as in NodeState."""
        ports = config.ports
        super().__init__({0: ports.host})
        self._limits = config.nodes
        self._least = {
            "generator": _generators(config),
            "verifier": Least(nodes, 1),
        }
        keys = load_keys(ports.keys_dir)
        # On one node it is for nodes that join.
        self._router = Router(ports.host, ports.nodes, keys, endpoint=NODES, label=ports.label)
        self.registry = NodeRegistry(nodes, config.nodes, time.monotonic(), gpus_per_node)
        self._peers: set[str] = set()
        self._waiting: set[str] = set()
        """Launchers whose place another one has, which may live."""
        self._interruption = ""
        self.started = 0.0
        """As in RunPhase."""

    def begin(self, phase: RunPhase, look: Look) -> RunPhase:
        """Begin a phase once all other nodes have ended the one before; returns it with its number.

        Raises NodeLost.
        """
        last = 0 if self._phase is None else self._phase.number
        until = time.monotonic() + self._limits.end_timeout_s
        while last and (behind := self.registry.behind(last)):
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
        while self.registry.behind(phase.number) and time.monotonic() < until:
            look()

    def end_phase(self) -> None:
        """Tell all nodes that the phase's queue has ended."""
        assert self._phase is not None
        self._tell(msgspec.structs.replace(self._phase, is_ending=True))

    def order_trainer(self, order: TrainerOrder) -> None:
        """Tell all nodes which start of the trainer is to run."""
        assert self._phase is not None
        self._tell(msgspec.structs.replace(self._phase, trainer=order))

    def stop_trainer(self) -> None:
        """Tell all nodes to end the trainer's latest start."""
        start = self.order.start
        self.order_trainer(TrainerOrder(start, stop=start))

    @property
    def lost(self) -> dict[int, int]:
        """Lost nodes for which the trainer waits, and the number of each loss."""
        return {node: loss.number for node, loss in self.registry.lost.items()}

    def take_interruption(self) -> str:
        """Why the trainer's latest start was ended for a node that was lost; "": it was not."""
        taken, self._interruption = self._interruption, ""
        return taken

    def _end_start(self) -> None:
        """End the trainer's latest start once one of its nodes was lost or started again.

        At once, so that no new launcher of a node takes part in a start without the other ranks.
        """
        if why := self.registry.take_interruptions():
            self._interruption = self._interruption or why[0]
            self.stop_trainer()

    def exchange(self, now: float) -> None:
        while self._receive(now):
            pass
        lost = self.registry.find_lost(now)
        self._end_start()
        self.given_up_elsewhere = self.registry.given_up()
        self.addresses |= self.registry.addresses()
        given_up = sum_of(self.given_up, self.given_up_elsewhere)
        if lost := lost or self.registry.find_too_few(given_up, self._least):
            ending = self.registry.ending
            raise end_after(lost, ending.signal, has_failed=ending.has_failed)

    def _receive(self, now: float) -> bool:
        """Handle the next message, if there is one; returns whether another may wait."""
        try:
            received = self._router.receive(0)
        except WireError as error:
            # A node whose states cannot be read is missed like a silent one.
            self._router.refuse(error.peer, error)
            return True
        if received is None:
            return False
        peer, message = received
        assert isinstance(message, NodeState), "the endpoint takes nothing else"
        try:
            has_place = self.registry.note(message, now)
        except PlaceTaken as error:
            why = str(error)
            log.warning("node %d is refused: %s", message.node, why)
            self._waiting.discard(peer)
            self._router.send(peer, RunPhase(0, PhaseKind.END, error=why, refused=message.session))
            return True
        if not has_place:
            self._waiting.add(peer)
            return True
        self._waiting.discard(peer)
        self._peers.add(peer)
        self._end_start()
        if self._phase is not None:
            self._router.send(peer, self._told(self._phase))
        return True

    def _told(self, phase: RunPhase) -> RunPhase:
        given_up = sum_of(self.given_up, self.registry.given_up())
        return msgspec.structs.replace(
            phase, given_up=given_up, addresses=self.addresses, missing=self.missing,
            started=self.started,
        )  # fmt: skip

    def leave(self, error: BaseException) -> None:
        phase, text = self._phase or RunPhase(0, PhaseKind.END), text_of(error)[:_ERROR_CHARS]
        self._tell(msgspec.structs.replace(phase, error=text, signal=signal_of(error)))

    def _tell(self, phase: RunPhase) -> None:
        self._phase = phase
        is_over = phase.error or phase.kind == PhaseKind.END
        for peer in self._peers | self._waiting if is_over else self._peers:
            # An unreachable node gets the phase in answer to its next state.
            self._router.send(peer, self._told(phase))

    def close(self) -> None:
        self._router.close()


class OtherNodeLink(NodeLink):
    """The end of a node other than the first."""

    def __init__(
        self, config: Config, node: int, nodes: int, *,
        replicas: dict[str, int] | None = None, is_vital: bool = True, gpus_per_node: int = 0,
    ) -> None:  # fmt: skip
        """replicas, is_vital, gpus_per_node: as in NodeState. It has joined if node >= nodes."""
        ports = config.ports
        address = address_towards(ports.host)
        super().__init__({node: address})
        self._limits, self._generators = config.nodes, _generators(config)
        session = time.time_ns()
        # A second launcher of the node, which is refused, does not take over this one's connection.
        name = f"node-{node}-{session}"
        self._dealer = Dealer(
            f"{ports.host}:{ports.nodes}", name, load_keys(ports.keys_dir),
            endpoint=NODES, label=ports.label,
        )  # fmt: skip
        self._state = NodeState(
            node, nodes, address, session=session, ended=0,
            replicas=replicas or {}, is_vital=is_vital, is_joined=node >= nodes,
            gpus_per_node=gpus_per_node,
        )  # fmt: skip
        self._heard_at = self._dialled_at = time.monotonic()
        self._next_beat_at = 0.0
        self._restarts = 0
        self._is_refused = False

    def next_phase(self, look: Look) -> RunPhase:
        """Report that the phase before has ended here, and wait for the next.

        A node that joins in a phase that is ending waits for the one after it. The first node
        bounds the wait while it is heard. Raises NodeLost, PlaceTaken.
        """
        if self._phase is not None:
            self._say(ended=self._phase.number)
        while self._phase is None or self._phase.number == self._state.ended:
            look()
            phase = self._phase
            if self._state.is_joined and phase is not None and phase.is_ending:
                self._say(ended=phase.number)
        if self._phase.kind == PhaseKind.END:
            self._say(ended=self._phase.number)
        return self._phase

    def exchange(self, now: float) -> None:
        if now >= self._next_beat_at:
            self._say(given_up=self.given_up)
            self._next_beat_at = now + BEAT_S
        while (message := self._dealer.receive(0)) is not None:
            assert isinstance(message, RunPhase), "the endpoint takes nothing else"
            self._take(message)
            self._heard_at = now
        # States are said whole: one that is lost with its connection is made good by the next.
        if now - max(self._heard_at, self._dialled_at) > REDIAL_S:
            self._dealer.redial()
            self._dialled_at = now
        if now - self._heard_at > self._limit_s:
            silent_s = now - self._heard_at
            raise NodeLost(
                f"the first node ({self._dealer.address}) has been silent for {silent_s:.0f} s"
            )

    @property
    def awaits_first(self) -> bool:
        # A node joins a run that is there.
        return self._phase is None and not self._state.is_joined

    @property
    def _limit_s(self) -> float:
        return self._limits.patience_s(is_there=not self.awaits_first)

    def _take(self, message: RunPhase) -> None:
        if message.refused == self._state.session:
            self._is_refused = True
            raise PlaceTaken(
                "the first node refuses this launcher, and the run continues without it: "
                f"{message.error}"
            )
        if message.refused:
            return
        if message.error:
            text = f"the first node has left the run: {message.error}"
            raise end_after(text, message.signal)
        self._phase, self.missing = message, message.missing
        self.addresses |= message.addresses
        # A node that joined counts its own replicas alone.
        if not self._state.is_joined:
            self.given_up_elsewhere = sum_of(message.given_up, minus=self._state.given_up)

    def tell_restart(self, restart: RoleRestart) -> None:
        """Report a restarted role of this node to the first node."""
        self._restarts += 1
        told = msgspec.structs.replace(restart, number=self._restarts)
        self._say(restarts=(*self._state.restarts, told)[-_TOLD_RESTARTS:])

    def tell_part(self, part: TrainerPart) -> None:
        """Tell the first node of this node's part of the trainer, when it has changed."""
        if part != self._state.trainer:
            self._say(trainer=part)

    def find_too_few(self) -> str:
        """Text about the run's generators, if this node leaves too few of them; "": it does not."""
        (replicas, least), kind = self._generators, "generator"
        own = self._state.replicas.get(kind, 0) - self._state.given_up.get(kind, 0)
        left = replicas - self._phase.given_up.get(kind, 0) - own if self._phase else least
        text = f"{left} of {replicas} generators are fewer than generator.min_replicas = {least}"
        return text if left < least else ""

    def announce_leaving(self) -> None:
        """Tell the first node that this one leaves in good order; it no longer waits for it."""
        self._say(is_leaving=True)

    def leave(self, error: BaseException) -> None:
        # The launcher that has the place speaks for the node.
        if not self._is_refused:
            text, has_failed = text_of(error)[:_ERROR_CHARS], has_role_failed(error)
            self._say(error=text, signal=signal_of(error), has_failed=has_failed)

    def _say(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._dealer.send(self._state)

    def close(self) -> None:
        self._dealer.close()
