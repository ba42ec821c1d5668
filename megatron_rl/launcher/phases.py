"""The phases of a run, and one node's part of each.

Used by `run.py`, `nodes.py` and `evaluation/runs/`, in their one thread. The first node leads, the
others follow (`node_link.py`).

| phase        | runs                                                                            |
|--------------|---------------------------------------------------------------------------------|
| cold start   | sft ranks, on the nodes of the trainer; where a choice or an evaluation follows |
| evaluation   | queue, generators, verifiers, on a fixed model folder                           |
| training     | the same, trainer ranks, scorer; a cold start without a choice comes first      |
| SFT baseline | sft ranks                                                                       |
| end          | nothing                                                                         |

A phase ends on the first node when its queue or its ranks have ended. Each node then ends its
remaining processes, and the next phase begins when all nodes have done so. Nodes that joined follow
too. A generator, verifier or scorer that dies, and a queue or trainer that is killed, are restarted
by the rules of `restarts.py`; the first node decides about a trainer on several nodes
(`shared_trainer.py`). The death of any other role ends the run.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from megatron_rl.backend.environment import address_towards
from megatron_rl.config.files import override
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import (
    begin_with,
    choose_model,
    cold_start_folder,
    first_model,
    is_due,
    is_evaluated,
    is_trained,
)
from megatron_rl.launcher.node import FirstNode, Node, environment_of_ranks
from megatron_rl.launcher.node_link import FirstNodeLink, OtherNodeLink
from megatron_rl.launcher.other_node import VISIBLE_S, check_folder
from megatron_rl.launcher.placement import EngineNode, NodeRoles
from megatron_rl.launcher.ports import check_engine_ports, check_scorer_ports
from megatron_rl.launcher.restarts import RestartRule, restart_rule
from megatron_rl.launcher.run_folder import CONFIG, write_evaluation_config
from megatron_rl.launcher.shared_trainer import train_together
from megatron_rl.protocol.exports import SFT_BASELINE, candidate_name
from megatron_rl.protocol.node_messages import PhaseKind, RunPhase
from megatron_rl.protocol.process import verifier_name
from megatron_rl.protocol.wire import DeadlineExceeded

QUEUE = "queue"
TRAINER = "trainer"
SFT = "sft"
SCORER = "scorer-0"
# Beyond expert.eval.timeout_s: the queue gives up first and says why.
_EVAL_MARGIN_S = 60.0
# Time for the other roles to end after the queue has.
_END_S = 60.0

log = logging.getLogger(__name__)


def lead(own: FirstNode, *, is_resumed: bool) -> None:
    """Run all phases in order, on the first node."""
    config = own.config
    own.record_nodes()
    is_first = is_due(config, is_resumed=is_resumed)
    if is_first and (config.sft.candidates or not config.train.steps):
        if not is_trained(config):
            _begin(own, RunPhase(0, PhaseKind.COLD_START))
        if config.sft.candidates:
            _choose(own)
    model = str(first_model(config, is_resumed=is_resumed))
    if config.train.steps:
        is_first = is_due(config, is_resumed=is_resumed)
        _begin(own, RunPhase(0, PhaseKind.TRAINING, model=model, has_cold_start=is_first))
        # The SFT baseline takes as many tokens as reinforcement learning took.
        if config.sft.baseline:
            _begin(own, RunPhase(0, PhaseKind.SFT_BASELINE, model=model))
            if config.eval.is_wanted:
                _evaluate(own, SFT_BASELINE, "sft_baseline_evaluation")
    elif config.eval.is_wanted:
        _evaluate(own, "before", "evaluation", model)
    own.link.end_run(own.look)


def follow(own: Node) -> None:
    """Run all phases in the order of the first node, on another node."""
    assert isinstance(own.link, OtherNodeLink)
    while (phase := own.link.next_phase(own.look)).kind != PhaseKind.END:
        check_folder(own, phase)
        _take_part(own, phase)


def evaluate_folder(own: FirstNode, label: str, arguments: Sequence[str]) -> None:
    """Evaluate the configured model on this node alone; arguments: extra ones of the queue."""
    model = str(own.config.model.path)
    with own.phase("evaluation", f"evaluation {label}"):
        _begin(own, RunPhase(0, PhaseKind.EVALUATION, label=label, model=model), arguments)
    own.link.end_run(own.look)


def _begin(own: FirstNode, wanted: RunPhase, arguments: Sequence[str] = ()) -> None:
    """Begin a phase on all nodes and take part in it; the link numbers it."""
    wanted = msgspec.structs.replace(wanted, scorer_node=own.roles.scorer_node)
    phase = own.link.begin(wanted, own.look)
    log.info("phase %d: %s %s", phase.number, phase.kind, phase.label)
    _take_part(own, phase, arguments)


def _evaluate(own: FirstNode, label: str, name: str, model: str = "") -> None:
    """Evaluate a model; model: its folder, by default hf/LABEL."""
    with own.phase(name, f"evaluation of {label}"):
        folder = model or str(own.run_dir / "hf" / label)
        _begin(own, RunPhase(0, PhaseKind.EVALUATION, label=label, model=folder))


def _choose(own: FirstNode) -> None:
    """Evaluate the cold start's candidates and choose the most accurate one."""
    config = own.config
    for step in config.sft.candidates:
        if not is_evaluated(config, step):
            _evaluate(own, candidate_name(step), "cold_start_choice")
    begin_with(config, choose_model(config), after_file=own.beat)


