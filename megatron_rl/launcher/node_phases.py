"""The phases of a run on several nodes: which there are, and what one node does in each.

Used by `nodes.py`, in its one thread. The first node leads, the others follow (`node_link.py`):

| phase      | runs                                                                      |
|------------|---------------------------------------------------------------------------|
| cold start | sft ranks, on the nodes of the trainer; where a model is chosen afterwards |
| evaluation | queue, generators, verifiers, on a model folder that nobody trains        |
| training   | these and the trainer ranks; before them the cold start, without a choice |
| SFT baseline    | sft ranks                                                                 |
| end        | nothing                                                                   |

A phase ends on the first node when its queue has ended, or its own ranks have. Each node then ends
what is left of its processes, and the next phase begins when all have.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.backend.environment import (
    address_towards,
    device_of_host,
    ranks_environment,
    role_environment,
)
from megatron_rl.config.files import override
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import (
    begin_with,
    cold_start_folder,
    first_model,
    is_due,
    is_evaluated,
    is_trained,
)
from megatron_rl.launcher.live_view import LiveView
from megatron_rl.launcher.node_link import FirstNode, HostLink, OtherNode
from megatron_rl.launcher.placement import EngineNode, NodeRoles, gpu_environment
from megatron_rl.launcher.ports import check_engine_ports
from megatron_rl.launcher.restarts import (
    Restart,
    follower_rule,
    generator_rule,
    verifier_rule,
)
from megatron_rl.launcher.roster import write_restart
from megatron_rl.launcher.run import eval_limit_s
from megatron_rl.launcher.run_folder import CONFIG, FolderLock
from megatron_rl.launcher.supervisor import POLL_S, Supervisor
from megatron_rl.observe.choice import choose
from megatron_rl.protocol.exports import SFT_BASELINE, candidate_name
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.node_messages import PhaseKind, RunPhase
from megatron_rl.protocol.process import verifier_name
from megatron_rl.protocol.wire import DeadlineExceeded

QUEUE = "queue"
TRAINER = "trainer"
SFT = "sft"
# After the queue and the trainer have ended, the roles that they told to stop have so long.
_END_S = 60.0
# A shared file system shows one node within this time what another one has written.
_VISIBLE_S = 120.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """A node's part of the run."""

    config: Config
    roles: NodeRoles
    node: int
    gpus: list[str]
    supervisor: Supervisor
    link: HostLink
    nodes: int = 1
    """Of the run."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each kind of phase so far."""

    def look(self) -> None:
        """Wait a moment, then see to this node's roles and the other nodes.

        Raises RoleDied, NodeLost.
        """
        time.sleep(POLL_S)
        for restart in self.supervisor.check():
            log.warning("restarted %s, %d of %d", restart.role, restart.count, restart.limit)
            self.record(restart)
        self.beat()
        self.supervisor.end_silent(self.link.missing)

    def record(self, restart: Restart) -> None:
        """Tell the first node of a role that was started again."""
        assert isinstance(self.link, OtherNode)
        self.link.tell_restart(restart)

    def show(self, phase: str) -> None:
        """Say what this node does now."""
        log.info("%s", phase)

    def beat(self) -> None:
        """Tell the other nodes that this one lives. Raises NodeLost."""
        replicas = self.supervisor.replicas
        self.link.given_up = replicas.given_up
        self.link.exchange(time.monotonic())
        replicas.given_up_elsewhere = self.link.given_up_elsewhere

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.config.run.dir

    @contextmanager
    def timed(self, kind: PhaseKind) -> Iterator[None]:
        """Add up how long phases of a kind take."""
        started = time.monotonic()
        yield
        name = kind.replace(" ", "_")
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - started


@dataclass(frozen=True, kw_only=True)
class FirstShare(Share):
    """That of the first node, which shows and records how the run goes."""

    view: LiveView
    lock: FolderLock
    """Of the run folder."""

    def look(self) -> None:
        """As every node does; then show what is new. Raises FolderTaken."""
        super().look()
        assert isinstance(self.link, FirstNode)
        for restart in self.link.take_restarts():
            self.record(restart)
        self.view.refresh(self.supervisor.roles)
        self.link.missing = list(self.view.roster.missing)
        self.lock.heartbeat.check()

    def record(self, restart: Restart) -> None:
        """Write a row about a role of any node that was started again."""
        write_restart(self.run_dir, self.view.last_step, restart)

    def show(self, phase: str) -> None:
        """Say what the run does now."""
        super().show(phase)
        self.view.enter_phase(phase)
        self.lock.heartbeat.phase = phase


