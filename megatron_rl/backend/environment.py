"""Which variables a process of a run gets, by the device that it computes on.

Used by the launcher, so without torch: a variable has to be set before torch is loaded.
"""

import itertools
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import psutil

from megatron_rl.backend.cpu.sglang import torch_is_for_cpu
from megatron_rl.backend.gpu_host import find_cuda_home
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.nccl_settings import CALL_LIMIT_S, CHOSEN, call_limit
from megatron_rl.protocol.wire import LOOPBACK

DeviceKind = Literal["cpu", "cuda"]
DEVICE_OF_MODE: dict[str, DeviceKind] = {"cpu": "cpu", "gpu": "cuda"}
"""Mode of tools/install.sh -> what its packages compute on."""
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-.+")
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Names of the variable by which torch's allocator of device memory is set."""
_LIBRARIES = {"CUDNN_HOME": "cudnn", "NVRTC_HOME": "cu13", "CURAND_HOME": "cu13"}
"""Variable of TransformerEngine -> folder of NVIDIA's packages next to torch."""
_LINKED = "LD_LIBRARY_PATH"
BATCHED_RING = "NVTE_BATCH_MHA_P2P_COMM"
"""TransformerEngine's variable for sends and receives of context ranks; read at each exchange."""
RANK_SETTINGS = {
    # Megatron and TransformerEngine order communication before products only with one queue.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Without it TransformerEngine's ring sends and receives outside a batch. NCCL runs these one
    # after the other in groups bound to a device, so ranks would wait for each other in a row.
    BATCHED_RING: "1",
    # DeepEP, which Megatron imports, would stop at another NCCL that a host preloads.
    "EP_SUPPRESS_NCCL_CHECK": "1",
}
"""Variables of a trainer rank on CUDA, unless the launcher's environment has others."""
_THREADS = "OMP_NUM_THREADS"
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # torch raises an error for any value of it under which cuBLAS would not repeat its sums.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What train.deterministic needs of a trainer rank on CUDA, whatever is set outside."""
_NCCL_ALGORITHMS = ("NCCL_ALGO", "^NVLS")
"""Megatron's own check takes this value: sums inside of a switch have no fixed order."""
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def named_gpus(given: str) -> list[str]:
    """The GPUs that a value of GPUS_VARIABLE names."""
    # As CUDA does, which takes the names before the first one that is none: "-1", "NoDevFiles".
    return list(itertools.takewhile(_GPU_NAME.fullmatch, given.replace(" ", "").split(",")))


def device_of_host(gpus: Sequence[str], torch_version: str | None = None) -> DeviceKind:
    """What trainer ranks and engines compute on, on a host that lists these GPUs.

    torch_version: default: that of the installed package, which may be a build without CUDA.
    """
    return "cuda" if gpus and not torch_is_for_cpu(torch_version) else "cpu"


def uses_gpus(device: DeviceKind) -> bool:
    """Whether a process that computes on `device` needs a GPU."""
    return device == "cuda"


def role_environment(device: DeviceKind) -> dict[str, str]:
    """Variables of a process that computes on `device`.

    Queue and verifiers compute on the CPU of every node. On CUDA threads and compilers are left
    alone: SGLang and Megatron compile some of their operations there, and what runs on the host may
    use its cores. Ranks that torchrun starts need `ranks_environment`.
    """
    if device == "cuda":
        # SGLang and FlashInfer call ninja by name, which is installed next to this interpreter.
        tools = str(Path(sys.executable).parent)
        home = find_cuda_home(os.environ)
        found = {"CUDA_HOME": str(home)} if home.is_dir() else {}
        return found | {"PATH": os.pathsep.join([tools, os.environ.get("PATH", os.defpath)])}
    return {
        # More threads than cores slow SGLang's CPU server by a factor of ten.
        _THREADS: "1",
        # Compiling takes longer than it saves on a CPU.
        "TORCHDYNAMO_DISABLE": "1",
    }


