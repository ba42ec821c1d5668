"""`megatron-rl doctor`: checks what this machine has and lacks, NCCL, and a run's open sockets.

Imports nothing heavy.
"""

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.backend.collective_check import CollectivesFailed, check_pair
from megatron_rl.backend.environment import (
    device_of_host,
    ranks_environment,
    role_environment,
    uses_gpus,
)
from megatron_rl.backend.fabric import check_fabric, find_plugin, find_ports, lockable_bytes
from megatron_rl.backend.gpu_host import check_host
from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, complete_run_folder
from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.layer_choice import PLAIN, Device, engine_fault
from megatron_rl.config.tree import Config
from megatron_rl.launcher.model_checks import find_device
from megatron_rl.launcher.placement import found_gpus
from megatron_rl.launcher.ports import is_free, resolve_ports
from megatron_rl.launcher.preflight import find_compiler
from megatron_rl.launcher.run_folder import CONFIG
from megatron_rl.observe.host_memory import memory_limit_bytes
from megatron_rl.observe.listening import find_listeners
from verification.code.setup import CodeLimits, resolve
from verification.verdict import GradingError

_PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "transformers",
    "pyzmq",
    "msgspec",
    "pydantic",
    "math-verify",
    "reasoning-gym",
)
_GPU_PACKAGES = ("transformer-engine-torch", "flashinfer-python", "ninja", "torch-memory-saver")
_NO_GPU_PACKAGE = "missing: bash tools/install.sh gpu, whose log is .venv/install.log"
_DEGRADED = (
    "degraded, as bubblewrap does not work here: what a model wrote sees names of the host's files "
    "and processes. Install it (apt-get install bubblewrap) and allow unprivileged user namespaces "
    "(Docker: --security-opt seccomp=unconfined). Only the task code needs it"
)
_PACKED = "TransformerEngine's, for packed sequences"
RANK_MODULE = "megatron_rl.trainer.train"
"""Module of a trainer rank."""
_IMPORT_TIMEOUT_S = 600.0
"""An import takes minutes on a busy node."""
LIMITED = None
"""Neither found nor missing: only some tasks need it."""
_MARKS = {True: "ok", LIMITED: "limited", False: "!!"}
_LOW_MEMORY_BYTES = 6 << 30
_LOW_DISK_BYTES = 5 << 30


@dataclass(frozen=True)
class DoctorOptions:
    listening: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", autocompletion=complete_run_folder)
    ] = None
    """Instead list the sockets on which this node's processes of the run listen, with their
    addresses and what a peer needs to be heard. Exit code 1: other nodes reach one without
    authentication."""
    json: Json = False
    """Print the sockets as JSON."""
    nccl: Annotated[bool, typer.Option("--nccl")] = False
    """Instead have two processes on two GPUs of this node add up and broadcast 256 MiB, and print
    the bandwidth. Exit code 1: they failed or took too long; 2: there are no two GPUs."""


@command("doctor", "Say what this machine has and lacks.")
def doctor(options: DoctorOptions, console: Console) -> int:
    """Exit code: 0, 1 (a run would lack something, or a socket is open), 2 (bad input)."""
    if options.nccl:
        return check_collectives(console)
    if options.listening is not None:
        return list_listening(options.listening, console, as_json=options.json)
    if options.json:
        raise InputError("--json is for --listening RUN_DIR: leave it out")
    return 1 if examine(console) else 0