def _take_part(own: Node, phase: RunPhase, arguments: Sequence[str] = ()) -> None:
    """Run this node's part of a phase until all its processes have ended."""
    if own.number == 0 and own.config.metrics.is_on:
        own.start("metrics", "megatron_rl.observe.exporters.exporter", [], is_expendable=True)
    match phase.kind:
        case PhaseKind.COLD_START:
            _cold_start(own)
        case PhaseKind.SFT_BASELINE:
            with own.phase("sft_baseline", "SFT baseline: supervised training continues"):
                model = override("model.path", phase.model)
                _tune(own, "sft-baseline", "--sft-baseline", model)
        case PhaseKind.EVALUATION:
            _await(own, Path(phase.model))
            queue = _start_serving(own, phase, arguments)
            _end_serving(own, queue)
        case PhaseKind.TRAINING:
            _train(own, phase)
        case PhaseKind.END:
            return
    own.supervisor.stop()


def _cold_start(own: Node) -> None:
    with own.phase("cold_start", "supervised cold start"):
        _tune(own, SFT)


def _tune(own: Node, name: str, *arguments: str) -> None:
    """Supervised training on all nodes of the trainer; deadlines of collectives bound the wait."""
    if own.roles.trainer_ranks:
        _start_ranks(own, name, "megatron_rl.trainer.sft", arguments)
        own.wait_for(own.role(name))


def _train(own: Node, phase: RunPhase) -> None:
    """Reinforcement learning, after a cold start during which the engines load."""
    after = ["--after", str(cold_start_folder(own.config))] if phase.has_cold_start else []
    queue = _start_serving(own, phase, after)
    # A node that is back finds the trainer started.
    if phase.has_cold_start and not phase.trainer.start:
        _cold_start(own)
    has_scorer = own.config.algorithm.needs_scorer
    model = [override("model.path", phase.model)]
    with own.phase("rl", "reinforcement learning"), own.stop:
        is_judge = own.config.judge_folder is not None
        if has_scorer and not is_judge and own.number == own.roles.scorer_node:
            _await(own, Path(phase.model))
            _start_scorer(own, model, outlives=TRAINER)
        if own.roles.trainer_ranks:
            _await(own, Path(phase.model))
            scorer = ["--scorer", _address_of(own, own.roles.scorer_node)] if has_scorer else []
            _train_ranks(own, queue, [*scorer, *model])
        if not own.roles.trainer_ranks:
            # Its engines serve until all nodes stop.
            _end_serving(own, queue)
        own.stop.conclude()
    if own.number or not own.config.eval.is_wanted:
        _end_serving(own, queue)
        return
    with own.phase("last_evaluation", "evaluation after the last step"):
        _end_serving(own, queue)


