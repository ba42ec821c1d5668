"""The store of a group listens where it is told and nowhere else."""

import socket

import psutil
import pytest

from megatron_rl.weights.exchange.group import open_store


def listeners() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_the_master_listens_on_its_address_alone_and_serves_others() -> None:
    before = listeners()
    master = open_store("127.0.0.1", 0, is_master=True, timeout_s=5)
    assert listeners() - before == {("127.0.0.1", master.port)}
    other = open_store("127.0.0.1", master.port, is_master=False, timeout_s=5)
    other.set("key", "value")
    assert master.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", master.port), timeout=60)


def has_version_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_version_6(), reason="no IPv6 here")
def test_it_listens_on_version_6_too() -> None:
    master = open_store("::1", 0, is_master=True, timeout_s=5)
    assert master.port in {port for address, port, *_ in listeners() if address == "::1"}


def test_a_port_that_is_taken_is_an_error_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", taken.getsockname()[1], is_master=True, timeout_s=5)
