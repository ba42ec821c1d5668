"""What the doctor says of a host's fabric, on folders as the kernel has them in /sys."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.backend.fabric import (
    UNLIMITED,
    check_fabric,
    find_plugin,
    find_ports,
    lockable_bytes,
)

Adapter = Callable[..., None]


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    """Adds an adapter to the host's folder."""

    def add(name: str, layer: str, *, state: str = "4: ACTIVE", driver: str = "mlx5_core") -> None:
        device = tmp_path / "class" / name
        port = device / "ports" / "1"
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir()
        (device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        files = {"link_layer": layer, "state": state, "rate": "400 Gb/sec (4X NDR)"}
        for file, text in files.items():
            (port / file).write_text(f"{text}\n")
        for index in range(2 if layer == "Ethernet" else 0):
            kind = ["IB/RoCE v1", "RoCE v2"][index]
            (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        # The kernel refuses to read an index without an address; here it is a folder.
        (port / "gid_attrs" / "types" / "9").mkdir()

    return add


def told(folder: Path, plugin: str = "", locked: int = UNLIMITED, **environment: str) -> list[str]:
    """The first line says what is there; each further one is a fault."""
    ports = find_ports(folder / "class")
    found = check_fabric(ports, environment, plugin=plugin, locked_bytes=locked)
    assert [one.is_good for one in found[1:]] == [False] * (len(found) - 1)
    return [one.found for one in found]


def test_a_host_without_adapters_uses_tcp_and_that_is_no_fault(tmp_path: Path) -> None:
    assert told(tmp_path, locked=65536) == ["none: NCCL uses TCP between nodes"]


def test_infiniband_needs_no_variable_but_memory_that_can_be_locked(
    tmp_path: Path, adapter: Adapter
) -> None:
    adapter("mlx5_0", "InfiniBand")
    adapter("mlx5_1", "InfiniBand", state="1: DOWN")
    assert told(tmp_path) == ["InfiniBand mlx5_0 400 Gb/sec (4X NDR)"]
    _, fault = told(tmp_path, locked=8 << 20)
    assert "may lock 8192 KiB" in fault and "ulimit -l unlimited" in fault
    _, fault = told(tmp_path, NCCL_IB_DISABLE="1")
    assert fault == "NCCL_IB_DISABLE=1 has NCCL use TCP: unset it"


def test_an_adapter_without_an_active_port_is_named(tmp_path: Path, adapter: Adapter) -> None:
    adapter("mlx5_0", "InfiniBand", state="2: INIT")
    [finding] = check_fabric(find_ports(tmp_path / "class"), {}, plugin="", locked_bytes=-1)
    assert not finding.is_good and "no port is active (mlx5_0)" in finding.found


@pytest.mark.parametrize(
    ("value", "is_right"),
    [("", False), ("=mlx5_1", True), ("mlx5_1:1", True), ("^mlx5_2", True), ("mlx4", False),
     ("=mlx5", False), ("mlx5", True)],
)  # fmt: skip
def test_the_adapters_between_nodes_are_chosen_where_there_are_two_kinds(
    tmp_path: Path, adapter: Adapter, value: str, is_right: bool
) -> None:
    adapter("mlx5_1", "InfiniBand")
    adapter("mlx5_2", "Ethernet")
    faults = told(tmp_path, **({"NCCL_IB_HCA": value} if value else {}))[1:]
    assert (faults == []) == is_right
    if not value:
        assert faults[0].endswith("for example NCCL_IB_HCA==mlx5_1")
    elif not is_right:
        assert f"NCCL_IB_HCA={value} names no active device: there are mlx5_1, mlx5_2" in faults


def test_roce_takes_an_address_of_version_2(tmp_path: Path, adapter: Adapter) -> None:
    adapter("mlx5_0", "Ethernet")
    assert told(tmp_path) == ["RoCE mlx5_0 400 Gb/sec (4X NDR)"]
    assert told(tmp_path, NCCL_IB_GID_INDEX="1")[1:] == []
    for index, kind in {"0": "IB/RoCE v1", "5": "none", "x": "none"}.items():
        [fault] = told(tmp_path, NCCL_IB_GID_INDEX=index)[1:]
        assert fault.startswith(f"NCCL_IB_GID_INDEX={index} is of type {kind} on mlx5_0: unset it")
    (tmp_path / "class/mlx5_0/ports/1/gid_attrs/types/1").unlink()
    [fault] = told(tmp_path)[1:]
    assert (
        fault == "mlx5_0 has no address of type RoCE v2: give its network interface an IP address"
    )


def test_efa_needs_its_plugin(tmp_path: Path, adapter: Adapter) -> None:
    adapter("rdmap79s0", "Unspecified", driver="efa")
    assert told(tmp_path, plugin="/opt/libnccl-net.so", FI_PROVIDER="efa") == [
        "EFA rdmap79s0 400 Gb/sec (4X NDR)"
    ]
    [fault] = told(tmp_path)[1:]
    assert "no libnccl-net.so, so NCCL uses TCP: install aws-ofi-nccl" in fault
    [fault] = told(tmp_path, plugin="/opt/libnccl-net.so", FI_PROVIDER="tcp")[1:]
    assert fault == "FI_PROVIDER=tcp: set it to efa, or unset it"


def test_a_process_with_the_capability_may_lock_any_memory(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tbash\nCapEff:\t0000000000004000\n")
    assert lockable_bytes(status) == UNLIMITED
    status.write_text("Name:\tbash\nCapEff:\t000001ffffffbfff\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        assert lockable_bytes(status) == 65536
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_a_plugin_is_found_where_the_loader_looks(tmp_path: Path) -> None:
    for name in ("libnccl-net.so", "libnccl-net-ofi.so"):
        (tmp_path / name).touch()
    folders = {"LD_LIBRARY_PATH": f"/none:{tmp_path}"}
    assert find_plugin(folders) == f"{tmp_path}/libnccl-net.so"
    assert find_plugin(folders | {"NCCL_NET_PLUGIN": "ofi"}) == f"{tmp_path}/libnccl-net-ofi.so"
    assert find_plugin(folders | {"NCCL_NET_PLUGIN": "spcx"}) == ""
    path = f"{tmp_path}/libnccl-net-ofi.so"
    assert find_plugin({"NCCL_NET_PLUGIN": path}) == path
    assert find_plugin({}) == find_plugin({"NCCL_NET_PLUGIN": "/none.so"}) == ""
