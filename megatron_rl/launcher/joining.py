"""Joins a running run: generators, and a verifier, beyond those of its configuration.

Used by `megatron-rl join`, in one thread. The launcher follows the first node through the phases of
the run as its configured nodes do (`phases.py`), and ends with it. What it needs is in the run
folder: config.toml has the addresses and the label, `keys` the keys, alive.json the state.
"""

import socket
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run
from megatron_rl.config.tree import Config
from megatron_rl.launcher.claims import claimed
from megatron_rl.launcher.other_node import other_node
from megatron_rl.launcher.phases import follow
from megatron_rl.launcher.placement import NodeRoles, active_nodes, listed_gpus
from megatron_rl.launcher.ports import find_free
from megatron_rl.launcher.run import log_into
from megatron_rl.launcher.run_folder import CONFIG, STATUS_WATCH_S, SUMMARY
from megatron_rl.observe.heartbeat import PREPARED, Beat, code_digest, find_living
from megatron_rl.protocol.wire import LOOPBACK


def join(run_dir: Path, console: Console, *, generators: int, has_verifier: bool) -> None:
    """Serve the run until it ends, or until a signal has this node leave it.

    Raises InputError before anything starts, RoleDied, NodeLost, Interrupted.
    """
    config = load_run(run_dir)
    beat = check_run(run_dir, config)
    gpus = listed_gpus()
    check_roles(config, generators=generators, has_verifier=has_verifier, gpus=len(gpus))
    nodes, width = active_nodes(config, max(1, beat.nodes)), config.generator.tensor_parallel
    with ExitStack() as claims:
        [number] = claims.enter_context(claimed(config.run.dir, "node", count=1, first=nodes))
        replicas = config.generator.replicas
        indices = claims.enter_context(
            claimed(config.run.dir, "generator", count=generators, first=replicas)
        )
        engines = {
            index: range(place * width, (place + 1) * width) if gpus else range(0)
            for place, index in enumerate(indices)
        }
        roles = NodeRoles(engines=engines, has_verifier=has_verifier)
        if generators:
            config = _with_engine_ports(config, indices)
        log_into(config.run.dir / "logs" / f"launch-node-{number}.log")
        names = [f"generator-{index}" for index in indices]
        names += [f"verifier-{number}"] * has_verifier
        say(console, f"node {number} joins {config.run.dir}: {', '.join(names)}")
        with other_node(config, console, roles, gpus, number=number, nodes=nodes) as node:
            follow(node)


def _with_engine_ports(config: Config, indices: range) -> Config:
    """The config with ports of these generators' engines that are free on this node."""
    first = find_free(LOOPBACK[0], 2 * len(indices)) - 2 * indices[0]
    return config.replaced(ports={"engine": first})


def check_run(run_dir: Path, config: Config) -> Beat:
    """The heartbeat of the run, if a node can join it now. Raises InputError."""
    beat = find_living(run_dir, watch_s=STATUS_WATCH_S)
    if beat is None:
        state = "has ended" if (run_dir / SUMMARY).exists() else "is not running: start it first"
        raise InputError(f"the run in {run_dir} {state}")
    if beat.phase == PREPARED:
        raise InputError(
            f"the run in {run_dir} is prepared, and not running: start `megatron-rl node` first"
        )
    if beat.code != code_digest():
        raise InputError(
            f"the run in {run_dir} was started with another version of the program (digest "
            f"{beat.code or 'unknown'}) than this one ({code_digest()}): join with its version"
        )
    own = config.run.dir / CONFIG
    if not own.exists() or not own.samefile(run_dir / CONFIG):
        raise InputError(
            f"the run calls its folder {config.run.dir}, and {run_dir} is another one on this "
            "node: mount it at the same path"
        )
    if config.ports.host in LOOPBACK and beat.host != socket.gethostname():
        raise InputError(
            f"the run listens on {config.ports.host} of {beat.host} alone: join there, or start "
            "the run by `megatron-rl prepare` with ports.host=ADDRESS"
        )
    return beat


def check_roles(config: Config, *, generators: int, has_verifier: bool, gpus: int) -> None:
    """Raise InputError unless this node can run the roles. gpus: number on this node."""
    width = config.generator.tensor_parallel
    if generators < 0 or not (generators or has_verifier):
        raise InputError("nothing to start: give --generators N, or --verifier")
    if not generators:
        return
    if config.weights.method == "ipc":
        raise InputError(
            "weights.method = 'ipc' shares the memory of one GPU: no generator can join this run; "
            "start it with 'folder' or 'reshard'"
        )
    if gpus and width > gpus:
        raise InputError(
            f"an engine of {width} GPUs (generator.tensor_parallel) spans nodes, and such an "
            f"engine cannot join: this node has {gpus} GPUs"
        )
    if gpus and generators * width > gpus:
        raise InputError(
            f"{generators} engines of {width} GPUs need {generators * width}, and this node has "
            f"{gpus}: lower --generators, or list others in CUDA_VISIBLE_DEVICES"
        )