def _await(own: Node, path: Path) -> None:
    """Wait until this node sees a file of another node. Raises DeadlineExceeded."""
    deadline = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{path} was written, and is not there after {VISIBLE_S:.0f} s: is the run "
                "folder on a file system that all nodes share?"
            )
        own.look()


def _address_of(own: Node, node: int) -> str:
    """Where the other nodes reach a node, once the first one has heard it. Raises NodeLost."""
    while node not in own.link.addresses:
        own.look()
    return own.link.addresses[node]


def _train_ranks(own: Node, queue: str, arguments: Sequence[str]) -> None:
    """Start this node's trainer ranks, and wait until they have ended well."""
    name, is_shared, rule = own.role(TRAINER), own.roles.trainer_nodes > 1, None
    if own.config.keeps_batches:
        rule = restart_rule(own.config, "trainer", TRAINER, role=name, until=queue)
        rule = replace(rule, is_shared=is_shared)
    start = partial(
        _start_ranks, own, TRAINER, "megatron_rl.trainer.train", arguments, restarts=rule
    )
    if rule is not None and is_shared:
        train_together(own, name, start, rule)
    else:
        start()
        own.wait_for(name)


def _start_ranks(
    own: Node, name: str, module: str, arguments: Sequence[str], *,
    restarts: RestartRule | None = None,
) -> None:  # fmt: skip
    """Start this node's trainer ranks, of that module."""
    torchrun = torchrun_arguments(own.config, own.roles, own.number, module)
    command = [sys.executable, "-m", "megatron_rl.trainer.torchrun", *torchrun]
    command += ["--config", str(own.run_dir / CONFIG), *arguments]
    environment = environment_of_ranks(own.config, own.gpus, own.roles.trainer_ranks)
    own.supervisor.start(own.role(name), command, environment=environment, restarts=restarts)


def torchrun_arguments(config: Config, roles: NodeRoles, node: int, module: str) -> list[str]:
    """Arguments of torchrun on one node, with the module, without the module's arguments."""
    # Two ports: one node may start its RL ranks while another one ends the cold start.
    port = config.ports.sft if module.endswith(".sft") else config.ports.torchrun
    return [
        f"--nnodes={roles.trainer_nodes}",
        f"--nproc-per-node={roles.trainer_ranks}",
        # A store that listens on this address alone: see `trainer/torchrun.py`.
        "--rdzv-backend=run-address",
        f"--rdzv-endpoint={config.ports.host}:{port}",
        f"--rdzv-conf=rank={node}",
        "-m",
        module,
    ]


def _start_scorer(
    own: Node, arguments: Sequence[str], *,
    outlives: str, role: str = SCORER, config_file: str = CONFIG,
) -> None:  # fmt: skip
    """Start the scorer, which the trainer waits for and ends; a judge ends with its phase."""
    address, until = _address_of(own, own.number), own.role(outlives)
    if own.number:
        check_scorer_ports(own.config, address)
    own.start(
        role, "generation.scorer", ["--address", address, *arguments], config_file=config_file,
        outlives=until,
        restarts=restart_rule(own.config, "scorer", SCORER, role=role, until=until),
        gpus=own.roles.scorer,
    )  # fmt: skip


