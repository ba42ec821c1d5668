"""The first node's knowledge of the other nodes: who is there, what the run lacks without one.

Used by `node_link.py`. No sockets, no clock: times are monotonic seconds.
"""

import logging
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import NodesConfig
from megatron_rl.protocol.node_messages import NodeState, RoleRestart, TrainerPart

log = logging.getLogger(__name__)

_REPLACED_S = 5.0
"""A launcher sends its state once a second; after this silence a new one may take its place."""


class PlaceTaken(InputError):
    """Another launcher has the place of a node that may return."""


class Loss(NamedTuple):
    """A lost node of the trainer, which may come back."""

    why: str
    at: float


class NodeRegistry:
    """The other nodes, configured and joined."""

    def __init__(self, nodes: int, limits: NodesConfig, now: float) -> None:
        self._nodes, self._limits = nodes, limits
        self._opened_at = now
        self._states: dict[int, NodeState] = {}
        self._heard_at: dict[int, float] = {}
        self._restarts: list[RoleRestart] = []
        self.away: dict[int, str] = {}
        """Nodes without which the run continues, and why each is away."""
        self._events: list[str] = []
        self.may_return: Collection[int] = ()
        """Nodes of the trainer that may be lost and come back; the trainer then starts again."""
        self.lost: dict[int, Loss] = {}
        """Those that are lost now."""
        self._interruptions: list[str] = []
        self._replaced: set[int] = set()
        """Sessions of trainer nodes whose place another launcher has taken."""

    def note(self, state: NodeState, now: float) -> None:
        """Take in a node's state. Raises InputError for wrong numbers of configured nodes.

        Raises PlaceTaken for a second launcher of a node that may return.
        """
        if state.session in self._replaced:
            raise PlaceTaken(f"an earlier launcher of node {state.node} is heard, and is refused")
        known = self._states.get(state.node)
        is_new = known is None or known.session != state.session
        is_twice = known is not None and is_new and not self._is_gone(known, now)
        if state.is_joined and is_twice:
            # The run does not end for it.
            log.warning("node %d has joined twice", state.node)
            return
        is_configured = 1 <= state.node < self._nodes
        if state.nodes != self._nodes or not (is_configured or state.is_joined):
            raise InputError(
                f"a node was started as --node {state.node} of --nodes {state.nodes}, the first "
                f"one with --nodes {self._nodes}: use the same --nodes everywhere and a unique "
                "--node on each node"
            )
        if is_twice and state.node in self.may_return:
            raise PlaceTaken(f"a second launcher of node {state.node} is refused")
        if is_twice:
            raise InputError(f"--node {state.node} was started twice: give each its own place")
        if known is None and state.is_joined:
            self._events.append(f"node {state.node} has joined with {_text_of_roles(state)}")
        elif known is None:
            log.info("node %d is there", state.node)
        elif not (state.error or state.is_leaving):
            self._note_return(state, is_new=is_new)
        if known is not None and is_new and state.node in self.may_return:
            self._replaced.add(known.session)
        last = 0
        if known is not None and not is_new and known.restarts:
            last = known.restarts[-1].number
        self._restarts += [one for one in state.restarts if one.number > last]
        self._states[state.node], self._heard_at[state.node] = state, now

    def _note_return(self, state: NodeState, *, is_new: bool) -> None:
        was_away, loss = self.away.pop(state.node, None), self.lost.pop(state.node, None)
        if not (is_new or was_away or loss):
            return
        self._events.append(f"node {state.node} is back with {_text_of_roles(state)}")
        if is_new and loss is None and state.node in self.may_return:
            # Its end was not noticed yet.
            self._interruptions.append(f"node {state.node} was started again")

    def _is_gone(self, known: NodeState, now: float) -> bool:
        """Whether another session may take the place of a node that the run can wait for."""
        node, is_silent = known.node, now - self._heard_at[known.node] > _REPLACED_S
        can_wait = not known.is_vital or node in self.may_return
        return node in self.away or node in self.lost or (is_silent and can_wait)

    @property
    def present(self) -> int:
        """Number of the other nodes that are there."""
        return len(self._states.keys() - self.away.keys())

    def take_restarts(self) -> list[RoleRestart]:
        """Restarts on other nodes since the last call."""
        taken, self._restarts = self._restarts, []
        return taken

    def take_events(self) -> list[str]:
        """Texts about nodes that joined, left or came back, since the last call."""
        taken, self._events = self._events, []
        return taken

    def take_interruptions(self) -> list[str]:
        """Texts about nodes without which the trainer has to start again, since the last call."""
        taken, self._interruptions = self._interruptions, []
        return taken

    def find_lost(self, now: float) -> str:
        """Text about a vital node that is gone for good; "": none.

        Other nodes that are gone are `away`, or `lost` while they may return.
        """
        limit_s = self._limits.start_timeout_s
        if now - self._opened_at > limit_s:
            for node in range(1, self._nodes):
                if node not in self._states:
                    return f"node {node} was not heard within {limit_s:.0f} s of the first one"
        for node, state in self._states.items():
            if (loss := self.lost.get(node)) is not None:
                if now - loss.at > self._limits.wait_s:
                    return f"{loss.why}, and did not come back within {self._wait_text}"
                continue
            why = "" if node in self.away else self._why_gone(state, now)
            if why and node in self.may_return and not state.error:
                self.lost[node] = Loss(why, now)
                self._interruptions.append(why)
                self._events.append(
                    f"{why}: the trainer waits for it at most {self._wait_text}; `megatron-rl "
                    "node` with its number, on any node like it, takes its place"
                )
            elif why and state.is_vital:
                return why
            elif why:
                self.away[node] = why
                self._events.append(f"{why}: the run continues without its {_text_of_roles(state)}")
        return ""

    @property
    def _wait_text(self) -> str:
        return f"{self._limits.wait_s:.0f} s (expert.nodes.wait_s)"

    def _why_gone(self, state: NodeState, now: float) -> str:
        if state.is_leaving:
            return f"node {state.node} leaves the run"
        if state.error:
            return f"node {state.node} has left the run: {state.error}"
        silent_s = now - self._heard_at[state.node]
        if silent_s > self._limits.silence_timeout_s:
            return f"node {state.node} has been silent for {silent_s:.0f} s"
        return ""

    def given_up(self) -> dict[str, int]:
        """Given-up replicas of the other nodes, by kind; replicas of joined nodes count as -1."""
        return sum_of(*map(self._given_up_of, self._states.values()))

    def _given_up_of(self, state: NodeState) -> dict[str, int]:
        is_away = state.node in self.away
        if not state.is_joined:
            return state.replicas if is_away else state.given_up
        there = {} if is_away else state.replicas
        return {kind: state.given_up.get(kind, 0) - count for kind, count in there.items()}

    def parts(self) -> dict[int, TrainerPart]:
        """Parts of the trainer on the other nodes that are there."""
        states = self._states.items()
        return {node: state.trainer for node, state in states if node not in self.lost}

    def addresses(self) -> dict[int, str]:
        """Where each of the other nodes is reached, of those that were heard."""
        return {node: state.address for node, state in self._states.items()}

    def behind(self, number: int) -> list[int]:
        """Nodes that have not ended their processes of a phase."""
        return [
            node
            for node in sorted(self._states.keys() | range(1, self._nodes))
            if node not in self.away
            and (node not in self._states or self._states[node].ended < number)
        ]


def sum_of(*counts: dict[str, int], minus: dict[str, int] | None = None) -> dict[str, int]:
    """Sums by key, which may be negative; without zeros."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    total.subtract(minus or {})
    return {key: count for key, count in total.items() if count}


def _text_of_roles(state: NodeState) -> str:
    """`2 generators and 1 verifier`."""
    counts = state.replicas.items()
    found = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts if count]
    return " and ".join(found) or "no role"
