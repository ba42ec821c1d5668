"""RUN/alive.json: the heartbeat of the launcher that holds a run folder, seen from every node.

Used by the launcher and by `megatron-rl status`. Clocks of hosts differ: a launcher on another host
is alive if the file changes while a reader watches it; the file's age does not matter.

| thread    | does                                                        | ends            |
|-----------|-------------------------------------------------------------|-----------------|
| main      | opens and closes the heartbeat, names the phase             | with the block  |
| heartbeat | writes the file every BEAT_S; a slow disk delays it alone   | told by `close` |
"""

import contextlib
import functools
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import megatron_rl
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import LOST_FOLDER, WriteFailed
from megatron_rl.protocol.wire import DeadlineExceeded

ALIVE = "alive.json"
PREPARED = "prepared"
"""Phase of a prepared run on several nodes whose first node has not started."""
BEAT_S = 1.0
LOST_S = 20.0
"""A launcher without a heartbeat for this long counts as dead."""
_LOOK_S = 0.2
_JOIN_S = 5.0
# Fixed size, written in place: NFS shows a rename later than a changed file.
_BYTES = 1024
_AWAITED_CHARS = 300

log = logging.getLogger(__name__)


GONE_S = 60.0
"""A run folder that is gone or read-only for this long ends the run."""


class FolderTaken(DeadlineExceeded):
    """Another launcher has taken the run folder, because this one was silent too long."""


class Beat(msgspec.Struct, frozen=True):
    """The content of the file: one launcher."""

    host: str
    pid: int
    machine: str
    """Identifies a boot of a host and a PID namespace, in which pids are comparable."""
    born: int
    """Start of the process in clock ticks since boot."""
    started: float
    """Unix seconds when the launcher took the folder."""
    phase: str = ""
    """Present phase of the run."""
    nodes: int = 0
    """--nodes of `megatron-rl node`; 0: another command started the launcher."""
    code: str = ""
    """Digest of the program, which all launchers of the run have in common."""
    awaited: str = ""
    """What the run waits for, and for how long; its beginning."""
    lost: dict[int, int] = {}
    """Lost nodes of the trainer, and the number of each loss, which no later one has."""
    count: int = 0
    """Rises with each beat."""
    has_ended: bool = False

    def is_of(self, other: "Beat") -> bool:
        """Whether both beats come from the same launcher."""
        mine, theirs = (
            (beat.host, beat.pid, beat.machine, beat.born, beat.started) for beat in (self, other)
        )
        return mine == theirs

    def describe(self) -> str:
        """Process, host and start of the launcher."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"pid {self.pid} on {self.host}, since {at}"


def read_beat(run_dir: Path) -> Beat | None:
    """The latest beat of a folder; None if it is missing or unreadable."""
    try:
        return msgspec.json.decode((run_dir / ALIVE).read_bytes(), type=Beat)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise InputError(f"cannot read {run_dir / ALIVE}: {error.strerror}") from error


def find_living(
    run_dir: Path, *, watch_s: float = LOST_S, wait: Callable[[float], None] = time.sleep
) -> Beat | None:
    """The beat of the live launcher of a folder; None without one. Raises InputError.

    watch_s: how long to watch a launcher on another host before it counts as dead.
    """
    first = read_beat(run_dir)
    if first is None or first.has_ended:
        return None
    if first.machine and first.machine == _machine():
        return first if _born(first.pid) == first.born else None
    for _ in range(round(watch_s / _LOOK_S)):
        wait(_LOOK_S)
        now = read_beat(run_dir)
        if now is not None and now != first:
            return None if now.has_ended else now
    return None


class Heartbeat(Closing):
    """The heartbeat of this launcher, from now until it is closed."""

    def __init__(self, run_dir: Path, phase: str = "", nodes: int = 0) -> None:
        """Raises InputError where the file cannot be written."""
        self._path = run_dir / ALIVE
        self._beat = Beat(
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            born=_born(os.getpid()) or 0,
            started=time.time(),
            phase=phase,
            nodes=nodes,
            code=code_digest(),
        )
        self.started = self._beat.started
        self.phase, self.awaited = phase, ""
        self.lost: dict[int, int] = {}
        self._taken_by: Beat | None = None
        self._fault: OSError | None = None
        """Why the run folder is gone or read-only."""
        self._fault_since = 0.0
        """time.monotonic() of the first such error in a row."""
        try:
            self._write()
        except OSError as error:
            raise InputError(f"cannot write {self._path}: {error.strerror}") from error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise FolderTaken when another launcher has the folder, WriteFailed after GONE_S."""
        fault = self._fault
        if fault is not None and time.monotonic() - self._fault_since > GONE_S:
            raise WriteFailed(self._path, fault, waited_s=GONE_S) from fault
        if self._taken_by is not None:
            raise FolderTaken(
                f"{self._path.parent} was taken by another launcher "
                f"({self._taken_by.describe()}): this one was silent for more than {LOST_S:.0f} s, "
                "or both started at once. Start one run a folder"
            )

    def _renew(self) -> None:
        has_failed = False
        while not self._closed.wait(BEAT_S):
            try:
                there = read_beat(self._path.parent)
                if there is not None and not there.is_of(self._beat):
                    self._taken_by = there
                if self._taken_by is None:
                    self._advance()
                has_failed, self._fault = False, None
            except (OSError, InputError) as error:
                self._note_fault(error)
                if not has_failed:
                    log.warning("cannot write the heartbeat %s: %s", self._path, error)
                has_failed = True

    def _note_fault(self, error: Exception) -> None:
        """Files that are open hide that their folder is gone."""
        if not isinstance(error, OSError) or error.errno not in LOST_FOLDER:
            return
        if self._fault is None:
            self._fault_since = time.monotonic()
        self._fault = error

    def _advance(self, *, has_ended: bool = False) -> None:
        self._beat = msgspec.structs.replace(
            self._beat, phase=self.phase, awaited=self.awaited[:_AWAITED_CHARS],
            lost=self.lost, count=self._beat.count + 1, has_ended=has_ended,
        )  # fmt: skip
        self._write()

    def _write(self) -> None:
        data = msgspec.json.encode(self._beat).ljust(_BYTES)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Write that this launcher has ended."""
        self._closed.set()
        self._thread.join(_JOIN_S)
        if self._taken_by is None and not self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._advance(has_ended=True)


@functools.cache
def code_digest() -> str:
    """Digest of the modules of this program."""
    root, digest = Path(megatron_rl.__file__).resolve().parent.parent, hashlib.sha256()
    for package in ("generation", "megatron_rl", "verification"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _machine() -> str:
    """Identifies this boot and PID namespace; "" if the system tells none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_stopped(beat: Beat) -> bool:
    """Whether SIGSTOP has stopped the launcher; False if it is on another host."""
    found = _state(beat.pid) if beat.machine and beat.machine == _machine() else None
    return found == ("T", beat.born)


def _born(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it does not run."""
    found = _state(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def _state(pid: int) -> tuple[str, int] | None:
    """State of a process and its start in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5): fields 3 (state) to 22 follow the name in brackets, which may contain anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])
