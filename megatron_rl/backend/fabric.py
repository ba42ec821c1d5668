"""The network between nodes as the kernel lists it, and what keeps NCCL from using it.

Used by `megatron-rl doctor`. Reads files; sets nothing, because what the user exports counts. Where
a fabric cannot be used, NCCL uses TCP without an error. Sources: NCCL's user guide and net_ib
(connect.cc of 2.31: without NCCL_IB_GID_INDEX it chooses a RoCE v2 address by itself); EFA needs
the plugin aws-ofi-nccl, which NCCL opens as libnccl-net.so.
"""

import ctypes.util
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_rl.backend.gpu_host import Finding

DEVICES = Path("/sys/class/infiniband")
UNLIMITED = -1
"""A limit of memory that is none, as the module resource has it."""
_CAP_IPC_LOCK = 14
_ROCE_V2 = "RoCE v2"
_HCA, _GID, _OFF = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE"
_PLUGIN, _PROVIDER = "NCCL_NET_PLUGIN", "FI_PROVIDER"


@dataclass(frozen=True)
class Port:
    """A port of a device of the fabric."""

    device: str
    """Such as mlx5_0."""
    kind: Literal["InfiniBand", "RoCE", "EFA"]
    is_active: bool
    rate: str = ""
    """As the kernel says it, such as "400 Gb/sec (4X NDR)"."""
    gids: Mapping[int, str] = field(default_factory=dict)
    """Index of each address of the port -> its type: "IB/RoCE v1" or "RoCE v2"."""


def find_ports(devices: Path = DEVICES) -> list[Port]:
    """All ports of this host."""
    return [port for device in sorted(devices.glob("*")) for port in _ports_of(device)]


def _ports_of(device: Path) -> Iterator[Port]:
    is_efa = (device / "device" / "driver").resolve().name == "efa"
    for port in sorted((device / "ports").glob("*")):
        kind = "RoCE" if _text(port / "link_layer") == "Ethernet" else "InfiniBand"
        types = {int(path.name): _text(path) for path in (port / "gid_attrs" / "types").glob("*")}
        yield Port(
            device.name,
            "EFA" if is_efa else kind,
            _text(port / "state").endswith("ACTIVE"),
            _text(port / "rate"),
            {index: text for index, text in types.items() if text},
        )


def _text(path: Path) -> str:
    """A file of the kernel; "": it has no value, as an index without address."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_plugin(environment: Mapping[str, str]) -> str:
    """The plugin for a network that NCCL would open; "": none."""
    given = environment.get(_PLUGIN, "")
    if "/" in given:
        return given if Path(given).exists() else ""
    name = f"nccl-net-{given}" if given else "nccl-net"
    for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder and (path := Path(folder) / f"lib{name}.so").exists():
            return str(path)
    return ctypes.util.find_library(name) or ""


def lockable_bytes(status: Path = Path("/proc/self/status")) -> int:
    """How much memory this process may lock, or UNLIMITED.

    status: of the process. With CAP_IPC_LOCK, as root has it outside containers, no limit counts.
    """
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    if found and int(found[1], 16) >> _CAP_IPC_LOCK & 1:
        return UNLIMITED
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def check_fabric(
    ports: Sequence[Port], environment: Mapping[str, str], *, plugin: str, locked_bytes: int
) -> list[Finding]:
    """What NCCL can use, and each thing that keeps it from it with the fix.

    plugin, locked_bytes: of `find_plugin` and `lockable_bytes`.
    """
    active = [port for port in ports if port.is_active]
    if not ports:
        return [Finding(True, "fabric", "none: NCCL uses TCP between nodes")]
    if not active:
        down = ", ".join(port.device for port in ports)
        return [Finding(False, "fabric", f"no port is active ({down}): NCCL uses TCP")]
    told = ", ".join(dict.fromkeys(f"{port.kind} {port.device} {port.rate}" for port in active))
    found = [Finding(True, "fabric", told)]
    if any(port.kind == "EFA" for port in active):
        faults = _efa_faults(environment, plugin)
    else:
        faults = [*_choice_faults(active, environment), *_roce_faults(active, environment)]
    if locked_bytes != UNLIMITED:
        faults.append(
            f"a process may lock {locked_bytes >> 10} KiB, too little for the adapter's buffers: "
            "`ulimit -l unlimited` (Docker: --ulimit memlock=-1; Slurm: PropagateResourceLimits; "
            "Kubernetes: the capability IPC_LOCK)"
        )
    return [*found, *(Finding(False, "NCCL on the fabric", text) for text in faults)]


def _efa_faults(environment: Mapping[str, str], plugin: str) -> list[str]:
    faults = []
    if not plugin:
        named = f" ({_PLUGIN}={environment[_PLUGIN]})" if environment.get(_PLUGIN) else ""
        faults.append(
            f"the loader finds no libnccl-net.so{named}, so NCCL uses TCP: install aws-ofi-nccl "
            "and put its folder on LD_LIBRARY_PATH (AWS's installer: /opt/amazon/ofi-nccl/lib, and "
            "libfabric in /opt/amazon/efa/lib)"
        )
    if environment.get(_PROVIDER, "efa") != "efa":
        faults.append(f"{_PROVIDER}={environment[_PROVIDER]}: set it to efa, or unset it")
    return faults


def _choice_faults(active: Sequence[Port], environment: Mapping[str, str]) -> list[str]:
    """Whether NCCL uses the adapters that are meant for it."""
    if environment.get(_OFF, "0") != "0":
        return [f"{_OFF}={environment[_OFF]} has NCCL use TCP: unset it"]
    given = environment.get(_HCA, "")
    if given:
        chosen = [port for port in active if _names(given, port.device)]
        there = ", ".join(port.device for port in active)
        return [] if chosen else [f"{_HCA}={given} names no active device: there are {there}"]
    meant = [port.device for port in active if port.kind == "InfiniBand"]
    if meant and len(meant) < len(active):
        return [
            "InfiniBand and RoCE are active, and NCCL may use both: choose the adapters between "
            f"the nodes, for example {_HCA}=={','.join(meant)}"
        ]
    return []


def _names(given: str, device: str) -> bool:
    """Whether a value of NCCL_IB_HCA takes a device: prefixes; ^ excludes, = is for whole names."""
    is_excluded, rest = given.startswith("^"), given.removeprefix("^")
    is_exact, names = rest.startswith("="), rest.removeprefix("=").split(",")
    named = (name.partition(":")[0] for name in names)
    is_named = any(device == name if is_exact else device.startswith(name) for name in named)
    return is_named != is_excluded


def _roce_faults(active: Sequence[Port], environment: Mapping[str, str]) -> list[str]:
    """Whether RoCE ports have an address that can be routed, and NCCL takes it."""
    ports = [port for port in active if port.kind == "RoCE"]
    ports = [port for port in ports if _names(environment.get(_HCA, "^="), port.device)]
    faults = [
        f"{port.device} has no address of type {_ROCE_V2}: give its network interface an IP address"
        for port in ports
        if _ROCE_V2 not in port.gids.values()
    ]
    index = environment.get(_GID, "-1")
    if index == "-1":
        return faults
    for port in ports:
        kind = port.gids.get(int(index), "none") if index.isdigit() else "none"
        if kind != _ROCE_V2 and _ROCE_V2 in port.gids.values():
            faults.append(
                f"{_GID}={index} is of type {kind} on {port.device}: unset it, NCCL then takes one "
                f"of type {_ROCE_V2}"
            )
    return faults
