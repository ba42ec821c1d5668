"""Lists the sockets on which the processes of a run listen on this node, and who may talk to them.

Used by `megatron-rl doctor --listening`. Reads /proc; stops and asks nothing.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

import psutil

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config

_ACCEPTS = 0x10000
"""Flag of a listening socket in /proc/net/unix (__SO_ACCEPTCON)."""
_ROLES = {
    "megatron_rl.rollout_queue.server": "queue",
    "generation.worker": "generator",
    "generation.follower": "generator",
    "generation.scorer": "scorer",
    "verification.worker": "verifier",
    "megatron_rl.trainer.torchrun": "torchrun",
    "megatron_rl.trainer.train": "trainer rank",
    "megatron_rl.trainer.sft": "trainer rank",
    "megatron_rl.observe.exporters.exporter": "metrics exporter",
}
"""Module of a process -> its role."""
_LAUNCHER = "megatron_rl.cli.main"
_OF_ENGINE = "sglang::"
"""Beginning of the titles of SGLang's processes."""


class Door(StrEnum):
    """What a stranger needs to be heard at a socket."""

    CURVE = "CURVE keys"
    LABEL = "label"
    API_KEY = "API key"
    SESSION = "session name"
    FILE = "access to its file"
    OPEN = "nothing"

    @property
    def is_locked(self) -> bool:
        """Whether it keeps strangers on a network out; a label is for one node."""
        return self not in (Door.LABEL, Door.OPEN)


@dataclass(frozen=True)
class Listener:
    role: str
    pid: int
    kind: str
    """tcp, udp or unix."""
    address: str
    """IP address, or path of a Unix socket."""
    port: int
    """0 for a Unix socket."""
    what: str
    """Its use."""
    needs: Door
    is_loopback: bool
    """Only this node reaches it."""
    is_elsewhere: bool
    """It listens on another address than the run's."""

    @property
    def is_open(self) -> bool:
        """Whether another node reaches it without authentication."""
        return not self.is_loopback and not self.needs.is_locked


def find_listeners(config: Config) -> list[Listener]:
    """Listening sockets of this node's processes of a run, by role and address.

    Raises InputError when none of its processes run here, or when one cannot be read.
    """
    processes = find_processes(config.run.dir)
    if not processes:
        raise InputError(
            f"no process of the run in {config.run.dir} runs on this node: start the run, or give "
            "this command on a node that runs a part of it"
        )
    known, sockets = known_ports(config), _unix_sockets()
    found = set[Listener]()
    for process in processes:
        try:
            role = role_of(process, processes)
            for kind, address, port in _internet(process):
                found.add(_describe(config, known, role, process.pid, kind, address, port))
            for path in _unix(process, sockets):
                what = "requests of its own node"
                found.add(
                    Listener(role, process.pid, "unix", path, 0, what, _door_of(path), True, False)
                )
        except psutil.NoSuchProcess:
            continue
        except (psutil.AccessDenied, PermissionError) as error:
            raise InputError(
                f"cannot read the sockets of process {process.pid}: run this command as the user "
                "of the run, or as root"
            ) from error
    return sorted(found, key=lambda one: (one.role, one.kind, one.address, one.port, one.pid))


def find_processes(run_dir: Path) -> list[psutil.Process]:
    """This node's processes whose command line names the run folder, and all below them."""
    own = {psutil.Process().pid, *(process.pid for process in psutil.Process().parents())}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            if _names(process, run_dir.resolve()):
                for one in (process, *process.children(recursive=True)):
                    found.setdefault(one.pid, one)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            # Another user's, or gone.
            continue
    return [process for pid, process in sorted(found.items()) if pid not in own]


def _names(process: psutil.Process, run_dir: Path) -> bool:
    """Whether a word of its command line is the folder, or a file in it."""
    words = process.cmdline()
    if "-m" not in words and not any(Path(word).name == "megatron-rl" for word in words[:2]):
        return False
    paths = [word for word in words[1:] if run_dir.name in word and "=" not in word]
    paths += [
        word.partition("=")[2] for word in words if word.startswith(("--run-dir=", "run.dir="))
    ]
    return any(
        path == run_dir or run_dir in path.parents
        for path in (Path(process.cwd(), word).resolve() for word in paths)
    )


def role_of(process: psutil.Process, of_run: Sequence[psutil.Process]) -> str:
    """The role of a process, or the role of the process that started it."""
    pids, one = {each.pid for each in of_run}, process
    title = ""
    while True:
        words = one.cmdline()
        if words and words[0].startswith(_OF_ENGINE):
            title = title or f", {words[0].split()[0]}"
        if role := _own_role(one, words):
            return role + title
        parent = one.parent()
        if parent is None or parent.pid not in pids:
            return process.name()
        one = parent