def list_listening(run_dir: Path, console: Console, *, as_json: bool = False) -> int:
    """Print the listening sockets of a run; 1 if other nodes reach one without authentication."""
    if not (run_dir / CONFIG).exists():
        raise InputError(f"{run_dir} holds no run (it has no {CONFIG}): name a run folder")
    config = load_config(run_dir / CONFIG)
    # The folder may have been moved, or may be mounted elsewhere.
    run = config.run.model_copy(update={"dir": run_dir.resolve()})
    listeners = find_listeners(config.model_copy(update={"run": run}))
    open_ones = [one for one in listeners if one.is_open]
    if as_json:
        rows = [dataclasses.asdict(one) | {"is_open": one.is_open} for one in listeners]
        print(json.dumps(rows), file=console.file)
        return 1 if open_ones else 0
    table = Table("", "role", "pid", "listens on", "what", "a peer needs")
    for one in listeners:
        mark = "!!" if one.is_open else "other address" if one.is_elsewhere else "ok"
        place = f"{one.kind} {one.address}" + (f":{one.port}" if one.port else "")
        table.add_row(mark, one.role, str(one.pid), Text(place), one.what, one.needs)
    show_table(console, table)
    if open_ones:
        say(
            console,
            f"{len(open_ones)} sockets (!!) are open to other nodes without authentication: allow "
            "only the nodes of the run on their network (docs/nodes.md, Open sockets)",
        )
    else:
        say(console, "No socket of the run is open to other nodes without authentication.")
    return 1 if open_ones else 0


def check_collectives(console: Console) -> int:
    """Print what two GPUs of this node exchange; 1 if they cannot. Raises InputError."""
    gpus = found_gpus()
    if len(gpus) < 2 or not uses_gpus(device_of_host(gpus, _version("torch") or "")):
        raise InputError(
            f"--nccl needs two GPUs and torch for CUDA; this node lists {len(gpus)} GPUs and has "
            f"torch {_version('torch') or '(not installed)'}: give it on a node with GPUs, after "
            "`bash tools/install.sh gpu`"
        )
    try:
        found = check_pair()
    except CollectivesFailed as error:
        say(console, f"NCCL failed between two GPUs (NCCL_DEBUG=INFO says more): {error}")
        return 1
    say(
        console,
        f"NCCL between two GPUs: all_reduce {found.all_reduce_gb_s:.1f} GB/s, broadcast "
        f"{found.broadcast_gb_s:.1f} GB/s",
    )
    return 0


def examine(console: Console) -> int:
    """Print a table of checks and return how many found something that every run needs missing."""
    checks: list[tuple[bool | None, str, str]] = [
        *_check_packages(),
        *_check_machine(),
        *_check_gpu_host(),
        *_check_sandbox(),
        *_check_loopback(),
    ]
    table = Table("", "what", "found")
    for is_good, what, found in checks:
        # Text: what was found may hold brackets, which are no markup.
        table.add_row(_MARKS[is_good], what, Text(found))
    show_table(console, table)
    lacking = [what for is_good, what, _ in checks if is_good is False]
    text = "Nothing is missing."
    if limited := [what for is_good, what, _ in checks if is_good is LIMITED]:
        text = f"Nothing is missing for most runs; limited: {', '.join(limited)}."
    if lacking:
        text = f"Look at the lines with !!, each says what to do: {', '.join(lacking)}."
    say(console, text)
    return len(lacking)


def _check_packages() -> list[tuple[bool, str, str]]:
    found = [(True, "python", platform.python_version())]
    for name in _PACKAGES:
        version = _version(name)
        found.append((version is not None, name, version or "missing: bash tools/install.sh"))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_machine() -> list[tuple[bool, str, str]]:
    compiler = find_compiler()
    setpriv = shutil.which("setpriv")
    memory = min(psutil.virtual_memory().available, memory_limit_bytes())
    disk = shutil.disk_usage(Path.cwd()).free
    return [
        (compiler is not None, "C++ compiler", compiler or "missing: apt-get install g++"),
        (setpriv is not None, "setpriv", setpriv or "missing: apt-get install util-linux"),
        (True, "CPU cores for this process", str(len(os.sched_getaffinity(0)))),
        _enough("free memory", memory, _LOW_MEMORY_BYTES, "end other programs"),
        _enough("free disk here", disk, _LOW_DISK_BYTES, "make room, or run on another disk"),
    ]


