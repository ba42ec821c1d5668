"""The first node's knowledge of the other nodes: who is there, what the run lacks without one.

Used by `node_link.py`. No sockets, no clock: times are monotonic seconds.
"""

import logging
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, NoReturn

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import NodesConfig
from megatron_rl.protocol.node_messages import NodeState, RoleRestart, TrainerPart

log = logging.getLogger(__name__)

_REPLACED_S = 5.0
"""A launcher sends its state once a second; after this silence a new one may take its place."""
_ALIVE_S = 2.0
"""A launcher is alive if it sends a state this long after a second launcher of its node came."""
_SEEN_S = 0.5
"""A new launcher waits this long for a place. After a stall of the first node, states of both
launchers arrive at once, and the new one's may be read first."""


class PlaceTaken(InputError):
    """A launcher has no place in the run, and ends; the run continues."""


class Loss(NamedTuple):
    """A lost node of the trainer, which may come back."""

    why: str
    at: float
    number: int
    """Of the losses so far, this one included."""


class Ending(NamedTuple):
    """How a node has ended, as in NodeState."""

    signal: int = 0
    has_failed: bool = False


class Least(NamedTuple):
    """Replicas of one kind of role on the configured nodes, and how many of all the run needs."""

    replicas: int
    least: int


class NodeRegistry:
    """The other nodes, configured and joined."""

    def __init__(self, nodes: int, limits: NodesConfig, now: float, gpus_per_node: int = 0) -> None:
        """gpus_per_node: as in NodeState."""
        self._nodes, self._limits, self._gpus_per_node = nodes, limits, gpus_per_node
        self._opened_at = now
        self._states: dict[int, NodeState] = {}
        self._heard_at: dict[int, float] = {}
        self._restarts: list[RoleRestart] = []
        self.away: dict[int, str] = {}
        """Nodes without which the run continues, and why each is away."""
        self.ending = Ending()
        """How the node that was missed last has ended."""
        self._events: list[str] = []
        self.may_return: Collection[int] = ()
        """Nodes of the trainer that may be lost and come back; the trainer then starts again."""
        self.lost: dict[int, Loss] = {}
        """Those that are lost now."""
        self._losses = 0
        self._interruptions: list[str] = []
        self._since: dict[int, float] = {}
        """When the launcher of each node was first heard."""
        self._waiting: dict[tuple[int, int], float] = {}
        """Launchers that want the place of another, and when each was first heard."""
        self._replaced: set[tuple[int, int]] = set()
        """Launchers whose place another one has taken."""
        self._refused: dict[tuple[int, int], str] = {}
        """Launchers without a place, and why."""

    def note(self, state: NodeState, now: float) -> bool:
        """Take in a node's state. False: its launcher waits, as another has its place and may live.

        Raises PlaceTaken for a launcher without a place. The run never ends for it.
        """
        if why := self._refused.get(_key(state)):
            raise PlaceTaken(why)
        if _key(state) in self._replaced:
            if state.is_leaving:
                return True
            raise PlaceTaken(f"another launcher has taken the place of node {state.node}")
        self._check_numbers(state)
        known = self._states.get(state.node)
        is_new = known is None or known.session != state.session
        if known is not None and is_new and not self._may_replace(known, state, now):
            return False
        if known is None and state.is_joined:
            self._events.append(f"node {state.node} has joined with {_text_of_roles(state)}")
        elif known is None:
            log.info("node %d is there", state.node)
        elif not (state.error or state.is_leaving):
            self._note_return(state, is_new=is_new)
        last = 0
        if is_new:
            self._since[state.node] = now
            self._waiting.pop(_key(state), None)
            if known is not None:
                self._replaced.add(_key(known))
        elif known is not None and known.restarts:
            last = known.restarts[-1].number
        self._restarts += [one for one in state.restarts if one.number > last]
        self._states[state.node], self._heard_at[state.node] = state, now
        return True

    def _check_numbers(self, state: NodeState) -> None:
        if state.nodes == self._nodes and (state.is_joined or 1 <= state.node < self._nodes):
            self._check_gpus(state)
            return
        spare = self._limits.spare
        self._refuse(
            state,
            f"a launcher was started as --node {state.node} of --nodes {state.nodes + spare}, the "
            f"first one with --nodes {self._nodes + spare}: use the same --nodes everywhere and a "
            "unique --node on each node",
        )

    def _check_gpus(self, state: NodeState) -> None:
        """Refuse a launcher that has placed the roles of the run on other nodes than this one."""
        if state.is_joined or state.gpus_per_node == self._gpus_per_node:
            return
        self._refuse(
            state,
            f"node {state.node} counts {state.gpus_per_node} GPUs on each node, and the first one "
            f"{self._gpus_per_node}, so the two would start some roles twice and others never: "
            "give the same --gpus-per-node to `megatron-rl node` on all nodes, or list equally "
            "many GPUs in CUDA_VISIBLE_DEVICES",
        )

    def _may_replace(self, known: NodeState, state: NodeState, now: float) -> bool:
        """Whether a new session takes the place of a known one. Raises PlaceTaken if that lives."""
        node, heard_at = known.node, self._heard_at[known.node]
        if state.error or state.is_leaving:
            return False
        if node in self.away or node in self.lost:
            return True
        came_at = self._waiting.setdefault(_key(state), now)
        if heard_at - came_at > _ALIVE_S:
            self._refuse(
                state,
                f"--node {node} was started twice: another launcher, at {known.address}, has had "
                f"this place for {now - self._since[node]:.0f} s and is alive. Start this one with "
                "the --node of a place that is free, or not at all",
            )
        can_wait = not known.is_vital or node in self.may_return
        return can_wait and now - heard_at > _REPLACED_S and now - came_at > _SEEN_S

    def _refuse(self, state: NodeState, why: str) -> NoReturn:
        self._refused[_key(state)] = why
        self._events.append(
            f"a launcher at {state.address} is refused, and the run continues: {why}"
        )
        raise PlaceTaken(why)

    def _note_return(self, state: NodeState, *, is_new: bool) -> None:
        was_away, loss = self.away.pop(state.node, None), self.lost.pop(state.node, None)
        if not (is_new or was_away or loss):
            return
        self._events.append(f"node {state.node} is back with {_text_of_roles(state)}")
        if is_new and loss is None and state.node in self.may_return:
            # Its end was not noticed yet.
            self._interruptions.append(f"node {state.node} was started again")

    @property
    def present(self) -> int:
        """Number of the other nodes that are there."""
        return len(self._states.keys() - self.away.keys() - self.lost.keys())

    def take_restarts(self) -> list[RoleRestart]:
        """Restarts on other nodes since the last call."""
        taken, self._restarts = self._restarts, []
        return taken

    def take_events(self) -> list[str]:
        """Texts about nodes that joined, left, came back or were refused, since the last call."""
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
        absent = [node for node in range(1, self._nodes) if node not in self._states]
        if absent and now - self._opened_at > limit_s:
            refused = "".join(f"; refused: {why}" for why in self._refused.values())
            return (
                f"node {absent[0]} was not heard within {limit_s:.0f} s of the first one{refused}"
            )
        for node, state in self._states.items():
            if (loss := self.lost.get(node)) is not None:
                if now - loss.at > self._limits.wait_s:
                    self.ending = Ending()
                    return f"{loss.why}, and did not come back within {self._wait_text}"
                continue
            why = "" if node in self.away else self._why_gone(state, now)
            if why and node in self.may_return and not state.error:
                self._losses += 1
                self.lost[node] = Loss(why, now, self._losses)
                self._interruptions.append(why)
                self._events.append(
                    f"{why}: the trainer waits for it at most {self._wait_text}; `megatron-rl "
                    "node` with its number, on any node like it, takes its place"
                )
            elif why and state.is_vital:
                self.ending = Ending(state.signal, state.has_failed)
                return why
            elif why:
                self.away[node] = why
                self.ending = Ending(state.signal, state.has_failed)
                self._events.append(f"{why}: the run continues without its {_text_of_roles(state)}")
        return ""

    def find_too_few(self, given_up: dict[str, int], needs: dict[str, Least]) -> str:
        """Text about a kind of role with too few replicas because nodes are away; "": none.

        given_up: replicas by kind, of all nodes.
        """
        if not self.away:
            return ""
        for kind, (replicas, least) in needs.items():
            if (left := replicas - given_up.get(kind, 0)) < least:
                # The node that went last made them too few.
                why = next(reversed(self.away.values()))
                key = "generator.min_replicas = " if kind == "generator" else ""
                return f"{why}, and {left} of {replicas} {kind}s are fewer than {key}{least}"
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


def _key(state: NodeState) -> tuple[int, int]:
    """Identifies a launcher."""
    return state.node, state.session


def _text_of_roles(state: NodeState) -> str:
    """`2 generators and 1 verifier`."""
    counts = state.replicas.items()
    found = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts if count]
    return " and ".join(found) or "no role"
