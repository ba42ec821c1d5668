"""Which roles run on which host, on which of its GPUs. Pure but for `listed_gpus`.

Used by the launcher. GPUs are counted through all hosts: the trainer's ranks take the first ones,
then each engine its own, then the scorer. An engine lies across two hosts only when it has more
ranks than one has GPUs: then it has whole hosts.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, field

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LIST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class HostRoles:
    """What one host runs, beside a verifier; the first host also runs the queue."""

    trainer_ranks: int = 0
    trainer_hosts: int = 0
    """Hosts that have trainer ranks; they are the first ones."""
    engines: dict[int, range] = field(default_factory=dict)
    """Generator -> its GPUs, counted on this host."""
    nodes: dict[int, "EngineNode"] = field(default_factory=dict)
    """Generator -> which part of its engine this is, of those that lie across hosts."""
    scorer: range = range(0)
    """GPUs of the scorer, counted on this host."""


@dataclass(frozen=True)
class EngineNode:
    """One host of an engine that lies across several."""

    rank: int
    """Its place among them; 0 leads the engine."""
    count: int


def place(config: Config, *, hosts: int, gpus_per_host: int) -> list[HostRoles]:
    """The roles of each host. Raises InputError when they do not fit."""
    ranks, width = _trainer_ranks(config), config.generator.tensor_parallel
    _check_widths(config, ranks, gpus_per_host)
    trainer_hosts = -(-ranks // gpus_per_host)
    engines: list[dict[int, range]] = [{} for _ in range(hosts)]
    nodes: list[dict[int, EngineNode]] = [{} for _ in range(hosts)]
    needed = hosts_needed(config, gpus_per_host=gpus_per_host)
    if needed > hosts:
        raise InputError(
            f"{ranks} trainer ranks and {config.generator.replicas} engines of {width} GPUs need "
            f"{needed} hosts of {gpus_per_host} GPUs, and there are {hosts}: lower "
            "generator.replicas or parallel.data, or start the run on that many hosts with "
            "`megatron-rl prepare` and `megatron-rl host` (docs/slurm.md)"
        )
    first = ranks
    for index, first_gpu in enumerate(_engine_starts(config, ranks, gpus_per_host)):
        host, start = divmod(first_gpu, gpus_per_host)
        first = first_gpu + width
        count = -(-width // gpus_per_host)
        for rank in range(count):
            engines[host + rank][index] = range(start, start + width // count)
            if count > 1:
                nodes[host + rank][index] = EngineNode(rank, count)
    scorer = range(0)
    if config.has_scorer:
        scorer = place_scorer(config, max(first, ranks), gpus_per_host=gpus_per_host)
    per_host = min(ranks, gpus_per_host)
    return [
        HostRoles(
            per_host if host < trainer_hosts else 0,
            trainer_hosts,
            engines[host],
            nodes[host],
            scorer,
        )
        for host in range(hosts)
    ]


def hosts_needed(config: Config, *, gpus_per_host: int) -> int:
    """Fewest hosts on which trainer ranks and engines fit."""
    ranks, width = _trainer_ranks(config), config.generator.tensor_parallel
    starts = _engine_starts(config, ranks, gpus_per_host)
    return max(1, -(-max(ranks, *(start + width for start in starts)) // gpus_per_host))


def _trainer_ranks(config: Config) -> int:
    """Without training, every GPU is there for the engines."""
    return config.parallel.world_size if config.train.steps or config.sft.steps else 0


def _engine_starts(config: Config, ranks: int, gpus_per_host: int) -> list[int]:
    """First GPU of each engine, counted through all hosts."""
    width = config.generator.tensor_parallel
    first = 0 if config.generator.colocate else ranks
    starts = []
    for _ in range(config.generator.replicas):
        if first % gpus_per_host + width > gpus_per_host:
            first += -first % gpus_per_host
        starts.append(first)
        first += width
    return starts


def _check_widths(config: Config, ranks: int, gpus_per_host: int) -> None:
    """Raise InputError for a trainer of so many ranks, or engines, that fill no whole hosts."""
    width = config.generator.tensor_parallel
    if ranks > gpus_per_host and ranks % gpus_per_host:
        raise InputError(
            f"{ranks} trainer ranks do not fill whole hosts of {gpus_per_host} GPUs: choose "
            "parallel sizes whose product is a multiple of them, or smaller than a host"
        )
    tensor = config.parallel.tensor
    if config.parallel.overlap_tensor and ranks > gpus_per_host and gpus_per_host % tensor:
        raise InputError(
            f"parallel.overlap_tensor=true with parallel.tensor={tensor} on hosts of "
            f"{gpus_per_host} GPUs: tensor ranks of different hosts cannot open each other's "
            "buffers; choose a parallel.tensor that divides them, or set it to false"
        )
    if width > gpus_per_host and width % gpus_per_host:
        raise InputError(
            f"generator.tensor_parallel = {width} is more than the {gpus_per_host} GPUs of a host, "
            "and no multiple of them: an engine across hosts takes whole ones; nearest possible: "
            f"{width - width % gpus_per_host}"
        )
    if width > gpus_per_host and config.generator.engine != "sglang":
        raise InputError(
            f"generator.tensor_parallel = {width} is more than the {gpus_per_host} GPUs of a host: "
            f"only SGLang's engines lie across hosts, not {config.generator.engine!r}"
        )
    if width > gpus_per_host and config.weights.method == "ipc":
        raise InputError(
            f"generator.tensor_parallel = {width} is more than the {gpus_per_host} GPUs of a host, "
            "and weights.method='ipc' shares memory of one host: use 'reshard' or 'host'"
        )


def place_scorer(config: Config, first: int, *, gpus_per_host: int) -> range:
    """GPUs of the scorer, on the one host; first: the first that is free. Raises InputError."""
    width = config.scorer.tensor_parallel
    if first + width > gpus_per_host:
        raise InputError(
            f"the scorer needs {width} GPUs of its own (scorer.tensor_parallel) beside the {first} "
            f"of trainer and generators, and the host has {gpus_per_host}: lower parallel.data, "
            "generator.replicas or scorer.tensor_parallel, or set algorithm.reference.source="
            "'trainer'"
        )
    return range(first, first + width)


def gpu_environment(gpus: range, names: list[str]) -> dict[str, str]:
    """The variable that shows a process these GPUs alone; names: those of all GPUs of the host."""
    return {GPUS_VARIABLE: ",".join(names[gpu] for gpu in gpus)} if names else {}


def listed_gpus() -> list[str]:
    """Names of this host's GPUs that its processes may use; [] without any."""
    if GPUS_VARIABLE in os.environ:
        return [name for name in os.environ[GPUS_VARIABLE].split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=_LIST_TIMEOUT_S,
    )  # fmt: skip
    return done.stdout.split() if done.returncode == 0 else []


@dataclass(frozen=True)
class Machines:
    """The hosts that a run is to have."""

    hosts: int | None = 1
    """None: as many as the configuration needs."""
    gpus_per_host: int | None = None
    """None: as many as this host lists."""

    def place(self, config: Config) -> list[HostRoles]:
        """The roles of each host; [] where this host lists no GPUs. Raises InputError."""
        count = self.gpus_per_host or len(listed_gpus())
        if not count:
            return []
        hosts = self.hosts or hosts_needed(config, gpus_per_host=count)
        return place(config, hosts=hosts, gpus_per_host=count)


ONE_HOST = Machines()