def lead(own: FirstShare, link: FirstNode, is_resumed: bool) -> None:
    """All phases, in order, as the first node decides them."""
    config, started = own.config, time.monotonic()
    if config.sft.candidates and is_due(config, is_resumed=is_resumed):
        if not is_trained(config):
            _begin(own, link, PhaseKind.COLD_START)
        _choose(own, link)
    model = str(first_model(config, is_resumed=is_resumed))
    comes_first = is_due(config, is_resumed=is_resumed)
    _begin(own, link, PhaseKind.TRAINING, model=model, has_cold_start=comes_first)
    if config.sft.baseline:
        _begin(own, link, PhaseKind.SFT_BASELINE, model=model)
        if config.eval.is_wanted:
            _begin(own, link, PhaseKind.EVALUATION, label=SFT_BASELINE)
    link.end_run(own.look)
    own.wall_s["total"] = time.monotonic() - started


def follow(own: Share, link: OtherNode) -> None:
    """All phases, as the first node says."""
    while (phase := link.next_phase(own.look)).kind != PhaseKind.END:
        _take_part(own, phase)


def _begin(
    own: Share, link: FirstNode, kind: PhaseKind, *, label: str = "", model: str = "",
    has_cold_start: bool = False,
) -> None:  # fmt: skip
    wanted = RunPhase(0, kind, label=label, model=model, has_cold_start=has_cold_start)
    phase = link.begin(wanted, own.look)
    log.info("phase %d: %s %s", phase.number, kind, label)
    with own.timed(kind):
        _take_part(own, phase)


def _choose(own: Share, link: FirstNode) -> None:
    """Evaluate the models that the cold start exported, and begin with the most accurate one."""
    config, metrics = own.config, own.run_dir / "metrics.jsonl"
    for step in config.sft.candidates:
        if not is_evaluated(config, read_jsonl(metrics), step):
            _begin(own, link, PhaseKind.EVALUATION, label=candidate_name(step))
    chosen = choose(read_jsonl(metrics), config.sft.candidates, config.sft.choose_by)
    begin_with(config, chosen, after_file=own.beat)


def _take_part(own: Share, phase: RunPhase) -> None:
    """What this node does in a phase, until nothing of it runs here."""
    match phase.kind:
        case PhaseKind.COLD_START:
            own.show("supervised cold start")
            _tune(own, SFT)
        case PhaseKind.SFT_BASELINE:
            own.show("SFT baseline: supervised training continues")
            _tune(own, "sft-baseline", "--sft-baseline", override("model.path", phase.model))
        case PhaseKind.EVALUATION:
            own.show(f"evaluation of {phase.label}")
            _await_folder(own, own.run_dir / "hf" / phase.label)
            queue = _start_serving(own, phase)
            _wait(own, queue, limit_s=eval_limit_s(own.config))
        case PhaseKind.TRAINING:
            _train(own, phase)
        case PhaseKind.END:
            return
    own.supervisor.stop()


def _tune(own: Share, name: str, *arguments: str) -> None:
    """Supervised training with the other nodes of the trainer.

    The collectives of its ranks have deadlines, which bound the wait for them.
    """
    if not own.roles.trainer_ranks:
        return
    role = name if own.node == 0 else f"{name}-node-{own.node}"
    _start_ranks(own, role, is_supervised=True, arguments=arguments)
    while own.supervisor.is_running(role):
        own.look()


def _train(own: Share, phase: RunPhase) -> None:
    """Reinforcement learning; the engines load during a cold start that comes before it."""
    queue = _start_serving(own, phase)
    if phase.has_cold_start:
        own.show("supervised cold start")
        _tune(own, SFT)
    own.show("reinforcement learning")
    if own.roles.trainer_ranks:
        _await_folder(own, Path(phase.model))
        name = TRAINER if own.node == 0 else f"{TRAINER}-node-{own.node}"
        model = override("model.path", phase.model)
        _start_ranks(own, name, is_supervised=False, arguments=(model,))
    _wait(own, queue)


def _await_folder(own: Share, folder: Path) -> None:
    """Until this node sees what another one has written. Raises DeadlineExceeded."""
    deadline = time.monotonic() + _VISIBLE_S
    while not folder.exists():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{folder} was written, and is not there after {_VISIBLE_S:.0f} s: is the run "
                "folder on a file system that all nodes share?"
            )
        own.look()


def _start_ranks(own: Share, name: str, *, is_supervised: bool, arguments: tuple[str, ...]) -> None:
    torchrun = torchrun_arguments(own.config, own.roles, own.node, is_supervised=is_supervised)
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
    command += ["--config", str(own.run_dir / CONFIG), *arguments]
    environment = ranks_environment(
        device_of_host(own.gpus),
        own.roles.trainer_ranks,
        expandable_segments=own.config.has_expandable_segments,
        deterministic=own.config.train.deterministic,
    )
    own.supervisor.start(name, command, environment=environment)


