"""A trainer on several nodes: its ranks start together, and all end before they start again.

Used by `phases.py`, in the launcher's one thread. When a signal kills a rank or torchrun of any
node, or a node is lost, the ranks of the other nodes are of no use: their collectives never end.

| who            | does                                                                      |
|----------------|---------------------------------------------------------------------------|
| every node     | starts and kills its ranks as ordered; tells how they ended (TrainerPart) |
| the first node | orders each start and its end (TrainerOrder); decides by the rules of     |
|                | `restarts.py` whether another start follows, or ends the run              |
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.launcher.node import FirstNode, Node
from megatron_rl.launcher.node_errors import NodeLost
from megatron_rl.launcher.node_link import OtherNodeLink
from megatron_rl.launcher.placement import returning_nodes
from megatron_rl.launcher.restarts import Answer, Death, RestartRule, answer_death, pause_before
from megatron_rl.observe.deaths import RoleDied
from megatron_rl.protocol.node_messages import RoleRestart, TrainerOrder, TrainerPart

_ORDERED = "the ranks of all nodes are to start again"
_TEXT_CHARS = 4000
_CAUSE_S = 45.0
"""torchrun tells late that a signal killed a rank: it first waits up to 30 s for the others."""
_MARGIN_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """Why a start of the trainer is over."""

    node: int | None
    """Node whose ranks ended first; None: a node was lost."""
    exit_code: int
    """-N when signal N ended torchrun or a rank; 0 when a node was lost."""
    text: str


def find_fault(parts: Mapping[int, TrainerPart], start: int, *, is_cause_due: bool) -> Fault | None:
    """The death that ends a start of the trainer; None: there is none, or its cause may follow.

    Ranks end with an error when those of another node were killed, often before the first node
    hears of it. is_cause_due: every other node would have told a cause by now.
    """
    parts = {node: part for node, part in sorted(parts.items()) if part.start == start}
    faults = [
        Fault(node, part.exit_code, part.text) for node, part in parts.items() if part.exit_code
    ]
    if killed := [fault for fault in faults if fault.exit_code < 0]:
        return killed[0]
    has_news = not is_cause_due and any(part.exit_code is None for part in parts.values())
    return None if has_news or not faults else faults[0]


def train_together(own: Node, name: str, start: Callable[[], None], rule: RestartRule) -> None:
    """Start this node's ranks as the first node orders, until they have ended well.

    name: of their role. start: starts them for the first time. Raises RoleDied, NodeLost.
    """
    here = RanksHere(own, name, start)
    if isinstance(own, FirstNode):
        TrainerLead(own, here, rule).run()
        return
    assert isinstance(own.link, OtherNodeLink)
    while here.part.exit_code != 0:
        own.look()
        here.obey(own.link.order)
        own.link.tell_part(here.part)


class RanksHere:
    """The trainer's ranks of this node."""

    def __init__(self, own: Node, name: str, start: Callable[[], None]) -> None:
        self._supervisor, self._name, self._start = own.supervisor, name, start
        self.part = TrainerPart()

    def obey(self, order: TrainerOrder) -> None:
        """Start or kill the ranks as ordered, and note in `part` how they are."""
        role, number = self._supervisor.roles.get(self._name), self.part.start
        if role is not None and not self.part.is_over:
            if role.ended is not None and (role.death is not None or role.exit_code == 0):
                text = "" if role.death is None else str(role.death)[:_TEXT_CHARS]
                self.part = TrainerPart(number, exit_code=role.ending.code, text=text)
            elif order.stop >= number and role.ended is None and not role.why_killed:
                self._supervisor.kill(role, _ORDERED)
        elif order.start > max(order.stop, number):
            self.part = TrainerPart(order.start, is_over=False)
            if role is None:
                self._start()
            else:
                self._supervisor.start_again(role, f"start {order.start} of the trainer")


