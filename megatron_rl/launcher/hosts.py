"""A run on several hosts: prepared once, then started on every host by the cluster's own launcher.

`megatron-rl prepare` runs on the first host and writes RUN_DIR/config.toml, which all roles of all
hosts read: RUN_DIR is on a file system that they share. `megatron-rl host` runs on every host (one
task of `srun`), starts the roles that `placement.py` gives it, and ends when they have; when one
dies it ends the others of its host and leaves with an error, on which the cluster's launcher has to
end the other hosts. A cold start comes first, on the hosts of the trainer; the engines load
meanwhile. One process, one thread.
"""

import logging
import sys
import time
from pathlib import Path

from megatron_rl.backend.environment import (
    address_towards,
    collective_environment,
    device_of_host,
    ranks_environment,
    role_environment,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.trainer import SftConfig
from megatron_rl.config.tree import Config
from megatron_rl.launcher import preflight
from megatron_rl.launcher.cold_start import (
    cold_start_folder,
    first_model,
    is_due,
    left_behind_text,
    steps_left_behind,
)
from megatron_rl.launcher.placement import (
    EngineNode,
    HostRoles,
    gpu_environment,
    listed_gpus,
    place,
)
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.run_folder import CONFIG, check_run_folder, set_aside, write_config
from megatron_rl.launcher.supervisor import POLL_S, Supervisor
from megatron_rl.protocol.checkpoint_folder import find_resume
from megatron_rl.protocol.keys import make_keys
from megatron_rl.protocol.wire import LOOPBACK, DeadlineExceeded
from megatron_rl.rollout_queue.dropped_prompts import write_dropped
from megatron_rl.rollout_queue.replay.traces import prepare_traces

QUEUE = "queue"
TRAINER = "trainer"
SFT = "sft"
# After the queue and the trainer have ended, the roles that they told to stop have so long.
_END_S = 60.0
# A shared file system shows one host within this time what another one has written.
_VISIBLE_S = 120.0

log = logging.getLogger(__name__)


def prepare(config: Config) -> Config:
    """Check the configuration, choose ports on this host, make keys, write the run folder.

    In the folder of a run with a complete checkpoint, or with what is left of its cold start, that
    run goes on. Raises InputError.
    """
    _check_phases(config.sft)
    if not config.train.steps:
        raise InputError("train.steps is 0: there is nothing to train")
    prompts = preflight.check(config)
    beginning = check_run_folder(config)
    resumed = beginning.checkpoint
    if beginning.is_again and resumed is None:
        _begin_anew(config)
    run_dir = config.run.dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    ports = resolve_ports(config).ports
    if ports.host not in LOOPBACK and ports.keys_dir is None:
        ports = ports.model_copy(update={"keys_dir": run_dir / "keys"})
        try:
            if not beginning.is_again or not ports.keys_dir.exists():
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


def _check_phases(sft: SftConfig) -> None:
    """Raise InputError for what one host alone can do."""
    if sft.control:
        raise InputError(
            "sft.control is a phase of `megatron-rl run`, on one host: set sft.control=false"
        )
    if sft.steps and sft.export_every_steps:
        raise InputError(
            f"sft.export_every_steps={sft.export_every_steps} chooses by evaluations between cold "
            "start and reinforcement learning, which `megatron-rl run` makes on one host: set it "
            "to 0; or make the cold start there with train.steps=0, and begin with its hf/"
            "cold_start as model.path and sft.steps=0"
        )


def _begin_anew(config: Config) -> None:
    """Go on with the cold start of an earlier attempt; without one, raise InputError."""
    run_dir, steps = config.run.dir, steps_left_behind(config)
    if not steps:
        # No lock says whether the hosts of the first attempt have ended.
        raise InputError(
            f"{run_dir} was prepared before, and its run has no complete checkpoint to resume "
            "from: name another folder with --run-dir DIR, or remove this one"
        )
    kept = left_behind_text(config, steps)
    aside = set_aside(run_dir, steps)
    log.warning("the run in %s begins anew, %s; what else there was is in %s", run_dir, kept, aside)


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
    environment = collective_environment(config.ports.host, config.weights.deadline_s)
    is_resumed = find_resume(config.checkpoint, config.run.dir) is not None
    with Supervisor(config.run.dir / "logs", extra_environment=environment) as supervisor:
        has_cold_start = is_due(config, is_resumed=is_resumed)
        _start_serving(supervisor, config, roles, host, gpus, has_cold_start=has_cold_start)
        if roles.trainer_ranks:
            if has_cold_start:
                _cold_start(supervisor, config, roles, host, gpus)
            model = first_model(config, is_resumed=is_resumed)
            command = [*torchrun_arguments(config, roles, host), *_common(config)]
            name = TRAINER if host == 0 else f"{TRAINER}-host-{host}"
            arguments = [*command, override("model.path", str(model))]
            _start_ranks(supervisor, name, arguments, _ranks_environment(config, roles, gpus))
        _wait(supervisor)


def _common(config: Config) -> list[str]:
    return ["--config", str(config.run.dir / CONFIG)]


def _cold_start(
    supervisor: Supervisor, config: Config, roles: HostRoles, host: int, gpus: list[str]
) -> None:
    """Supervised training with the other hosts of the trainer, and its model.

    The collectives of its ranks have deadlines, which bound the wait for them. Raises RoleDied,
    DeadlineExceeded.
    """
    name = SFT if host == 0 else f"{SFT}-host-{host}"
    command = [*torchrun_arguments(config, roles, host, is_cold_start=True), *_common(config)]
    _start_ranks(supervisor, name, command, _ranks_environment(config, roles, gpus))
    while supervisor.is_running(name):
        _look(supervisor)
    folder = cold_start_folder(config)
    deadline = time.monotonic() + _VISIBLE_S
    while not folder.exists():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the cold start has ended, and {folder} is not there after {_VISIBLE_S:.0f} s: "
                "is the run folder on a file system that all hosts share?"
            )
        _look(supervisor)


