"""Network namespaces of Linux as nodes; tests cut a node from the switch between them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Network:
    """Node K has the address 10.77.0.(K + 1); namespaces end with the context."""

    def __init__(self, nodes: int) -> None:
        self._prefix = f"mrl{os.getpid()}"
        self._made: list[str] = []
        try:
            self._add("switch")
            self._in("switch", "link", "add", "bridge", "type", "bridge")
            self._in("switch", "link", "set", "bridge", "up")
            for node in range(nodes):
                self._connect(node)
        except subprocess.CalledProcessError:
            self.close()
            raise

    def _name(self, part: object) -> str:
        return f"{self._prefix}-{part}"

    def _add(self, part: object) -> None:
        _ip("netns", "add", self._name(part))
        self._made.append(self._name(part))
        self._in(part, "link", "set", "lo", "up")

    def _in(self, part: object, *arguments: str) -> None:
        _ip("-n", self._name(part), *arguments)

    def _connect(self, node: int) -> None:
        self._add(node)
        ends = ("netns", self._name("switch"), "type", "veth", "peer", "name", "eth0")
        _ip("link", "add", f"port{node}", *ends, "netns", self._name(node))
        self._in("switch", "link", "set", f"port{node}", "master", "bridge", "up")
        self._in(node, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        self._in(node, "link", "set", "eth0", "up")

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def inside(self, node: int) -> list[str]:
        """What to put before a command that runs on the node."""
        return ["ip", "netns", "exec", self._name(node)]

    def cut(self, node: int) -> None:
        """Unplug a node: packets to and from it are lost."""
        self._in("switch", "link", "set", f"port{node}", "down")

    def heal(self, node: int) -> None:
        """Plug it in again."""
        self._in("switch", "link", "set", f"port{node}", "up")

    def close(self) -> None:
        for name in self._made:
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """Skips the test where this user may make no namespace."""
    if not shutil.which("ip"):
        pytest.skip("no `ip` of iproute2")
    try:
        made = Network(nodes)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user may make no network namespace: {error.stderr.decode().strip()}")
    try:
        yield made
    finally:
        made.close()
