"""Starts the processes of a run and ends them all together.

Used by `launch.py`, in one thread. Every child leads its own process group, so that Ctrl-C at the
terminal reaches only the launcher, and gets SIGTERM from Linux when the launcher dies by any
cause. The launcher is a child subreaper while a Supervisor is open: a grandchild whose parent
died becomes a child of the launcher instead of escaping, so `stop` finds every descendant.
"""

import ctypes
import logging
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

import megatron_rl
from megatron_rl.protocol.process import EXIT_BAD_INPUT, EXIT_FAILED

TERM_GRACE_S = 6.0
KILL_GRACE_S = 3.0
POLL_S = 0.2
TAIL_LINES = 15
_PR_SET_CHILD_SUBREAPER = 36
# torchrun prints the exit code of a failed rank, then a traceback of its own.
_TORCHRUN_VERDICT = re.compile(r"failed \(exitcode: (-?\d+)\)")

log = logging.getLogger(__name__)


@dataclass
class Role:
    """One started child."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    started: float
    """time.monotonic() of the start."""
    outlives: str | None = None
    """Name of the role that tells this one to end; it must not end long before that one does."""
    ended: float | None = None
    """time.monotonic() when its end was noticed."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self.process.returncode


class RoleDied(RuntimeError):
    """A role ended that should not have; the text shows how, and the end of its log."""

    def __init__(self, name: str, exit_code: int, log_path: Path, lines: list[str]) -> None:
        how = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
        shown = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        super().__init__(f"{name} ended with {how}. The end of {log_path}:\n{shown}")
        self.name = name
        self.exit_code = exit_code

    @property
    def launcher_exit_code(self) -> int:
        """2 when the role refused its input, else 1."""
        return EXIT_BAD_INPUT if self.exit_code == EXIT_BAD_INPUT else EXIT_FAILED


@dataclass
class Supervisor:
    """Owner of all children; a context manager that leaves none behind."""

    log_dir: Path
    extra_environment: dict[str, str] = field(default_factory=dict)
    early_end_grace_s: float = 30.0
    """A role may end this long before the one that it must outlive."""
    roles: dict[str, Role] = field(default_factory=dict)
    _not_ours: set[psutil.Process] = field(default_factory=set)

    def __enter__(self) -> Self:
        _set_subreaper(True)
        self._not_ours = set(psutil.Process().children(recursive=True))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            _set_subreaper(False)

    def start(self, name: str, command: list[str], *, outlives: str | None = None) -> Role:
        """Start a child; its stdout and stderr go to `log_dir/<name>.out`."""
        log_path = self.log_dir / f"{name}.out"
        with log_path.open("ab") as out:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | child_environment() | self.extra_environment,
                process_group=0,
            )
        role = Role(name, process, log_path, time.monotonic(), outlives)
        self.roles[name] = role
        log.info("started %s, pid %d: %s", name, process.pid, " ".join(command))
        return role

    def check(self) -> None:
        """Note which roles ended. Raises RoleDied for one that should not have."""
        now = time.monotonic()
        for role in self.roles.values():
            if role.ended is None and role.process.poll() is not None:
                role.ended = now
                log.info("%s ended with exit code %d", role.name, role.exit_code)
        for role in self.roles.values():
            if role.exit_code not in (None, 0) or self._ended_early(role, now):
                raise _explain_death(role)

    def _ended_early(self, role: Role, now: float) -> bool:
        if role.ended is None or role.outlives is None:
            return False
        return self.roles[role.outlives].ended is None and now - role.ended > self.early_end_grace_s

    def is_running(self, name: str) -> bool:
        """Whether the role was started and has not been seen to end."""
        return name in self.roles and self.roles[name].ended is None

    def stop(self) -> None:
        """End every descendant within 10 s: SIGTERM to the roles, SIGKILL to what is left.

        A second Ctrl-C or SIGTERM meanwhile is ignored: it could only leave processes behind. The
        Supervisor can start others afterwards.
        """
        handlers = {number: _ignore(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for role in self.roles.values():
                if role.process.poll() is None:
                    role.process.terminate()
            if not self._wait_for_none(TERM_GRACE_S):
                self._kill_descendants()
            self.roles.clear()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _kill_descendants(self) -> None:
        deadline = time.monotonic() + KILL_GRACE_S
        # Again after each round: a process may have forked between the look and the kill.
        while (alive := self.descendants()) and time.monotonic() < deadline:
            for process in alive:
                log.info("killing %s, pid %d: deaf to SIGTERM", _name(process), process.pid)
                _kill(process)
            self._wait_for_none(POLL_S)
        if alive:
            log.error("could not end pids %s", [process.pid for process in alive])

    def _wait_for_none(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.descendants():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def descendants(self) -> list[psutil.Process]:
        """Live processes below this one that did not exist before the Supervisor was opened."""
        for role in self.roles.values():
            role.process.poll()
        own_pids = {role.process.pid for role in self.roles.values()}
        alive = []
        for process in psutil.Process().children(recursive=True):
            if process in self._not_ours:
                continue
            if not _is_zombie(process):
                alive.append(process)
            elif process.pid not in own_pids:
                _reap(process.pid)
        return alive


def child_environment() -> dict[str, str]:
    """What every child needs to find: our packages, one thread, no hub, no compiled graphs."""
    root = str(Path(megatron_rl.__file__).resolve().parent.parent)
    return {
        # More threads than cores slow SGLang's CPU server by a factor of ten.
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Asks `process.run_main` to end the process with the one that started it.
        "MEGATRON_RL_LAUNCHED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a role's output, without the traceback that torchrun adds to its rank's."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace").splitlines()
    verdicts = [i for i, line in enumerate(text) if _TORCHRUN_VERDICT.search(line)]
    if verdicts:
        text = text[: verdicts[-1]]
    return [line for line in text if line.strip()][-lines:]


def _explain_death(role: Role) -> RoleDied:
    code = role.exit_code or 0
    text = role.log_path.read_text(errors="replace")
    verdicts = _TORCHRUN_VERDICT.findall(text)
    if verdicts and code == 1:
        code = int(verdicts[-1])
    return RoleDied(role.name, code, role.log_path, tail(role.log_path))


def _set_subreaper(is_on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def _ignore(number: int) -> "signal._HANDLER":
    return signal.signal(number, signal.SIG_IGN)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "a process"


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def _reap(pid: int) -> None:
    """Take the exit status of an orphan that the subreaper inherited."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