def _ranks_environment(config: Config, roles: HostRoles, gpus: list[str]) -> dict[str, str]:
    return ranks_environment(
        device_of_host(gpus),
        roles.trainer_ranks,
        expandable_segments=config.has_expandable_segments,
    )


def _start_ranks(
    supervisor: Supervisor, name: str, arguments: list[str], environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    supervisor.start(name, command, environment=environment)


def _start_serving(
    supervisor: Supervisor, config: Config, roles: HostRoles, host: int, gpus: list[str], *,
    has_cold_start: bool,
) -> None:  # fmt: skip
    """Queue, engines and verifier of this host; engines take weights at the first publish."""
    common = _common(config)
    python = [sys.executable, "-m"]
    without_device = role_environment("cpu")
    device = device_of_host(gpus)
    if host == 0:
        after = ["--after", str(cold_start_folder(config))] if has_cold_start else []
        queue = [*python, "megatron_rl.rollout_queue.server", *common, *after]
        supervisor.start(QUEUE, queue, environment=without_device)
        if config.metrics.is_on:
            metrics = [*python, "megatron_rl.metrics_out.worker", *common]
            supervisor.start("metrics", metrics, environment=without_device, is_expendable=True)
    for index, own in roles.engines.items():
        name, command = engine_command(config, index, roles.nodes.get(index))
        supervisor.start(
            name,
            [*python, *command],
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


def engine_command(config: Config, index: int, node: EngineNode | None) -> tuple[str, list[str]]:
    """Name and arguments of the role that runs an engine, or a host's part of one (`node`)."""
    name, common = f"generator-{index}", [*_common(config), "--index", str(index)]
    if node is None:
        return name, ["generation.worker", *common]
    common += ["--nodes", str(node.count)]
    if node.rank:
        part = ["--node", str(node.rank)]
        return f"{name}-node-{node.rank}", ["generation.follower", *common, *part]
    address = address_towards(config.ports.host)
    return name, ["generation.worker", *common, "--address", address]


def torchrun_arguments(
    config: Config, roles: HostRoles, host: int, *, is_cold_start: bool = False
) -> list[str]:
    """Arguments of torchrun on one host, up to those of the trainer."""
    # A port each: one host may be at the next phase while another one leaves the last.
    port = config.ports.sft if is_cold_start else config.ports.torchrun
    return [
        f"--nnodes={roles.trainer_hosts}",
        f"--node-rank={host}",
        f"--nproc-per-node={roles.trainer_ranks}",
        f"--master-addr={config.ports.host}",
        f"--master-port={port}",
        "-m",
        f"megatron_rl.trainer.{'sft' if is_cold_start else 'train'}",
    ]


def _look(supervisor: Supervisor) -> None:
    """Wait a moment, then see to the roles of this host. Raises RoleDied."""
    time.sleep(POLL_S)
    for restart in supervisor.check():
        log.warning("restarted %s, %d of %d", restart.role, restart.count, restart.limit)


def _wait(supervisor: Supervisor) -> None:
    """Until every role has ended well; their own deadlines bound it. Raises RoleDied."""
    ends_at = None
    while running := [
        name
        for name, role in supervisor.roles.items()
        if supervisor.is_running(name) and not role.is_expendable
    ]:
        _look(supervisor)
        if QUEUE not in supervisor.roles or not {QUEUE, TRAINER}.isdisjoint(running):
            continue
        ends_at = ends_at or time.monotonic() + _END_S
        if time.monotonic() > ends_at:
            log.warning("%s did not end within %.0f s of the queue", ", ".join(running), _END_S)
            return
