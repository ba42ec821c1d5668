"""One node of a run: starts and watches its processes.

Used by `run.py`, `nodes.py` and `evaluation/runs/`, in their one thread. A run on one node has only
a first node.
"""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    ranks_environment,
    role_environment,
)
from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.live_view import LiveView
from megatron_rl.launcher.node_link import FirstNodeLink, NodeLink, OtherNodeLink
from megatron_rl.launcher.orderly_stop import FirstSignal, OrderlyStop
from megatron_rl.launcher.placement import NodeRoles, gpu_environment, listed_gpus, only_node
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.run_folder import CONFIG, FolderLock
from megatron_rl.launcher.supervisor import POLL_S, Role, Supervisor
from megatron_rl.observe.heartbeat import FolderTaken
from megatron_rl.protocol.disk_room import WriteFailed
from megatron_rl.protocol.failure import (
    FAILURES,
    LAUNCHER,
    clear_failures,
    write_failure_of_launcher,
)
from megatron_rl.protocol.metrics import GENERATOR_RESTARTS, NODES, JsonlWriter
from megatron_rl.protocol.node_messages import RoleRestart
from megatron_rl.protocol.process import EXIT_FAILED
from megatron_rl.protocol.wire import DeadlineExceeded, WireError

_RESTARTS_OF = {
    "generator": GENERATOR_RESTARTS,
    "follower": "launch/follower_restarts",
    "queue": "launch/queue_restarts",
    "trainer": "launch/trainer_restarts",
    "verifier": "launch/verifier_restarts",
    "scorer": "launch/scorer_restarts",
}
"""Metric of restarts, by kind of role."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A node's part of the run; nodes other than the first report to the first."""

    config: Config
    roles: NodeRoles
    gpus: list[str]
    """Names of this node's GPUs."""
    supervisor: Supervisor
    link: NodeLink
    stop: FirstSignal
    number: int = 0
    """Index among `count` nodes; from `count` on: it joined the run."""
    count: int = 1
    """Nodes that the run was started with."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""

    @property
    def run_dir(self) -> Path:
        return self.config.run.dir

    @property
    def has_joined(self) -> bool:
        """Whether it was started by `megatron-rl join`."""
        return self.number >= self.count

    @property
    def has_trained(self) -> bool:
        """Whether training may have a step to save: another node knows only that it never began."""
        return not self.link.awaits_first

    def role(self, name: str) -> str:
        """Name of this node's part of a role that several nodes share."""
        return f"{name}-node-{self.number}" if self.number else name

    def start(
        self, name: str, module: str, arguments: Sequence[str], *,
        config_file: str = CONFIG, outlives: str | None = None,
        restarts: RestartRule | None = None, gpus: range | None = None,
        is_expendable: bool = False,
    ) -> None:  # fmt: skip
        """Start one Python process of the run.

        config_file: in the run folder. gpus: visible GPUs, empty on a node without GPUs; None: the
        process needs no device.
        """
        path = str(self.run_dir / config_file)
        command = [sys.executable, "-m", module, "--config", path, *arguments]
        environment = role_environment("cpu" if gpus is None else device_of_host(self.gpus))
        if gpus:
            environment |= gpu_environment(gpus, self.gpus)
        self.supervisor.start(
            name, command, outlives=outlives, restarts=restarts, environment=environment,
            is_expendable=is_expendable,
        )  # fmt: skip

    def wait_for(self, name: str) -> None:
        """Wait until a role of this node has ended well; its own deadlines bound the wait.

        Raises RoleDied, NodeLost.
        """
        while self.supervisor.is_running(name):
            self.look()

    def look(self) -> None:
        """Wait a moment, then check this node's roles and the other nodes.

        Raises RoleDied, NodeLost, Interrupted.
        """
        time.sleep(POLL_S)
        if text := self.stop.check(has_trained=self.has_trained):
            self.show(text)
        for restart in self.supervisor.check():
            self.record(restart)
        self.beat()
        self.supervisor.end_silent(self.link.missing)

    def beat(self) -> None:
        """Send a heartbeat to the other nodes and receive theirs. Raises NodeLost."""
        replicas = self.supervisor.replicas
        self.link.given_up = replicas.given_up
        self.link.exchange(time.monotonic())
        replicas.given_up_elsewhere = self.link.given_up_elsewhere

    def record(self, restart: RoleRestart) -> None:
        """Report a restarted role to the first node."""
        assert isinstance(self.link, OtherNodeLink)
        self.link.tell_restart(restart)

    def show(self, text: str) -> None:
        log.info("%s", text)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Show a phase, and add its seconds to `wall_s[name]`."""
        started = time.monotonic()
        self.show(text)
        yield
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - started


@dataclass(frozen=True, kw_only=True)
class FirstNode(Node):
    """The first node, which shows and records the run."""

    link: FirstNodeLink
    stop: OrderlyStop
    view: LiveView
    lock: FolderLock
    """Lock of the run folder."""

    @property
    def has_trained(self) -> bool:
        """Whether a step has ended since the launcher's start, and the trainer can save it."""
        return self.stop.is_training and bool(self.view.state.steps) and not self.link.lost

    def look(self) -> None:
        """As on every node; then show new metrics. Also raises FolderTaken."""
        super().look()
        for restart in self.link.registry.take_restarts():
            self.record(restart)
        for event in self.link.registry.take_events():
            log.info("%s", event)
            self._write({NODES: 1 + self.link.registry.present, "node_event": event})
        self.view.refresh(self.supervisor.roles)
        self.lock.heartbeat.awaited, self.lock.heartbeat.lost = self.view.awaited, self.link.lost
        self.link.missing = missing_now(
            self.supervisor.roles.values(), self.view.state.peers.missing
        )
        self.lock.heartbeat.check()

    def record_nodes(self) -> None:
        """Write the number of nodes where an earlier start of the run may have had another one."""
        if (self.run_dir / "metrics.jsonl").exists():
            self._write({NODES: self.count})

    def record(self, restart: RoleRestart) -> None:
        """Write a metric row about a restarted role of any node."""
        values: dict[str, float | str] = {
            _RESTARTS_OF[restart.kind]: 1,
            "role": restart.role,
            "exit_code": restart.exit_code,
            "restart": restart.count,
            "max_restarts": restart.limit,
            "why": restart.why,
        }
        self._write(values)

    def _write(self, values: dict[str, float | str]) -> None:
        try:
            with closing(JsonlWriter(self.run_dir / "metrics.jsonl", "launch")) as metrics:
                metrics.write(self.view.last_step, values)
        except WriteFailed as error:
            # The launcher watches the roles, and waits for no disk.
            log.warning("the row %s is lost: %s", values, error.fault)

    def show(self, text: str) -> None:
        super().show(text)
        self.view.enter_phase(text)
        self.lock.heartbeat.phase = text