def _enough(what: str, found: int, needed: int, fix: str) -> tuple[bool, str, str]:
    """needed: bytes that suffice for the examples."""
    text = f"{found / 2**30:.1f} GiB"
    if found >= needed:
        return True, what, f"{text} ({needed >> 30} are enough for the examples)"
    return False, what, f"only {text}; the examples need {needed >> 30}: {fix}"


def _check_gpu_host() -> Sequence[tuple[bool | None, str, str]]:
    """Check the needs of engines and trainer ranks on GPUs."""
    gpus = found_gpus()
    if not gpus:
        return [(True, "GPUs", "none: runs use the CPU")]
    device = device_of_host(gpus, _version("torch") or "")
    if not uses_gpus(device):
        idle = f"{len(gpus)}, left idle: torch is for the CPU. Use them: bash tools/install.sh gpu"
        return [(True, "GPUs", idle)]
    packages = [(name, _version(name)) for name in _GPU_PACKAGES]
    numactl = shutil.which("numactl")
    fault = find_import_fault(RANK_MODULE, ranks_environment(device, 1))
    return [
        (True, "GPUs", str(len(gpus))),
        *check_host(os.environ | role_environment(device)),
        *((bool(found), name, found or _NO_GPU_PACKAGE) for name, found in packages),
        *_check_attention(find_device()),
        (numactl is not None, "numactl", numactl or "missing: apt-get install numactl"),
        _check_locks(Path.home() / ".cache"),
        *_check_fabric(),
        (not fault, "import of a trainer rank", fault or "as the launcher starts it"),
    ]


def _check_attention(gpu: Device | None) -> list[tuple[bool | None, str, str]]:
    """Say whether TransformerEngine computes packed sequences on this node's GPU."""
    if gpu is None or not gpu.has_engine:
        return []
    fault = engine_fault("bfloat16", PLAIN, gpu)
    local = f"{fault}: expert.model.layers = 'auto' takes the local layers, and model.fp8 fails"
    return [(LIMITED if fault else True, "attention of the trainer", local if fault else _PACKED)]


def _check_fabric() -> list[tuple[bool | None, str, str]]:
    """Check what NCCL needs between nodes, which a run on one node does without."""
    found = check_fabric(
        find_ports(), os.environ, plugin=find_plugin(os.environ), locked_bytes=lockable_bytes()
    )
    return [(one.is_good or LIMITED, one.what, one.found) for one in found]


def _check_locks(folder: Path) -> tuple[bool, str, str]:
    """Check that SGLang and FlashInfer can lock compiled kernels in a folder."""
    what = "locks for compiled kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        fix = "set SGLANG_CACHE_DIR and FLASHINFER_WORKSPACE_BASE to folders of a local disk"
        return False, what, f"{folder}: {error}; {fix}"
    return True, what, str(folder)


def find_import_fault(module: str, variables: Mapping[str, str]) -> str:
    """Error of a process with these variables that imports a module; "": none."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import {module}"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_IMPORT_TIMEOUT_S:.0f} s"
    return f"exit code {done.returncode}\n{done.stderr[-3000:]}" if done.returncode else ""


def _check_sandbox() -> list[tuple[bool | None, str, str]]:
    try:
        found = resolve(CodeLimits())
    except GradingError as error:
        return [(LIMITED, "sandbox for programs", f"{error}. Only the task code needs it")]
    if found.isolation == "bubblewrap":
        return [(True, "sandbox for programs", found.isolation)]
    return [(LIMITED, "sandbox for programs", f"{found.isolation}: {_DEGRADED}")]


def _check_loopback() -> list[tuple[bool, str, str]]:
    try:
        ports = resolve_ports(Config()).ports
    except InputError as error:
        return [(False, "loopback ports", str(error))]
    is_good = is_free(ports.host, ports.prompts)
    return [(is_good, "loopback ports", f"{ports.host}, for example {ports.prompts}")]
