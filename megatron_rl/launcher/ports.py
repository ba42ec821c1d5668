"""Finds free ports for a run, and names the holder of a port in use.

Used by the launcher. Minutes pass between the choice of a port and its first listener. To keep
other launchers of the host away, each chosen port is a locked file, whose lock the kernel releases
when the process ends. Launchers see each other's locks if they share the temporary folder.
"""

import contextlib
import fcntl
import functools
import os
import random
import secrets
import socket
import tempfile
from collections.abc import Iterable, Set
from pathlib import Path

import psutil

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, PortsConfig
from megatron_rl.protocol.wire import LOOPBACK

# Below Linux' range for outgoing connections (from 32768): none takes a port before it is bound.
_FIRST, _LAST = 20_000, 32_000
_MAX_TRIES = 200
_FOLDER = "megatron_rl_ports"
_SHARED = 0o1777
_NAMES = ("prompts", "verify", "batches", "weights", "torchrun", "sft", "nodes", "engine", "scorer")


def resolve_ports(config: Config) -> Config:
    """The config with a free port in place of each port 0. Raises InputError."""
    ports = config.ports
    _check_family(ports.host)
    taken = {port for _, port in listed_ports(config)}
    chosen: dict[str, int] = {}
    for name in _NAMES:
        count = _width(name, config)
        if getattr(ports, name) == 0 and count:
            chosen[name] = find_free(ports.host, count, taken)
            taken.update(range(chosen[name], chosen[name] + count))
    return config.replaced(ports=chosen)


def _check_family(host: str) -> None:
    """Raise InputError for a name without an IPv4 address. The configuration refuses `::1`."""
    try:
        socket.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"ports.host = {host!r} has no IPv4 address ({error}), and IPv6 addresses are not "
            "supported: give the IPv4 address of the first node (`hostname -I` lists them)"
        ) from error


def draw_label(config: Config) -> Config:
    """The config with a label for this start of the run, unless it names one."""
    return config if config.ports.label else config.replaced(ports={"label": secrets.token_hex(16)})


def listed_ports(config: Config) -> list[tuple[str, int]]:
    """(key, port) of every port fixed by the config, for all replicas of the engine."""
    found = []
    for name in _NAMES:
        base = getattr(config.ports, name)
        if base:
            found.extend((f"expert.ports.{name}", base + i) for i in range(_width(name, config)))
    return found


def check_ports(config: Config) -> None:
    """Raise InputError for a fixed port that is named twice or is in use."""
    seen: dict[int, str] = {}
    for key, port in listed_ports(config):
        if port in seen:
            raise InputError(
                f"{key} and {seen[port]} are both port {port}: choose two, or 0 for any"
            )
        seen[port] = key
        if not is_free(config.ports.host, port):
            raise InputError(
                f"{key} = {port} on {config.ports.host} is in use{_holder(port)}: stop that "
                f"process, choose another port, or set {key}=0 for any free one"
            )


def check_engine_ports(config: Config, indices: Iterable[int]) -> None:
    """Raise InputError for a port of these generators' engines that is in use on this node.

    The first node chose `expert.ports.engine` by its own free ports.
    """
    for port in (config.ports.engine + 2 * index + part for index in indices for part in (0, 1)):
        _check_here("engine", LOOPBACK[0], port, config)


def check_scorer_ports(config: Config, address: str) -> None:
    """Raise InputError for a port of the scorer that is taken on this node.

    The first node chose `expert.ports.scorer` by what is free there. address: this node's.
    """
    # Trainer ranks connect to the first, only the scorer to its engine's.
    for part, host in enumerate((address, LOOPBACK[0], LOOPBACK[0])):
        _check_here("scorer", host, config.ports.scorer + part, config)


def _check_here(name: str, host: str, port: int, config: Config) -> None:
    if not is_free(host, port):
        key, first = f"expert.ports.{name}", getattr(config.ports, name)
        raise InputError(
            f"port {port} of {name} ({key} = {first}) is in use on this node{_holder(port)}: stop "
            f"that process, or set {key} to the first of {_width(name, config)} ports that are "
            "free on every node"
        )


def is_free(host: str, port: int) -> bool:
    """Whether a socket can listen on the port now."""
    with socket.socket() as probe:
        # As for servers: a port with a connection in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _width(name: str, config: Config) -> int:
    """Ports of a name: 3 for a scorer, 2 for each replica of the engine, else 1."""
    if name == "scorer":
        return 3 if config.algorithm.needs_scorer or config.judge_folder else 0
    return 2 * config.generator.replicas if name == "engine" else 1


def find_free(host: str, count: int = 1, taken: Set[int] = frozenset()) -> int:
    """Reserve `count` free ports until this process ends; returns the first, an even one.

    taken: ports to leave out. Raises InputError.
    """
    choose = random.SystemRandom()
    for _ in range(_MAX_TRIES):
        base = choose.randrange(_FIRST, _LAST - count, 2)
        block = range(base, base + count)
        if taken.intersection(block) or not all(is_free(host, port) for port in block):
            continue
        if _locks().take(block):
            return base
    raise InputError(
        f"found no {count} free ports on {host} between {_FIRST} and {_LAST} in {_MAX_TRIES} "
        f"tries: is {host} an address of this machine? Else fix the ports in [ports]"
    )


@functools.cache
def _locks() -> "PortLocks":
    return PortLocks(Path(tempfile.gettempdir()) / _FOLDER)


def _holder(port: int) -> str:
    """` by NAME (pid N)` if this user may see the process, else ""."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_listener and connection.pid:
            return f" by {_process_name(connection.pid)}"
    return ""


def _process_name(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"


def port_names(config: Config) -> tuple[str, ...]:
    """Keys of [ports] that this run uses."""
    return tuple(name for name in _NAMES if _width(name, config))


def ports_text(ports: PortsConfig) -> str:
    return ", ".join(f"{name} {port}" for name in _NAMES if (port := getattr(ports, name)))


class PortLocks:
    """The locks of this process; they hold until it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[int, int] = {}
        """Descriptor by port."""

    def take(self, ports: Iterable[int]) -> bool:
        """Lock all these ports, or none if one is already locked. Raises InputError."""
        taken: dict[int, int] = {}
        for port in ports:
            descriptor = None if port in self._held else self._lock(port)
            if descriptor is None:
                for earlier in taken.values():
                    os.close(earlier)
                return False
            taken[port] = descriptor
        self._held |= taken
        return True

    def _lock(self, port: int) -> int | None:
        """A descriptor that holds the lock; None if another process holds it."""
        try:
            descriptor = self._open(self._folder / str(port))
        except OSError as error:
            # Another user has created the file and not yet made it readable.
            if isinstance(error, PermissionError) and os.access(self._folder, os.W_OK):
                return None
            raise InputError(
                f"cannot lock port {port} in {self._folder}: {error.strerror}; name another folder "
                "for temporary files by TMPDIR"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def _open(self, path: Path) -> int:
        if not self._folder.is_dir():
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir()
                # chmod, because the umask narrows the modes of mkdir and open.
                self._folder.chmod(_SHARED)
        # A lock needs only read access. In a shared folder other users' files cannot be opened with
        # O_CREAT (fs.protected_regular).
        with contextlib.suppress(FileExistsError):
            made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o444)
            os.fchmod(made, 0o444)
            os.close(made)
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
