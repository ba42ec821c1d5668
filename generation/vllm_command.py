"""Installation of vLLM and command line of its process. Used by `vllm_engine.py`.

vLLM pins other packages than the rest, so it has a separate virtual environment, which
`bash tools/install.sh cpu --with vllm` makes. Its process sees our packages through a folder of
links: our own site-packages would put our versions of vLLM's packages before its own.
"""

import json
import os
import sys
from pathlib import Path

import msgspec

import generation
import megatron_rl
from generation.engine import EngineError, EngineSetup
from generation.vllm_messages import Job
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.weights.layout.shape import read_shape

PYTHON_VARIABLE = "MEGATRON_RL_VLLM_PYTHON"
"""Variable that names another interpreter than that of the installer."""
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures with the parameters of `weights/layout` in vLLM 0.32."""
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32 has attention on the CPU."""


def vllm_python() -> Path:
    """Path of the interpreter of vLLM's virtual environment; it may not exist."""
    named = os.environ.get(PYTHON_VARIABLE)
    return Path(named) if named else Path(sys.prefix) / "vllm" / "bin" / "python"


def installed_release() -> str:
    """vLLM's version, without starting it. Raises EngineError, with the fix."""
    python = vllm_python()
    found = sorted(python.parent.parent.glob("lib/python*/site-packages/vllm*.dist-info"))
    if not python.exists() or not found:
        raise EngineError(
            f"generator.engine='vllm' needs vLLM at {python}: run `bash tools/install.sh cpu "
            f"--with vllm`, or name an interpreter that has it in {PYTHON_VARIABLE}"
        )
    return found[0].name.removesuffix(".dist-info").partition("-")[2]


def refuse_gpu() -> None:
    """Raise EngineError on a host with a GPU; the configuration refuses all other settings."""
    if not sglang_cpu.is_needed():
        raise EngineError(
            "generator.engine='vllm' runs vLLM's CPU build, and this host has a GPU: use 'sglang'"
        )


def refuse_model(folder: Path) -> None:
    """Raise EngineError for a model that this engine cannot run or cannot update."""
    config = folder / "config.json"
    if not config.exists():
        raise EngineError(f"cannot load {folder}: it has no config.json")
    names = json.loads(config.read_text()).get("architectures") or ["none"]
    if names[0] not in FAMILIES:
        raise EngineError(
            f"{folder} is a {names[0]}; generator.engine='vllm' takes weights of "
            f"{', '.join(FAMILIES)} alone: use 'sglang'"
        )
    head_dim = read_shape(folder).head_dim
    if head_dim not in HEAD_SIZES:
        raise EngineError(
            f"{folder} has head_dim = {head_dim}; vLLM on the CPU supports "
            f"{', '.join(map(str, HEAD_SIZES))}: set generator.engine='sglang'"
        )


def write_job(setup: EngineSetup, socket: Path) -> Path:
    """Write the job file of the process next to the socket, with links to our packages."""
    job = Job(
        model=str(setup.model),
        dtype=setup.dtype,
        stop_ids=list(setup.stop_ids),
        max_running=setup.max_running,
        kv_tokens=setup.kv_tokens,
        context_tokens=setup.context_tokens,
        seed=setup.seed,
        version=setup.version,
        socket=str(socket),
    )
    links = socket.parent / "packages"
    links.mkdir()
    for package in (generation, megatron_rl):
        source = Path(next(iter(package.__path__)))
        (links / source.name).symlink_to(source)
    path = socket.parent / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def server_command(job: Path) -> list[str]:
    """Command line of the process."""
    return [str(vllm_python()), "-m", "generation.vllm_server", str(job)]


def server_environment(job: Path, log_path: Path) -> dict[str, str]:
    """Variables added to the process's environment: offline, one thread, no child processes.

    Intel's OpenMP is loaded first, as vLLM's manual for CPUs asks.
    """
    openmp = vllm_python().parent.parent / "lib" / "libiomp5.so"
    return {
        "PYTHONPATH": str(job.parent / "packages"),
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(log_path.parent / "vllm-cache"),
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
