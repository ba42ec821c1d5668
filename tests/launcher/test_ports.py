"""Launchers that choose ports at the same time choose different ones."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config, GeneratorConfig, PortsConfig
from megatron_rl.launcher.ports import PortLocks, check_engine_ports, resolve_ports

CHOOSERS = 8
WIDTH = 2
# As many ports as all choosers need: without locks two of them would meet surely.
CHOOSE = f"""
import sys
from megatron_rl.launcher import ports
ports._FIRST, ports._LAST = int(sys.argv[1]), int(sys.argv[1]) + {CHOOSERS * WIDTH} + {WIDTH}
ports._MAX_TRIES = 2000
sys.stdin.readline()
try:
    print(ports.find_free("127.0.0.1", {WIDTH}), flush=True)
except ports.InputError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("host", ["::1", "[::1]", "fd77::10"])
def test_ipv6_addresses_are_refused_with_the_configuration(host: str) -> None:
    with pytest.raises(ConfigError, match="IPv6 addresses are not supported"):
        load_config(None, [f"ports.host={host}"])


def test_a_name_without_an_ipv4_address_is_refused_before_ports_are_chosen() -> None:
    with pytest.raises(InputError, match="no-such-host.invalid' has no IPv4 address"):
        resolve_ports(Config(ports=PortsConfig(host="no-such-host.invalid")))


@contextmanager
def chooser(folder: Path, first: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHOOSE, str(first)]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def unused_range() -> int:
    """The first, an even one, of ports that nobody listens on now."""
    for first in range(21_000, 31_000, 50):
        with ExitStack() as stack:
            try:
                for port in range(first, first + CHOOSERS * WIDTH):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no unused ports")


@pytest.mark.timeout(300)
def test_choosers_at_once_get_ports_of_their_own_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    first = unused_range()
    with ExitStack() as stack:
        processes = [stack.enter_context(chooser(tmp_path, first)) for _ in range(CHOOSERS)]
        late, after_crash = (stack.enter_context(chooser(tmp_path, first)) for _ in range(2))
        for process in processes:
            go_on(process)
        chosen = [int(said_by(process)) for process in processes]
        assert sorted(chosen) == list(range(first, first + CHOOSERS * WIDTH, WIDTH))
        # Nothing listens on any of them, and yet there is none left.
        go_on(late)
        assert "found no 2 free ports" in said_by(late)
        processes[3].send_signal(signal.SIGKILL)
        processes[3].wait(60)
        go_on(after_crash)
        assert int(said_by(after_crash)) == chosen[3]


def test_all_ports_of_a_block_are_locked_or_none(tmp_path: Path) -> None:
    ours, other = PortLocks(tmp_path / "locks"), PortLocks(tmp_path / "locks")
    assert other.take([21003])
    assert not ours.take([21002, 21003])
    assert other.take([21002])
    assert not other.take([21002])
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("place", [0, 3])
def test_an_engines_port_that_is_taken_on_this_node_is_named(place: int) -> None:
    first = unused_range()
    config = Config(ports=PortsConfig(engine=first), generator=GeneratorConfig(replicas=4))
    with socket.socket() as other:
        # Ports of generator 0 are the first two, those of generator 1 the next two.
        other.bind(("127.0.0.1", first + place))
        other.listen(1)
        check_engine_ports(config, [1 - place // 2, 2, 3])
        with pytest.raises(InputError, match=f"port {first + place} .* 8 ports that are free"):
            check_engine_ports(config, [0, 1])