def _own_role(one: psutil.Process, words: Sequence[str]) -> str:
    """`generator-0` of `python -m generation.worker --index 0`; "": none of ours."""
    # torchrun's command line has two modules: the first is what runs.
    module = next((b for a, b in zip(words, words[1:], strict=False) if a == "-m"), "")
    if module == "sglang.launch_server":
        return ""
    if module == _LAUNCHER or any(Path(word).name == "megatron-rl" for word in words[:2]):
        return "viewer" if "view" in words else "launcher"
    role = _ROLES.get(module, "")
    if role == "trainer rank":
        return f"{role} {one.environ().get('RANK', '')}".strip()
    if role and "--index" in words:
        return f"{role}-{words[words.index('--index') + 1]}"
    return role


def known_ports(config: Config) -> dict[int, tuple[str, Door]]:
    """Fixed ports of a run -> what listens there, and what it needs."""
    ports, generator = config.ports, config.generator
    ours = Door.LABEL if ports.keys_dir is None else Door.CURVE
    found = {
        ports.prompts: ("queue for generators", ours),
        ports.verify: ("queue for verifiers", ours),
        ports.batches: ("queue for trainer ranks", ours),
        ports.weights: ("weights for generators", ours),
        ports.nodes: ("launcher for other nodes", ours),
        ports.torchrun: ("torchrun's store", Door.OPEN),
        ports.sft: ("torchrun's store of the cold start", Door.OPEN),
        ports.scorer: ("scorer for trainer ranks", ours),
        config.metrics.prometheus_port: ("metrics for Prometheus", Door.OPEN),
    }
    engines = [ports.engine + 2 * index for index in range(generator.replicas)]
    for first in (*engines, *([ports.scorer + 1] if ports.scorer else [])):
        found[first] = ("SGLang's HTTP", Door.API_KEY)
        found[first + 1] = ("SGLang's store of its ranks", Door.OPEN)
    return {port: told for port, told in found.items() if port}


def _describe(
    config: Config,
    known: dict[int, tuple[str, Door]],
    role: str,
    pid: int,
    kind: str,
    address: str,
    port: int,
) -> Listener:
    what, needs = known.get(port) or _chosen_port(role)
    is_loopback = ip_address(address.partition("%")[0]).is_loopback
    return Listener(
        role, pid, kind, address, port, what, needs, is_loopback,
        is_elsewhere=not is_loopback and address != config.ports.host,
    )  # fmt: skip


def _chosen_port(role: str) -> tuple[str, Door]:
    """What listens at a port that the process chose itself, and what it needs."""
    if _OF_ENGINE in role or role.startswith("trainer rank"):
        return "gloo, NCCL or the store of an exchange", Door.OPEN
    if role.startswith("generator"):
        return "engine's parts on other nodes", Door.SESSION
    return ("pages of the viewer" if role == "viewer" else "unknown"), Door.OPEN


def _internet(process: psutil.Process) -> Iterator[tuple[str, str, int]]:
    """(kind, address, port) of listening TCP and receiving UDP sockets."""
    for kind in ("tcp", "udp"):
        for one in process.net_connections(kind):
            is_bound = kind == "udp" and one.laddr and not one.raddr
            if one.status == psutil.CONN_LISTEN or is_bound:
                yield kind, one.laddr.ip, one.laddr.port


def _unix_sockets() -> dict[str, str]:
    """Inode -> path of the listening Unix sockets of this node."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        # Address, references, protocol, flags, type, state, inode and perhaps a path.
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _ACCEPTS:
            found[fields[6]] = fields[7] if len(fields) > 7 else ""
    return found


def _unix(process: psutil.Process, sockets: dict[str, str]) -> Iterator[str]:
    """Paths of the listening Unix sockets that a process has open."""
    folder = Path(f"/proc/{process.pid}/fd")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        try:
            target = os.readlink(folder / name)
        except FileNotFoundError:
            continue
        inode = target.removeprefix("socket:[").removesuffix("]")
        if inode != target and inode in sockets:
            yield sockets[inode]


def _door_of(path: str) -> Door:
    """What another user of this node needs at a Unix socket; an abstract one is open to all."""
    if not path.startswith("/"):
        return Door.OPEN
    try:
        may_write = Path(path).stat().st_mode & stat.S_IWOTH
        may_enter = all(one.stat().st_mode & stat.S_IXOTH for one in Path(path).parents)
    except FileNotFoundError:
        return Door.FILE
    return Door.OPEN if may_write and may_enter else Door.FILE