class TrainerLead:
    """The first node's decisions about the trainer of all nodes."""

    def __init__(self, own: FirstNode, here: RanksHere, rule: RestartRule) -> None:
        self._own, self._link, self._here, self._rule = own, own.link, here, rule
        self._count = own.roles.trainer_nodes
        self._end_s = own.config.nodes.end_timeout_s
        self._cause_s = max(_CAUSE_S, own.config.nodes.silence_timeout_s + _MARGIN_S)
        self._fault: Fault | None = None
        """Why the latest start is over; None: it runs."""
        self._died_at: float | None = None
        """time.monotonic() of the first death in the latest start."""
        self._stopped_at = self._again_at = 0.0
        """time.monotonic() of the order to end the latest start, and earliest of the next."""

    def run(self) -> None:
        """Order starts until the ranks of all nodes have ended well. Raises RoleDied, NodeLost."""
        link, own = self._link, self._own
        # Ranks that fill several nodes fill this one.
        ranks = own.roles.trainer_ranks
        nodes = returning_nodes(own.config, active=own.count, gpus_per_node=ranks)
        link.registry.may_return = nodes
        link.order_trainer(TrainerOrder(start=1))
        while not self._have_all_ended_well():
            own.look()
            self._here.obey(link.order)
            self._follow(time.monotonic())
        link.registry.may_return = ()

    def _parts(self) -> dict[int, TrainerPart]:
        """Parts of the trainer on all nodes that are there."""
        others = {
            node: part for node, part in self._link.registry.parts().items() if node < self._count
        }
        return {0: self._here.part} | others

    def _have_all_ended_well(self) -> bool:
        parts = self._parts()
        return len(parts) == self._count and all(one.exit_code == 0 for one in parts.values())

    def _follow(self, now: float) -> None:
        parts, start = self._parts(), self._link.order.start
        if self._fault is not None:
            self._start_again_when_over(parts, now)
        elif why := self._link.take_interruption():
            self._answer(Fault(None, 0, why), now)
        else:
            has_died = any(one.exit_code and one.start == start for one in parts.values())
            if self._died_at is None and has_died:
                self._died_at = now
            is_due = self._died_at is not None and now - self._died_at > self._cause_s
            if fault := find_fault(parts, start, is_cause_due=is_due):
                self._answer(fault, now)

    def _answer(self, fault: Fault, now: float) -> None:
        """End the latest start, if another one may follow. Raises RoleDied, NodeLost."""
        replicas, rule = self._own.supervisor.replicas, self._rule
        restarts, queue = replicas.restarts(rule, now), self._own.supervisor.roles.get(rule.until)
        has_ended = any(one.exit_code == 0 for one in self._parts().values())
        is_over = queue is not None and queue.exit_code == 0
        death = Death(
            fault.exit_code, can_start=True, restarts=restarts, is_run_ending=False,
            is_too_late=has_ended or is_over, others=0,
        )  # fmt: skip
        answer, remark = answer_death(death, rule)
        if answer is not Answer.RESTART:
            text = f"{remark}. {fault.text}" if remark else fault.text
            raise (
                NodeLost(text)
                if fault.node is None
                else RoleDied(self._role_of(fault), fault.exit_code, text)
            )
        pause_s = pause_before(restarts, self._own.supervisor.first_pause_s)
        log.warning("%s; %s, in %.0f s or later", fault.text, _ORDERED, pause_s)
        self._fault, self._stopped_at, self._again_at = fault, now, now + pause_s
        self._link.stop_trainer()

    def _role_of(self, fault: Fault) -> str:
        return f"{self._rule.replica}-node-{fault.node}" if fault.node else self._rule.replica

    def _start_again_when_over(self, parts: Mapping[int, TrainerPart], now: float) -> None:
        """Order the next start once every node has ended its ranks. Raises NodeLost."""
        behind = [node for node, part in parts.items() if not part.is_over]
        if self._link.lost:
            self._stopped_at = now
        if behind and now - self._stopped_at > self._end_s:
            raise NodeLost(
                f"nodes {behind} have not ended their ranks of the trainer after "
                f"{self._end_s:.0f} s (expert.nodes.end_timeout_s)"
            )
        if behind or len(parts) < self._count or now < self._again_at:
            return
        assert self._fault is not None
        self._record(self._fault, now)
        # Nodes that were lost or started again meanwhile take part in the next start.
        self._link.take_interruption()
        self._fault = self._died_at = None
        start = self._link.order.start
        self._link.order_trainer(TrainerOrder(start + 1, stop=start))

    def _record(self, fault: Fault, now: float) -> None:
        rule, is_lost = self._rule, fault.node is None
        count = self._own.supervisor.replicas.note_restart(rule, now)
        code = self._here.part.exit_code if is_lost else fault.exit_code
        # A launcher that was lost before its first start has left no exit code.
        why = fault.text if is_lost else ""
        role = self._role_of(fault)
        self._own.record(RoleRestart(role, rule.kind, code or 0, count, rule.limit, why=why))