def _homes() -> dict[str, str]:
    """Where TransformerEngine 2.12 finds the libraries that torch has loaded.

    By itself it looks into the host's toolkit first, and would load a cuDNN of another release
    beside torch's (transformer_engine/common/__init__.py: _load_cuda_library_from_system).
    """
    places = {name: _packages() / folder for name, folder in _LIBRARIES.items()}
    return {name: str(place) for name, place in places.items() if place.is_dir()}


def _linked_libraries(given: Mapping[str, str]) -> dict[str, str]:
    """Where the loader finds torch's cuDNN, for libraries that name its parts.

    With the variables of `_homes` TransformerEngine 2.12 opens libcudnn.so alone. Its core library
    names seven other libraries of cuDNN and has no path to them (common/__init__.py:301-380).
    """
    folder = _packages() / "cudnn" / "lib"
    if not folder.is_dir():
        return {}
    return {_LINKED: os.pathsep.join(filter(None, [str(folder), given.get(_LINKED, "")]))}


def _packages() -> Path:
    """The folder of NVIDIA's packages next to torch."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


def ranks_environment(
    device: DeviceKind,
    ranks: int,
    *,
    expandable_segments: bool = False,
    deterministic: bool = False,
    given: Mapping[str, str] | None = None,
    cores: int = 0,
) -> dict[str, str]:
    """Variables of torchrun and the trainer ranks that it starts on this host.

    given: the launcher's own environment (default), whose variables win, except those that
    `train.deterministic` needs. cores: CPU cores for all ranks; default: those of this process.
    """
    given = os.environ if given is None else given
    variables = role_environment(device)
    if device == "cpu":
        return variables
    # torchrun gives a rank one thread where the variable is not set.
    threads = max(1, (cores or len(os.sched_getaffinity(0))) // ranks)
    wanted = _homes() | RANK_SETTINGS | {_THREADS: str(threads)}
    if expandable_segments and not ALLOCATOR & given.keys():
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    variables |= {name: value for name, value in wanted.items() if name not in given}
    return variables | _linked_libraries(given) | (DETERMINISTIC if deterministic else {})


def collective_environment(
    host: str,
    deadline_s: float,
    given: Mapping[str, str] | None = None,
    *,
    deterministic: bool = False,
) -> dict[str, str]:
    """Variables of collectives, the same for every process of the run.

    host: `ports.host`; deadline_s: `expert.weights.deadline_s`; given: what the launcher's own
    environment says, which counts more; deterministic: `train.deterministic`. Raises InputError
    when the host cannot be reached from here.
    """
    given = os.environ if given is None else given
    wanted = CHOSEN | {CALL_LIMIT_S: call_limit(deadline_s)}
    if deterministic:
        wanted |= [_NCCL_ALGORITHMS]
    if _GLOO_INTERFACE not in given:
        wanted[_GLOO_INTERFACE] = interface_of(host)
    return {name: value for name, value in wanted.items() if name not in given}


def address_towards(host: str) -> str:
    """This host's IPv4 address from which `host` is reached, which may be this host itself.

    Raises InputError.
    """
    try:
        # Of a UDP socket: connecting it sends nothing, but chooses the address to send from.
        place = socket.getaddrinfo(host, 9, family=socket.AF_INET, type=socket.SOCK_DGRAM)[0][-1]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            own = probe.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"ports.host = {host!r} cannot be reached from this host: {error}; give the address of "
            f"the first node, or set {_GLOO_INTERFACE} to the interface that leads there"
        ) from error
    if ip_address(own).is_loopback and not names_loopback(host):
        raise InputError(
            f"ports.host = {host!r} leads to {place[0]} on this host, where no other host gets: "
            "give the address by which the others reach it (`hostname -I` lists them)"
        )
    return own


def interface_of(host: str) -> str:
    """The network interface of `address_towards`.

    By itself gloo listens where the host's name leads: to 127.0.1.1 on many systems, or where
    others may reach it though the run is on loopback. Raises InputError.
    """
    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(own == each.address.partition("%")[0] for each in addresses):
            return name
    raise InputError(
        f"no network interface of this host has the address {own}, by which ports.host = {host!r} "
        f"is reached: set {_GLOO_INTERFACE} to the interface that leads there"
    )


def names_loopback(host: str) -> bool:
    """Whether the user asked for a run on this host alone."""
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False
