"""A run on several hosts: prepared once, then started on every host by the cluster's own launcher.

`megatron-rl prepare` runs on the first host and writes RUN_DIR/config.toml, which all roles of all
hosts read: RUN_DIR is on a file system that they share. `megatron-rl host` runs on every host (one
task of `srun`), starts the roles that `placement.py` gives it in each phase of the run, and ends
when they have; when one dies, or another host is lost, it ends the others of its host and leaves
with an error. One process, one thread.
"""

import logging
from pathlib import Path

from megatron_rl.backend.environment import collective_environment
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher import preflight
from megatron_rl.launcher.cold_start import is_due, left_behind_text, steps_left_behind
from megatron_rl.launcher.host_link import FirstHost, OtherHost
from megatron_rl.launcher.host_phases import QUEUE, Share, follow, lead
from megatron_rl.launcher.placement import HostRoles, listed_gpus, place
from megatron_rl.launcher.ports import draw_label, ports_text, resolve_ports
from megatron_rl.launcher.prompt_record import pin_revisions, record_prompts
from megatron_rl.launcher.run_folder import (
    CONFIG,
    check_run_folder,
    set_aside,
    write_config,
    write_evaluation_config,
)
from megatron_rl.launcher.scorer_checks import refuse_hosts
from megatron_rl.launcher.supervisor import Supervisor
from megatron_rl.metrics_out.follow import Follower
from megatron_rl.protocol.checkpoint_folder import find_resume
from megatron_rl.protocol.exports import COLD_START, CONTROL, FINAL, candidate_name
from megatron_rl.protocol.keys import make_keys
from megatron_rl.protocol.wire import LOOPBACK
from megatron_rl.rollout_queue.dropped_prompts import write_dropped
from megatron_rl.rollout_queue.replay.traces import prepare_traces
from megatron_rl.weights.folders.staging import recover

log = logging.getLogger(__name__)


def prepare(config: Config) -> Config:
    """Check the configuration, choose ports on this host, make keys, write the run folder.

    In the folder of a run with a complete checkpoint, or with what is left of its cold start, that
    run goes on. Raises InputError.
    """
    if not config.train.steps:
        raise InputError("train.steps is 0: there is nothing to train")
    refuse_hosts(config)
    config = pin_revisions(config)
    prompts = preflight.check(config)
    beginning = check_run_folder(config)
    resumed = beginning.checkpoint
    if beginning.is_again and resumed is None:
        _begin_anew(config)
    run_dir = config.run.dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    ports = draw_label(resolve_ports(config)).ports
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
    for name in (COLD_START, CONTROL, FINAL):
        recover(run_dir / "hf" / name)
    # Now, so that every host sees them when it begins an evaluation.
    for label in evaluations_of(resolved):
        write_evaluation_config(resolved, label, run_dir / "hf" / label)
    record_prompts(resolved, prompts.files, is_resumed=resumed is not None)
    write_config(resolved, resumed)
    write_dropped(run_dir, prompts.dropped)
    notes = [*prompts.notes, *prepare_traces(resolved)]
    for note in notes:
        log.info("%s", note)
    return resolved


def evaluations_of(config: Config) -> list[str]:
    """Labels of the evaluations that are phases of their own, and names of their models."""
    control = [CONTROL] if config.sft.control and config.eval.is_wanted else []
    return [*map(candidate_name, config.sft.candidates), *control]


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


def describe_host(run_dir: Path, *, host: int, hosts: int, gpus_per_host: int | None) -> list[str]:
    """Lines about what `run_host` would start. Raises InputError, as that does."""
    config, roles, gpus = _placed(run_dir, host=host, hosts=hosts, gpus_per_host=gpus_per_host)
    found = [QUEUE] * (host == 0) + [f"generator-{index}" for index in roles.engines]
    found.append(f"verifier-{host}")
    if roles.trainer_ranks:
        found.append(f"{roles.trainer_ranks} trainer ranks of {roles.trainer_hosts} hosts")
    is_resumed = find_resume(config.checkpoint, config.run.dir) is not None
    first = ["the cold start comes first"] if is_due(config, is_resumed=is_resumed) else []
    return [
        f"host {host} of {hosts}, {len(gpus)} GPUs, would start: {', '.join(found)}",
        *first,
        f"{config.ports.host}: {ports_text(config.ports)}",
        "Dry run: nothing was started.",
    ]


def run_host(run_dir: Path, *, host: int, hosts: int, gpus_per_host: int | None) -> None:
    """Start this host's roles of a prepared run and wait until all have ended in good order.

    host: its place among `hosts`, from 0; gpus_per_host: None: as many as this host lists. Raises
    InputError, RoleDied, HostLost, DeadlineExceeded.
    """
    config, roles, gpus = _placed(run_dir, host=host, hosts=hosts, gpus_per_host=gpus_per_host)
    environment = collective_environment(config.ports.host, config.weights.deadline_s)
    with Supervisor(config.run.dir / "logs", extra_environment=environment) as supervisor:
        # The link closes first: others are told of an error before this host ends its processes.
        if host == 0:
            is_resumed = find_resume(config.checkpoint, config.run.dir) is not None
            with FirstHost(config, hosts) as link:
                rows = Follower(config.run.dir / "metrics.jsonl")
                # Of an earlier start of the run.
                rows.skip()
                own = Share(config, roles, host, gpus, supervisor, link, hosts, rows)
                lead(own, link, is_resumed)
        else:
            with OtherHost(config, host, hosts) as link:
                follow(Share(config, roles, host, gpus, supervisor, link, hosts), link)


def last_words(run_dir: Path, host: int) -> str:
    """What becomes of a run that has ended early, on the first host; "" elsewhere."""
    if host or not (run_dir / CONFIG).exists():
        return ""
    checkpoint = find_resume(load_config(run_dir / CONFIG).checkpoint, run_dir)
    if checkpoint is None:
        return "Nothing is saved: no checkpoint is complete yet."
    return f"`megatron-rl prepare`, then the same command on each host, resume from {checkpoint}."


def _placed(
    run_dir: Path, *, host: int, hosts: int, gpus_per_host: int | None
) -> tuple[Config, HostRoles, list[str]]:
    """The prepared configuration, this host's share of it, its GPUs. Raises InputError."""
    if not 0 <= host < hosts:
        raise InputError(f"--host {host} of --hosts {hosts}: hosts are counted from 0")
    path = run_dir / CONFIG
    if not path.exists():
        raise InputError(f"{run_dir} is no prepared run: run `megatron-rl prepare` first")
    config, gpus = load_config(path), listed_gpus()
    count = gpus_per_host or len(gpus)
    if not count or (gpus and len(gpus) < count):
        raise InputError(f"this host lists {len(gpus)} GPUs: give --gpus-per-host")
    return config, place(config, hosts=hosts, gpus_per_host=count)[host], gpus
