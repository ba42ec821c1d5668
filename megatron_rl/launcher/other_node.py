"""A node other than the first one, which may leave the run if it only serves.

Used by `nodes.py` and `joining.py`, in the launcher's one thread. Generators and verifier of a node
that leaves finish what they hold, or give it back, within `expert.nodes.leave_timeout_s`. No weight
sync waits for them, and no attempt counts.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.node import Node, open_supervisor, orderly_stop
from megatron_rl.launcher.node_link import OtherNodeLink
from megatron_rl.launcher.orderly_stop import LeaveOnSignal
from megatron_rl.launcher.placement import NodeRoles
from megatron_rl.launcher.supervisor import POLL_S
from megatron_rl.observe.heartbeat import ALIVE, read_beat
from megatron_rl.protocol.node_messages import RunPhase
from megatron_rl.protocol.process import LEAVING_SIGNAL
from megatron_rl.protocol.stop_request import request_stop

_MARGIN_S = 15.0
"""Time beyond leave_timeout_s for the last word of the queue, and for the end of engines."""
VISIBLE_S = 120.0
"""Time until a shared file system shows a file that another node has written."""


def check_folder(own: Node, phase: RunPhase) -> None:
    """Wait until this node's run folder shows the first node's heartbeat.

    Raises InputError for a folder that is not shared: roles would read and write a copy.
    """
    until = time.monotonic() + VISIBLE_S
    while (beat := read_beat(own.run_dir)) is None or beat.started != phase.started:
        if time.monotonic() > until:
            raise InputError(
                f"{own.run_dir} is not the run folder of the first node: its {ALIVE} does not show "
                f"that node's heartbeat after {VISIBLE_S:.0f} s. Put the run folder on a file "
                "system that all nodes share, at the same path; a copy does not do"
            )
        own.look()


class HasLeft(Exception):
    """The node has left the run."""


@dataclass(frozen=True, kw_only=True)
class ServingNode(Node):
    """A node with generators and a verifier alone, which may leave."""

    link: OtherNodeLink
    stop: LeaveOnSignal
    console: Console

    def look(self) -> None:
        """As on every node. Raises HasLeft once it was asked to leave and has left.

        A node without which too few generators are left has the run stop, and stays until then.
        """
        if self.stop.is_due:
            if why := self._why_needed():
                request_stop(self.run_dir)
                self.show(why)
            else:
                self._leave()
        super().look()

    def _why_needed(self) -> str:
        """Why the run has to stop before this node leaves; "": it continues without the node."""
        why = "" if self.link.is_ending else self.link.find_too_few()
        return why and (
            f"stopping the run before this node leaves it, because without the node {why}. A "
            "checkpoint of the current step is saved first (expert.checkpoint.stop_timeout_s); a "
            "second signal ends this node at once"
        )

    def _leave(self) -> None:
        limit_s = self.config.nodes.leave_timeout_s
        self.show(
            f"leaving: the roles of this node finish or give back what they hold, for at most "
            f"{limit_s:.0f} s (expert.nodes.leave_timeout_s); a second signal ends them at once"
        )
        self.link.announce_leaving()
        processes = [role.process for role in self.supervisor.roles.values()]
        for process in processes:
            if process.poll() is None:
                process.send_signal(LEAVING_SIGNAL)
        until = time.monotonic() + limit_s + _MARGIN_S
        while any(one.poll() is None for one in processes) and time.monotonic() < until:
            time.sleep(POLL_S)
            self.link.exchange(time.monotonic())
        raise HasLeft

    def show(self, text: str) -> None:
        super().show(text)
        say(self.console, text)


@contextmanager
def other_node(
    config: Config, console: Console, roles: NodeRoles, gpus: list[str], *, number: int, nodes: int,
) -> Iterator[Node]:  # fmt: skip
    """A node that follows the first; its processes end when the context is left, or the node has.

    number: from `nodes` on for a node that joins the run.
    """
    replicas = {"generator": len(roles.engines), "verifier": int(roles.has_verifier)}
    is_vital = roles.are_vital(config, number)
    with (
        open_supervisor(config) as supervisor,
        OtherNodeLink(
            config, number, nodes,
            replicas=replicas, is_vital=is_vital, gpus_per_node=roles.gpus_per_node,
        ) as link,
    ):  # fmt: skip
        facts = (config, roles, gpus, supervisor)
        if is_vital:
            yield Node(*facts, link, orderly_stop(config), number, nodes)
            return
        with LeaveOnSignal(config.run.dir) as stop:
            node = ServingNode(
                *facts, link=link, stop=stop, number=number, count=nodes, console=console
            )
            try:
                yield node
            except HasLeft:
                node.show("this node has left the run")