def torchrun_arguments(
    config: Config, roles: NodeRoles, node: int, *, is_supervised: bool = False
) -> list[str]:
    """Arguments of torchrun on one node, up to those of the trainer."""
    # A port each: one node may be at its ranks of RL while another one leaves the cold start.
    port = config.ports.sft if is_supervised else config.ports.torchrun
    return [
        f"--nnodes={roles.trainer_nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={roles.trainer_ranks}",
        f"--master-addr={config.ports.host}",
        f"--master-port={port}",
        "-m",
        f"megatron_rl.trainer.{'sft' if is_supervised else 'train'}",
    ]


def _start_serving(own: Share, phase: RunPhase) -> str:
    """Queue, engines and verifier of this node; returns the queue's name.

    In training the engines take weights at the first publish.
    """
    label = phase.label
    suffix = f"-{label}" if label else ""
    name = f"config.{label}.toml" if label else CONFIG
    common = ["--config", str(own.run_dir / name)]
    queue = f"{QUEUE}{suffix}"
    if own.node == 0:
        _start_queue(own, queue, common, phase)
    python, device = [sys.executable, "-m"], device_of_host(own.gpus)
    parts = own.roles.engine_nodes
    leads = [i for i in own.roles.engines if i not in parts or not parts[i].rank]
    check_engine_ports(own.config, leads)
    for index, gpus in own.roles.engines.items():
        part, command = engine_command(own.config, name, index, own.roles.engine_nodes.get(index))
        role = f"{part}{suffix}"
        rule_of = generator_rule if part == f"generator-{index}" else follower_rule
        own.supervisor.start(
            role,
            [*python, *command],
            restarts=rule_of(own.config, part, role=role, until=queue if label else TRAINER),
            environment=role_environment(device) | gpu_environment(gpus, own.gpus),
        )
    verifier = [*python, "verification.worker", *common, "--index", str(own.node)]
    role = f"verifier-{own.node}{suffix}"
    own.supervisor.start(
        role,
        verifier,
        restarts=verifier_rule(
            own.config, verifier_name(own.node), role=role, until=queue, replicas=own.nodes
        ),
        environment=role_environment("cpu"),
    )
    return queue


def engine_command(
    config: Config, file: str, index: int, node: EngineNode | None
) -> tuple[str, list[str]]:
    """Name and arguments of the role that runs an engine, or a node's part of one (`node`).

    file: the phase's configuration, in the folder of the run.
    """
    name = f"generator-{index}"
    common = ["--config", str(config.run.dir / file), "--index", str(index)]
    if node is None:
        return name, ["generation.worker", *common]
    common += ["--nodes", str(node.count)]
    if node.rank:
        part = ["--node", str(node.rank)]
        return f"{name}-node-{node.rank}", ["generation.follower", *common, *part]
    address = address_towards(config.ports.host)
    return name, ["generation.worker", *common, "--address", address]


def _start_queue(own: Share, name: str, common: list[str], phase: RunPhase) -> None:
    python, without_device = [sys.executable, "-m"], role_environment("cpu")
    arguments = ["--evaluate-only", phase.label] if phase.label else []
    if phase.has_cold_start:
        arguments = ["--after", str(cold_start_folder(own.config))]
    queue = [*python, "megatron_rl.rollout_queue.server", *common, *arguments]
    own.supervisor.start(name, queue, environment=without_device)
    if own.config.metrics.is_on:
        metrics = [*python, "megatron_rl.observe.exporters.worker"]
        metrics += ["--config", str(own.run_dir / CONFIG)]
        own.supervisor.start("metrics", metrics, environment=without_device, is_expendable=True)


def _wait(own: Share, queue: str, limit_s: float | None = None) -> None:
    """Until every role has ended well, or the queue has and some time has passed.

    limit_s: within which the queue must end; None: its own deadlines and those of the trainer
    bound it. Raises RoleDied, NodeLost, DeadlineExceeded.
    """
    started, ends_at, is_told, is_shown = time.monotonic(), None, False, False
    while running := [
        name
        for name, role in own.supervisor.roles.items()
        if own.supervisor.is_running(name) and not role.is_expendable
    ]:
        own.look()
        now = time.monotonic()
        if limit_s is not None and queue in running and now - started > limit_s:
            raise DeadlineExceeded(f"{queue} has not ended after {limit_s:.0f} s")
        is_trained = TRAINER in own.supervisor.roles and TRAINER not in running
        if is_trained and own.config.eval.is_wanted and not is_shown:
            own.show("evaluation after the last step")
            is_shown = True
        if isinstance(own.link, FirstNode) and not is_told and {queue, TRAINER}.isdisjoint(running):
            own.link.end_phase()
            is_told = True
        # Ranks end by themselves, by their own deadlines: their export may take long.
        if not own.link.is_ending or any(name.startswith(TRAINER) for name in running):
            continue
        ends_at = ends_at or now + _END_S
        if now > ends_at:
            log.warning("%s did not end within %.0f s of the queue", ", ".join(running), _END_S)
            return
