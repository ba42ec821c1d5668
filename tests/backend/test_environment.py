"""Which variables a process of a run gets, by the device that it computes on."""

import importlib.util
import re
import socket
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import MagicMock

import psutil
import pytest

from megatron_rl.backend import environment
from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    interface_of,
    ranks_environment,
    role_environment,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.launcher.supervisor import child_environment
from megatron_rl.protocol.nccl_settings import CALL_LIMIT_S, CHOSEN

CPU_ONLY = {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}


@pytest.fixture(autouse=True)
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host may have one."""
    monkeypatch.setenv("CUDA_HOME", "/no/toolkit")


def test_compiled_graphs_and_threads_are_withheld_on_the_cpu_alone() -> None:
    assert role_environment("cpu") == {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert role_environment("cuda").keys() == {"PATH"}
    # What every process gets does not bring them back.
    assert not CPU_ONLY & child_environment().keys()


def test_what_is_compiled_on_gpu_hosts_finds_the_environments_own_ninja(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an environment that nobody activated, too."""
    monkeypatch.setattr(sys, "executable", "/somewhere/.venv/bin/python")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert role_environment("cuda") == {"PATH": "/somewhere/.venv/bin:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("gpus", "torch_version", "device"),
    [
        ([], "2.11.0", "cpu"),
        (["0", "1"], "2.11.0", "cuda"),
        (["0"], "2.11.0+cu130", "cuda"),
        (["0"], "2.13.0+cpu", "cpu"),
    ],
)
def test_device_of_a_host_is_what_it_lists_and_torch_was_built_for(
    gpus: list[str], torch_version: str, device: str
) -> None:
    assert device_of_host(gpus, torch_version) == device


RANKS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "EP_SUPPRESS_NCCL_CHECK": "1",
    # TransformerEngine 2.12's ring sends and receives in one batch, at any count of context ranks.
    "NVTE_BATCH_MHA_P2P_COMM": "1",
    "OMP_NUM_THREADS": "4",
}


def of_two_ranks(device: Literal["cpu", "cuda"], **options: Any) -> dict[str, str]:
    """Variables of two ranks on 8 cores."""
    return ranks_environment(device, 2, cores=8, **{"given": {}} | options)


def test_trainer_ranks_on_cuda_grow_their_segments() -> None:
    plain = role_environment("cuda") | RANKS
    grown = plain | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert of_two_ranks("cuda", expandable_segments=True) == grown
    assert of_two_ranks("cuda") == plain
    assert of_two_ranks("cpu", expandable_segments=True) == role_environment("cpu")
    # What the user has set counts more, under torch's old name and its new one.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        given = {name: "max_split_size_mb:256"}
        assert of_two_ranks("cuda", expandable_segments=True, given=given) == plain
    for name in RANKS:
        assert name not in of_two_ranks("cuda", given={name: "8"})


def test_deterministic_ranks_get_the_switches_of_every_library() -> None:
    switches = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    given = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    for deterministic in (False, True):
        ranks = of_two_ranks("cuda", deterministic=deterministic, given=given)
        assert {name: ranks.get(name) for name in switches} == (
            switches if deterministic else dict.fromkeys(switches)
        )
        # All ranks of a communicator choose an algorithm by themselves, so engines are told, too.
        collective = collective_environment("127.0.0.1", 9.0, {}, deterministic=deterministic)
        assert collective.get("NCCL_ALGO") == ("^NVLS" if deterministic else None)
    assert not switches.keys() & of_two_ranks("cpu", deterministic=True).keys()


def test_transformer_engine_loads_the_libraries_of_torch_and_not_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an installation for GPUs: here none of NVIDIA's packages is there."""
    found = of_two_ranks("cuda")
    assert found.keys() == {"PATH", *RANKS}
    for folder in ("cudnn", "cu13"):
        (tmp_path / "nvidia" / folder / "lib").mkdir(parents=True)
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
    found = of_two_ranks("cuda", given={"NVRTC_HOME": "/mine"})
    homes = {name: path for name, path in found.items() if name.endswith("_HOME")}
    packages = tmp_path / "nvidia"
    assert homes == {"CUDNN_HOME": str(packages / "cudnn"), "CURAND_HOME": str(packages / "cu13")}
    assert "CUDNN_HOME" not in of_two_ranks("cpu")


