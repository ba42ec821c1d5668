"""Which variables a process of a run gets, by the device that it computes on.

Used by the launcher, so without torch: a variable has to be set before torch is loaded.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from megatron_rl.protocol.wire import LOOPBACK

DeviceKind = Literal["cpu", "cuda"]
_THREADS = "OMP_NUM_THREADS"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def device_of_host(gpus: Sequence[str], torch_version: str | None = None) -> DeviceKind:
    """What trainer ranks and engines compute on, on a host that lists these GPUs.

    torch_version: default: that of the installed package, which may be a build without CUDA.
    """
    torch_version = version("torch") if torch_version is None else torch_version
    return "cuda" if gpus and not torch_version.endswith("+cpu") else "cpu"


def uses_gpus(device: DeviceKind) -> bool:
    """Whether a process that computes on `device` needs a GPU."""
    return device == "cuda"


def role_environment(device: DeviceKind) -> dict[str, str]:
    """Variables of a process that computes on `device`.

    Queue and verifiers compute on the CPU of every host. On CUDA threads and compilers are left
    alone: SGLang and Megatron compile some of their operations there, and what runs on the host may
    use its cores. Ranks that torchrun starts need `ranks_environment`.
    """
    if device == "cuda":
        # SGLang and FlashInfer call ninja by name, which is installed beside this interpreter.
        tools = str(Path(sys.executable).parent)
        return {"PATH": os.pathsep.join([tools, os.environ.get("PATH", os.defpath)])}
    return {
        # More threads than cores slow SGLang's CPU server by a factor of ten.
        _THREADS: "1",
        # Compiling takes longer than it saves on a CPU.
        "TORCHDYNAMO_DISABLE": "1",
    }


def ranks_environment(
    device: DeviceKind, ranks: int, *, given: Mapping[str, str] | None = None, cores: int = 0
) -> dict[str, str]:
    """Variables of torchrun and the ranks that it starts on this host.

    On CUDA their share of the cores is said: torchrun gives a rank one thread when nothing is.
    given: what the launcher's own environment says, which counts more; cores: default: those of
    this process.
    """
    environment = role_environment(device)
    given = os.environ if given is None else given
    if device == "cuda" and _THREADS not in given:
        cores = cores or len(os.sched_getaffinity(0))
        environment[_THREADS] = str(max(1, cores // ranks))
    return environment


def collective_environment(host: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Keep gloo's sockets on loopback if those of the run are there.

    By itself gloo listens where the host's name leads, which others may reach. given: what the
    launcher's own environment says, which counts more.
    """
    given = os.environ if given is None else given
    if host not in LOOPBACK or _GLOO_INTERFACE in given:
        return {}
    return {_GLOO_INTERFACE: "lo"}
