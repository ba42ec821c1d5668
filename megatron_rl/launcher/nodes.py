"""A run on several nodes: prepared once, then started on every node by the cluster's launcher.

`megatron-rl prepare` runs on the first node and writes RUN_DIR/config.toml for all roles; all nodes
share the file system of RUN_DIR. `megatron-rl node` runs on every node (one task of `srun`) and
starts the node's roles in each phase. When a role dies or a node is lost, it ends its other roles
and exits with an error. A spare node takes the place of a lost one. One process, one thread.
"""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from megatron_rl.backend.environment import names_loopback
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config, NodesConfig
from megatron_rl.launcher import last_words as resuming
from megatron_rl.launcher import preflight
from megatron_rl.launcher.claims import claimed
from megatron_rl.launcher.cold_start import is_due
from megatron_rl.launcher.continuation import failure_noted
from megatron_rl.launcher.node import first_node
from megatron_rl.launcher.node_errors import NodeLost
from megatron_rl.launcher.other_node import other_node
from megatron_rl.launcher.phases import QUEUE, SCORER, follow, lead
from megatron_rl.launcher.placement import NodeRoles, active_nodes, listed_gpus, place
from megatron_rl.launcher.ports import ports_text
from megatron_rl.launcher.prompt_record import pin_revisions
from megatron_rl.launcher.run import begin, conclude, log_into
from megatron_rl.launcher.run_folder import CONFIG, check_run_folder, locked
from megatron_rl.observe.heartbeat import ALIVE, PREPARED, Beat, read_beat
from megatron_rl.protocol.checkpoint_folder import find_resume
from megatron_rl.protocol.keys import load_keys, make_keys
from megatron_rl.protocol.process import Interrupted, verifier_name
from megatron_rl.protocol.stop_request import is_stop_requested
from megatron_rl.protocol.wire import LOOPBACK

_LOOK_S = 1.0

log = logging.getLogger(__name__)


def prepare(config: Config, console: Console) -> Config:
    """Check the configuration, choose ports on this node, make keys, write the run folder.

    A folder with a complete checkpoint or a partial cold start is resumed. Raises InputError, also
    while a run is running in the folder.
    """
    config = pin_revisions(config)
    prompts = preflight.check(config)
    with locked(config.run.dir, PREPARED):
        beginning = check_run_folder(config)
        config = _with_keys(config)
        return begin(config, beginning, prompts, console)


def warning_of_host(config: Config, nodes: int) -> str:
    """Warning of an address that only this machine reaches, for several nodes; else ""."""
    host = config.ports.host
    if nodes == 1 or not names_loopback(host):
        return ""
    return (
        f"warning: ports.host = {host} leads to this machine alone, so no other one can take part "
        f"in this run of {nodes} nodes: give ports.host=ADDRESS, by which the others reach this one"
    )


def _with_keys(config: Config) -> Config:
    """The config with a folder of keys if other nodes can reach its sockets. Raises InputError."""
    ports = config.ports
    if ports.host in LOOPBACK or ports.keys_dir is not None:
        return config
    keys = config.run.dir.resolve() / "keys"
    # Those that are there are of an earlier start, or of one that failed after it had made them.
    if not keys.exists():
        make_keys(keys)
    load_keys(keys)
    return config.replaced(ports={"keys_dir": keys})


def describe_node(run_dir: Path, *, node: int, nodes: int, gpus_per_node: int | None) -> list[str]:
    """Lines about the roles that `run_node` would start. Raises InputError."""
    config, roles, gpus = _placed(run_dir, node=node, nodes=nodes, gpus_per_node=gpus_per_node)
    if _is_spare(config, node, nodes):
        return [f"node {node} of {nodes} is a spare one: it would wait for a lost node's place"]
    found = [QUEUE] * (node == 0) + [f"generator-{index}" for index in roles.engines]
    found.append(verifier_name(node))
    if roles.trainer_ranks:
        found.append(f"{roles.trainer_ranks} trainer ranks of {roles.trainer_nodes} nodes")
    if config.has_scorer and node == roles.scorer_node:
        found.append(SCORER)
    is_resumed = find_resume(config.checkpoint, config.run.dir) is not None
    first = ["the cold start comes first"] if is_due(config, is_resumed=is_resumed) else []
    return [
        f"node {node} of {nodes}, {len(gpus)} GPUs, would start: {', '.join(found)}",
        *first,
        f"{config.ports.host}: {ports_text(config.ports)}",
        "Dry run: nothing was started.",
    ]


