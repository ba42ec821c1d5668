"""A run on several hosts: prepared once, then started on every host by the cluster's own launcher.

`megatron-rl prepare` runs on the first host and writes RUN_DIR/config.toml, which all roles of all
hosts read: RUN_DIR is on a file system that they share. `megatron-rl host` runs on every host (one
task of `srun`), starts the roles that `placement.py` gives it, and ends when they have; when one
dies it ends the others of its host and leaves with an error, on which the cluster's launcher has to
end the other hosts. One process, one thread.
"""

import logging
import sys
import time
from pathlib import Path

from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    ranks_environment,
    role_environment,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher import preflight
from megatron_rl.launcher.placement import HostRoles, gpu_environment, listed_gpus, place
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.run_folder import check_run_folder, write_config
from megatron_rl.launcher.supervisor import POLL_S, Supervisor
from megatron_rl.protocol.keys import make_keys
from megatron_rl.protocol.wire import LOOPBACK
from megatron_rl.rollout_queue.dropped_prompts import write_dropped
from megatron_rl.rollout_queue.replay.traces import prepare_traces

QUEUE = "queue"
TRAINER = "trainer"
# After the queue and the trainer have ended, the roles that they told to stop have so long.
_END_S = 60.0

log = logging.getLogger(__name__)


def prepare(config: Config) -> Config:
    """Check the configuration, choose ports on this host, make keys, write the run folder.

    In the folder of a run with a complete checkpoint that run goes on. Raises InputError.
    """
    if config.sft.steps or config.sft.control:
        raise InputError(
            "sft.steps and sft.control are phases of `megatron-rl run`, on one host: start from a "
            "model folder that had its cold start, with sft.steps=0 and sft.control=false"
        )
    if not config.train.steps:
        raise InputError("train.steps is 0: there is nothing to train")
    prompts = preflight.check(config)
    beginning = check_run_folder(config)
    resumed = beginning.checkpoint
    if beginning.is_again and resumed is None:
        # No lock says whether the hosts of the first attempt have ended.
        raise InputError(
            f"{config.run.dir} was prepared before, and its run has no complete checkpoint to "
            "resume from: name another folder with --run-dir DIR, or remove this one"
        )
    run_dir = config.run.dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    ports = resolve_ports(config).ports
    if ports.host not in LOOPBACK and ports.keys_dir is None:
        ports = ports.model_copy(update={"keys_dir": run_dir / "keys"})
        try:
            if resumed is None or not ports.keys_dir.exists():
                make_keys(ports.keys_dir)
        except FileExistsError as error:
            raise InputError(f"{ports.keys_dir} exists: name another run folder") from error
    run = config.run.model_copy(update={"dir": run_dir})
    resolved = config.model_copy(update={"run": run, "ports": ports})
    (run_dir / "logs").mkdir(exist_ok=True)
    write_config(resolved, resumed)
    write_dropped(run_dir, prompts.dropped)
    notes = [*prompts.notes, *prepare_traces(resolved)]
    for note in notes:
        log.info("%s", note)
    return resolved


def run_host(run_dir: Path, *, host: int, hosts: int, gpus_per_host: int | None) -> None:
    """Start this host's roles of a prepared run and wait until all have ended in good order.

    host: its place among `hosts`, from 0; gpus_per_host: None: as many as this host lists. Raises
    InputError, RoleDied.
    """
    if not 0 <= host < hosts:
        raise InputError(f"--host {host} of --hosts {hosts}: hosts are counted from 0")
    path = run_dir / "config.toml"
    if not path.exists():
        raise InputError(f"{run_dir} is no prepared run: run `megatron-rl prepare` first")
    config, gpus = load_config(path), listed_gpus()
    count = gpus_per_host or len(gpus)
    if not count or (gpus and len(gpus) < count):
        raise InputError(f"this host lists {len(gpus)} GPUs: give --gpus-per-host")
    roles = place(config, hosts=hosts, gpus_per_host=count)[host]
    environment = collective_environment(config.ports.host)
    with Supervisor(config.run.dir / "logs", extra_environment=environment) as supervisor:
        _start(supervisor, config, roles, host, gpus)
        _wait(supervisor)


def _start(
    supervisor: Supervisor, config: Config, roles: HostRoles, host: int, gpus: list[str]
) -> None:
    common = ["--config", str(config.run.dir / "config.toml")]
    python = [sys.executable, "-m"]
    without_device = role_environment("cpu")
    device = device_of_host(gpus)
    if host == 0:
        queue = [*python, "megatron_rl.rollout_queue.server", *common]
        supervisor.start(QUEUE, queue, environment=without_device)
    for index, own in roles.engines.items():
        name = f"generator-{index}"
        supervisor.start(
            name,
            [*python, "generation.worker", *common, "--index", str(index)],
            restarts=RestartRule(
                replica=name,
                limit=config.generator.max_restarts,
                until=TRAINER,
                ready_path=config.run.dir / "logs" / f"{name}.ready",
            ),
            environment=role_environment(device) | gpu_environment(own, gpus),
        )
    verifier = [*python, "verification.worker", *common, "--index", str(host)]
    supervisor.start(f"verifier-{host}", verifier, environment=without_device)
    if roles.trainer_ranks:
        ranks = torchrun_arguments(config, roles, host)
        name = TRAINER if host == 0 else f"{TRAINER}-host-{host}"
        command = [*python, "torch.distributed.run", *ranks, *common]
        environment = ranks_environment(device, roles.trainer_ranks)
        supervisor.start(name, command, environment=environment)


def torchrun_arguments(config: Config, roles: HostRoles, host: int) -> list[str]:
    """Arguments of torchrun on one host, up to those of the trainer."""
    return [
        f"--nnodes={roles.trainer_hosts}",
        f"--node-rank={host}",
        f"--nproc-per-node={roles.trainer_ranks}",
        f"--master-addr={config.ports.host}",
        f"--master-port={config.ports.torchrun}",
        "-m",
        "megatron_rl.trainer.train",
    ]


def _wait(supervisor: Supervisor) -> None:
    """Until every role has ended well; their own deadlines bound it. Raises RoleDied."""
    ends_at = None
    while running := [name for name in supervisor.roles if supervisor.is_running(name)]:
        time.sleep(POLL_S)
        for restart in supervisor.check():
            log.warning("restarted %s, %d of %d", restart.role, restart.count, restart.limit)
        if QUEUE not in supervisor.roles or not {QUEUE, TRAINER}.isdisjoint(running):
            continue
        ends_at = ends_at or time.monotonic() + _END_S
        if time.monotonic() > ends_at:
            log.warning("%s did not end within %.0f s of the queue", ", ".join(running), _END_S)
            return