def _start_serving(own: Node, phase: RunPhase, arguments: Sequence[str]) -> str:
    """Start queue, engines and verifier of this node; returns the queue's name.

    arguments: extra ones of the queue. In training the first weight sync gives engines weights.
    """
    label, file = phase.label, CONFIG
    suffix, only = "", list[str]()
    if label:
        suffix, only = f"-{label}", ["--evaluate-only", label]
        file = _evaluation_file(own, label, Path(phase.model))
    queue = f"{QUEUE}{suffix}"
    is_first = own.number == 0
    if is_first:
        # An evaluation alone has no ledger to continue; its command resumes it.
        can_continue = own.config.keeps_ledger and not label
        rule = restart_rule(own.config, "queue", queue, until=queue) if can_continue else None
        own.start(
            queue, "megatron_rl.rollout_queue.server", [*only, *arguments],
            config_file=file, restarts=rule,
        )  # fmt: skip
    judge = _start_judge(own, phase.scorer_node, queue, f"{SCORER}{suffix}", file)
    parts = own.roles.engine_nodes
    leads = [i for i in own.roles.engines if i not in parts or not parts[i].rank]
    check_engine_ports(own.config, leads)
    outlives, until = queue if is_first else None, queue if label else TRAINER
    for index, gpus in own.roles.engines.items():
        part = own.roles.engine_nodes.get(index)
        name, module, given = engine_command(own.config, index, part)
        given = given if part and part.rank else [*given, *judge]
        role, kind = f"{name}{suffix}", "follower" if part and part.rank else "generator"
        rule = restart_rule(own.config, kind, name, role=role, until=until)
        if own.has_joined:
            # Beyond the ports that the run's configuration has for engines.
            given = [*given, f"expert.ports.engine={own.config.ports.engine}"]
            rule = replace(rule, replicas=len(own.roles.engines), min_replicas=1)
        own.start(
            role, module, given, config_file=file, outlives=outlives, gpus=gpus, restarts=rule
        )
    if own.roles.has_verifier:
        name, replicas = verifier_name(own.number), 1 if own.has_joined else own.count
        role = f"{name}{suffix}"
        own.start(
            role, "verification.worker", ["--index", str(own.number)], config_file=file,
            outlives=outlives, restarts=restart_rule(
                own.config, "verifier", name, role=role, until=queue, replicas=replicas
            ),
        )  # fmt: skip
    return queue


def _start_judge(own: Node, node: int, queue: str, role: str, config_file: str) -> list[str]:
    """Start the judge if it is this node's; arguments of generators that ask it.

    node: the judge's, which a node that has joined knows from the phase alone.
    """
    if own.config.judge_folder is None:
        return []
    if own.number == node:
        _start_scorer(own, [], outlives=queue, role=role, config_file=config_file)
    return ["--scorer", _address_of(own, node)]


def _evaluation_file(own: Node, label: str, model: Path) -> str:
    """Name of the evaluation's configuration file, which the first node writes."""
    name = f"config.{label}.toml"
    if own.number == 0:
        write_evaluation_config(own.config, label, model)
    else:
        _await(own, own.run_dir / name)
    return name


def engine_command(
    config: Config, index: int, node: EngineNode | None
) -> tuple[str, str, list[str]]:
    """Name, module and arguments of a role that runs an engine or a node's part of it."""
    name, arguments = f"generator-{index}", ["--index", str(index)]
    if node is None:
        return name, "generation.worker", arguments
    arguments += ["--nodes", str(node.count)]
    if node.rank:
        part = ["--node", str(node.rank)]
        return f"{name}-node-{node.rank}", "generation.follower", [*arguments, *part]
    address = address_towards(config.ports.host)
    return name, "generation.worker", [*arguments, "--address", address]


def eval_limit_s(config: Config) -> float:
    """Seconds that evaluations have after training or alone; the queue gives up earlier."""
    return config.eval_after_start_s + _EVAL_MARGIN_S


def _end_serving(own: Node, queue: str) -> None:
    """Wait until the queue, then the other roles have ended.

    Raises RoleDied, NodeLost, DeadlineExceeded.
    """
    started, ends_at, limit_s = time.monotonic(), None, eval_limit_s(own.config)
    is_judging = own.config.judge_folder is not None
    while running := [
        name
        for name, role in own.supervisor.roles.items()
        if own.supervisor.is_running(name) and not role.is_expendable
    ]:
        own.look()
        now = time.monotonic()
        if queue in running and now - started > limit_s:
            raise DeadlineExceeded(f"{queue} has not ended after {limit_s:.0f} s")
        link = own.link
        if isinstance(link, FirstNodeLink) and not link.is_ending and queue not in running:
            link.end_phase()
        if not link.is_ending:
            continue
        if is_judging:
            own.supervisor.end("scorer")
            is_judging = False
        ends_at = ends_at or now + _END_S
        if now > ends_at:
            log.warning(
                "still running %.0f s after the queue ended: %s", _END_S, ", ".join(running)
            )
            return