def run_node(
    run_dir: Path, console: Console, *, node: int, nodes: int, gpus_per_node: int | None
) -> None:
    """Start this node's roles of a prepared run and wait until all have ended.

    node: 0 to nodes - 1. gpus_per_node: None: the number that this node lists. Raises InputError,
    RoleDied, NodeLost, DeadlineExceeded.
    """
    config, roles, gpus = _placed(run_dir, node=node, nodes=nodes, gpus_per_node=gpus_per_node)
    logs = config.run.dir / "logs"
    if node:
        log_into(logs / f"launch-node-{node}.log")
    if _is_spare(config, node, nodes):
        say(console, f"node {node} is a spare one: it waits for a lost node's place")
        with lost_place(config.run.dir, config.nodes) as place_of:
            if place_of is not None:
                run_node(run_dir, console, node=place_of, nodes=nodes, gpus_per_node=gpus_per_node)
        return
    active = active_nodes(config, nodes)
    if node:
        with other_node(config, console, roles, gpus, number=node, nodes=active) as other:
            text = (
                f"node {node} waits for the first one at {config.ports.host}:{config.ports.nodes}, "
                f"for at most {config.nodes.start_timeout_s:.0f} s (expert.nodes.start_timeout_s)"
            )
            log.info("%s", text)
            say(console, text)
            follow(other)
        return
    with locked(config.run.dir, nodes=nodes) as lock:
        log_into(logs / "launch.log")
        is_resumed = find_resume(config.checkpoint, config.run.dir) is not None
        with (
            failure_noted(config.run.dir),
            first_node(config, console, lock, nodes=active, roles=roles, gpus=gpus) as first,
        ):
            lead(first, is_resumed=is_resumed)
    conclude(config, first.wall_s, console)


def _is_spare(config: Config, node: int, nodes: int) -> bool:
    return node >= active_nodes(config, nodes)


def last_words(run_dir: Path, node: int, nodes: int) -> str:
    """On the first node: how to resume a run that ended early; "" on other nodes."""
    if node or not (run_dir / CONFIG).exists():
        return ""
    return resuming.last_words(load_config(run_dir / CONFIG), nodes)


def _placed(
    run_dir: Path, *, node: int, nodes: int, gpus_per_node: int | None
) -> tuple[Config, NodeRoles, list[str]]:
    """The prepared configuration, this node's roles and GPUs. Raises InputError."""
    if not 0 <= node < nodes:
        raise InputError(f"--node {node} of --nodes {nodes}: nodes are counted from 0")
    path = run_dir / CONFIG
    if not path.exists():
        raise InputError(f"{run_dir} is no prepared run: run `megatron-rl prepare` first")
    config, gpus = load_config(path), listed_gpus()
    count = gpus_per_node or len(gpus)
    if not count or (gpus and len(gpus) < count):
        raise InputError(
            f"this node lists {len(gpus)} GPUs: give --gpus-per-node, at most that number; on "
            "nodes without GPUs --gpus-per-node 1, to `megatron-rl prepare` too"
        )
    return config, place(config, nodes=nodes, gpus_per_node=count)[node], gpus


@contextmanager
def lost_place(run_dir: Path, limits: NodesConfig) -> Iterator[int | None]:
    """The number of a lost node, whose place is this spare's in the block; None: the run has ended.

    Raises NodeLost when the first node does not start or falls silent, and Interrupted when the run
    is asked to stop before the first node has started.
    """
    heard_at, is_there = time.monotonic(), False
    known = _key_of(read_beat(run_dir))
    while True:
        beat = read_beat(run_dir)
        if beat is not None and _key_of(beat) != known and beat.phase != PREPARED:
            known, heard_at, is_there = _key_of(beat), time.monotonic(), True
            if beat.has_ended:
                yield None
                return
            for node, loss in beat.lost.items():
                with claimed(run_dir, f"place-{node}", count=1, first=loss) as numbers:
                    # Another spare has taken the place that this loss left, if it is another one.
                    if numbers.start == loss:
                        log.info("this spare node takes the place of node %d", node)
                        yield node
                        return
        if not is_there and is_stop_requested(run_dir):
            raise Interrupted(128 + signal.SIGTERM)
        limit_s = limits.patience_s(is_there=is_there)
        if time.monotonic() - heard_at > limit_s:
            raise NodeLost(
                f"the first node has not renewed {run_dir / ALIVE} for {limit_s:.0f} s: start the "
                "run, and then this spare node again"
            )
        time.sleep(_LOOK_S)


def _key_of(beat: Beat | None) -> tuple[float, int]:
    """Differs between any two beats."""
    return (0.0, 0) if beat is None else (beat.started, beat.count)