@pytest.mark.parametrize("given", [{}, {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}])
def test_a_library_that_names_a_part_of_cudnn_loads_in_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    """As TransformerEngine's: it needs libcudnn_graph.so.9 and has no path to it."""
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    part, user = folder / "libcudnn_graph.so.9", tmp_path / "libuser.so"
    name = f"-Wl,-soname,{part.name}"
    for output, source, *flags in (
        (part, "int graph(void) { return 7; }", name),
        (user, "int graph(void); int use(void) { return graph(); }", str(part)),
    ):
        command = ["gcc", "-shared", "-fPIC", "-o", str(output), "-x", "c", "-", "-x", "none"]
        subprocess.run([*command, *flags], input=source, text=True, check=True, timeout=200)
    variables = of_two_ranks("cuda", given=given)
    program = f"import ctypes; print(ctypes.CDLL({str(user)!r}).use())"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], env=given | variables,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout == "7\n", done.stderr
    # What the user's environment says comes after it, and stays.
    assert variables["LD_LIBRARY_PATH"].split(":")[1:] == list(given.values())


def test_memory_that_engines_open_is_not_of_such_segments() -> None:
    assert load_config(None, []).has_expandable_segments
    assert not load_config(None, ["expert.train.expandable_segments=false"]).has_expandable_segments
    assert not load_config(None, ["weights.method=ipc"]).has_expandable_segments


NCCL = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "91"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_collectives_of_a_run_on_loopback_stay_there(host: str) -> None:
    assert collective_environment(host, 90.5, {}) == NCCL | {"GLOO_SOCKET_IFNAME": "lo"}


def test_what_the_user_has_set_counts() -> None:
    given = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_CUMEM_ENABLE": "0"}
    rest = {name: value for name, value in NCCL.items() if name not in given}
    # Nor is anything looked up then.
    assert collective_environment("no.such.host.invalid", 90.5, given) == rest


def test_all_that_ranks_of_a_communicator_share_is_set() -> None:
    assert NCCL.keys() == {*CHOSEN, CALL_LIMIT_S}


def test_sglang_leaves_alone_what_is_set() -> None:
    spec = importlib.util.find_spec("sglang")
    source = (Path(spec.origin).parent / "srt" / "entrypoints" / "engine.py").read_text()
    for name in CHOSEN:
        assert re.search(rf'"{name}" not in os\.environ', source), name


def own_addresses() -> list[tuple[str, str]]:
    """(interface, address) of those by which other nodes may reach this one."""
    return [
        (name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family is socket.AF_INET and not ip_address(each.address).is_loopback
    ]


@pytest.mark.skipif(not own_addresses(), reason="this host has no network")
def test_gloo_of_several_hosts_listens_on_the_interface_of_ports_host() -> None:
    for name, address in own_addresses():
        assert interface_of(address) == name


def test_gloo_of_another_host_listens_where_the_way_to_ports_host_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The way to another host of the network begins at this host's own address there.
    given = {"lo": ("127.0.0.1",), "ib0": ("10.1.0.9",), "eth0": ("192.0.2.2", "10.0.0.9")}
    addresses = {
        name: [SimpleNamespace(address=each) for each in own] for name, own in given.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(environment.socket, "socket", lambda *_: way_from("10.0.0.9"))
    assert interface_of("10.0.0.7") == "eth0"
    monkeypatch.setattr(environment.socket, "socket", lambda *_: way_from("10.2.0.9"))
    with pytest.raises(InputError, match="no network interface.*10.2.0.9.*set GLOO_SOCKET_IFNAME"):
        interface_of("10.0.0.7")


def way_from(address: str) -> Any:
    """A socket whose system sends from this address."""
    found = MagicMock()
    found.__enter__.return_value.getsockname.return_value = (address, 40_000)
    return found


def test_a_name_that_leads_to_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Debian's /etc/hosts has it of the host's own name.
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(InputError, match="'node1' leads to 127.0.1.1 on this host"):
        collective_environment("node1", 90.5, {})


def test_a_host_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(InputError, match="'node1' cannot be reached from this host: Name or"):
        interface_of("node1")