def environment_of_ranks(config: Config, gpus: Sequence[str], ranks: int) -> dict[str, str]:
    """Variables of a node's trainer ranks."""
    return ranks_environment(
        device_of_host(gpus),
        ranks,
        expandable_segments=config.has_expandable_segments,
        deterministic=config.train.deterministic,
    )


def missing_now(roles: Iterable[Role], told: Iterable[str]) -> list[str]:
    """Replicas that the queue misses; told: names in its last row.

    None while the queue starts again: nobody can reach it, and its row is from before.
    """
    if any(role.kind == "queue" and not role.is_ready for role in roles):
        return []
    return list(told)


@contextmanager
def first_node(
    config: Config, console: Console, lock: FolderLock, *,
    nodes: int = 1, roles: NodeRoles | None = None, gpus: list[str] | None = None,
) -> Iterator[FirstNode]:  # fmt: skip
    """The first node of a run; its processes end when the context is left.

    gpus: names of this node's GPUs; None: list them here. roles: None: all roles of the run.
    Raises InputError when the roles do not fit.
    """
    started, notes = time.monotonic(), config.run.dir / "logs" / FAILURES
    gpus = listed_gpus() if gpus is None else gpus
    roles = roles or only_node(config, gpus)
    # The view closes last, to show the last rows of the children. The link closes first, so that
    # other nodes hear of an error before this one ends its processes.
    with (
        LiveView(config, console) as view,
        open_supervisor(config, inherited=(lock.descriptor,)) as supervisor,
        FirstNodeLink(config, nodes, roles.gpus_per_node) as link,
    ):
        # An earlier launcher has shown the rows that are there.
        view.skip_rows()
        node = FirstNode(
            config, roles, gpus, supervisor,
            link=link, stop=orderly_stop(config), count=nodes, view=view, lock=lock,
        )  # fmt: skip
        link.started = lock.heartbeat.started
        clear_failures(notes, LAUNCHER)
        is_done = False
        try:
            yield node
            is_done = True
        except FolderTaken:
            raise
        except (ConfigError, InputError, WireError, DeadlineExceeded) as error:
            # Before other processes end, which may note errors that follow from it.
            write_failure_of_launcher(notes, EXIT_FAILED, str(error))
            raise
        finally:
            if not is_done:
                view.enter_phase("ending all processes of the run")
    node.wall_s["total"] = time.monotonic() - started


def orderly_stop(config: Config) -> OrderlyStop:
    """What a signal to the launcher of a vital node does."""
    return OrderlyStop(config.run.dir, config.checkpoint.stop_timeout_s, config.train.steps)


def open_supervisor(config: Config, *, inherited: tuple[int, ...] = ()) -> Supervisor:
    """The owner of a node's processes. inherited: file descriptors for all of them."""
    environment = collective_environment(
        config.ports.host, config.weights.deadline_s, deterministic=config.train.deterministic
    )
    silence_s = config.queue.heartbeat_timeout_s
    return Supervisor(
        config.run.dir / "logs", extra_environment=environment, inherited=inherited,
        # The queue has missed a silent role for as long already.
        silence_s=2 * silence_s, stopped_s=silence_s,
    )  # fmt: skip
