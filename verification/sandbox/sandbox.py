"""A sandbox: runs untrusted programs one after another under limits, and reports how each ended.

Used by a grading process; one sandbox serves one solution. Programs run as children of `server.py`,
which this module starts in the isolation of `isolation.py`. Input and output are anonymous files:
a test reads its input, writes its output, and no other process has either. The server reports how
a child ended; the tested code shares nothing with the server.

The kernel kills the sandbox when this process dies. The next sandbox removes folders and control
groups that a killed process left.
"""

import base64
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from megatron_rl.protocol.closing import Closing
from verification.run_time import descendants, oom_kills
from verification.sandbox import confinement, isolation, seccomp
from verification.sandbox.cgroup import ControlGroup
from verification.sandbox.time_limits import HOST, Limits, await_reply, is_readable
from verification.verdict import GradingError, HostBusy

START_TIMEOUT_S = 30.0
REPLY_GRACE_S = 60.0
"""Time for the server to reply after the order to end a program."""
END_TIMEOUT_S = 5.0
ERROR_BYTES = 4000
STOP = b"stop"
SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE})
"""The kernel's errors when the host has no room for one more process or file."""
LOOSE_PROCESSES = 512
"""Room for new processes where the kernel counts all processes of the user."""


class Ending(msgspec.Struct, frozen=True):
    """How a process ended."""

    exit_code: int
    """Negative: the signal that killed it."""
    cpu_s: float
    peak_bytes: int
    """Peak resident memory."""


class ProgramResult(msgspec.Struct, frozen=True):
    """Result of a program."""

    endings: list[Ending]
    """One process; for unit tests the tests' process, then the solution's."""
    wall_s: float
    is_late: bool
    """The server killed the program at its time limit."""
    output: bytes = b""
    errors: str = ""
    """Start of standard error."""


class SandboxSpec(msgspec.Struct, frozen=True):
    """Settings of a sandbox."""

    kind: str
    """One of `isolation.KINDS`."""
    executable: str = ""
    """The bwrap to use."""
    build_bytes: int = 256 << 20
    """Size of the folder that compilers write to."""
    readable: tuple[str, ...] = ()
    """Further folders of the host that programs may read."""
    packages: tuple[str, ...] = ()
    """Folders of Python packages that programs may import."""
    warm_modules: tuple[str, ...] = ()
    """Modules that the server loads once for all tests."""


class Sandbox(Closing):
    """A running sandbox; leaving the context ends it and all its processes."""

    def __init__(self, spec: SandboxSpec, group: ControlGroup | None = None) -> None:
        """Start a sandbox without waiting for it. Raises GradingError."""
        _check_kernel(spec.kind)
        self._spec = spec
        self._folder = None if spec.kind == "bubblewrap" else isolation.make_folder()
        self._words = _make_file()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_ready = False
        self._own_processes: list[int] = []
        """The server, and the processes between it and this one."""
        self._oom_kills = oom_kills()
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(self._close_files)
            roots = isolation.roots(
                for_anyone=isolation.is_root() and spec.kind != "bubblewrap",
                more=spec.readable + spec.packages,
            )
            self._process = self._start(roots, theirs, group)
            stack.pop_all()
        try:
            self._connection.sendall(json.dumps(self._settings(roots)).encode())
        except OSError as error:
            self._wait_for_end()
            said = self._last_words()
            self.close()
            raise GradingError(f"a sandbox ended at once: {error}: {said}") from error

    @property
    def build_folder(self) -> str:
        """Where compilers write, as seen inside."""
        return f"{self._folder or '/sandbox'}/build"

    def close(self) -> None:
        """End the sandbox and all its processes; GradingError if they do not end."""
        self._connection.close()
        try:
            self._wait_for_end()
            self._process.wait(0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise GradingError("a sandbox does not end after SIGKILL") from error
        finally:
            self._close_files()

    def _wait_for_end(self) -> None:
        """Wait at most END_TIMEOUT_S; Popen.wait would sleep too long."""
        pidfd = os.pidfd_open(self._process.pid)
        is_readable(pidfd, END_TIMEOUT_S)
        os.close(pidfd)

    def compile(
        self, command: list[str], source: bytes, *, source_name: str, limits: Limits
    ) -> ProgramResult:
        """Run a compiler on a source file in the build folder; its messages are the output."""
        output = _make_file()
        with _closing(_make_file(source), _make_file(b""), output) as files:
            request = {"action": "compile", "command": command, "source_name": source_name}
            return self._run(request, files, limits, output=output, errors=output)

    def run(
        self, command: list[str] | None, source: bytes, *, stdin: bytes, limits: Limits
    ) -> ProgramResult:
        """Run a program on an input: a command, or without one the Python source."""
        output, errors = _make_file(), _make_file()
        with _closing(_make_file(stdin), output, errors, _make_file(source)) as files:
            request = {"action": "program", "command": command}
            return self._run(request, files, limits, output=output, errors=errors)

    def check(self, solution: bytes, tests: bytes, *, limits: Limits) -> ProgramResult:
        """Run a solution's job and its unit tests' job; the output is the tests' report."""
        own, errors, report = _make_file(), _make_file(), _make_file()
        # Each process has a separate standard input: both might write to a common one.
        inputs = (_make_file(b""), _make_file(b""))
        jobs = (_make_file(solution), _make_file(tests))
        with _closing(*inputs, own, errors, *jobs, report) as files:
            return self._run({"action": "check"}, files, limits, output=report, errors=errors)

    def _run(
        self, request: dict[str, Any], files: list[int], limits: Limits, *, output: int, errors: int
    ) -> ProgramResult:
        self._wait_until_ready()
        message = json.dumps(request | msgspec.to_builtins(limits)).encode()
        try:
            socket.send_fds(self._connection, [message], files)
        except OSError as error:
            raise GradingError(f"a sandbox is gone: {error}: {self._last_words()}") from error
        end = await_reply(
            self._connection, limits, root=self._process.pid, ignored=self._own_processes
        )
        if end:
            with contextlib.suppress(OSError):
                self._connection.send(STOP)
        reply = self._receive(REPLY_GRACE_S)
        check_start(reply)
        result = msgspec.convert(reply, ProgramResult)
        self._check_host(result, end)
        return msgspec.structs.replace(
            result,
            output=os.pread(output, limits.file_bytes, 0),
            errors=os.pread(errors, ERROR_BYTES, 0).decode(errors="replace"),
        )

    def _check_host(self, result: ProgramResult, end: str) -> None:
        """Raise HostBusy if the host killed the program or gave it no CPU time."""
        if result.is_late and end in ("", HOST):
            cpu_s = result.endings[0].cpu_s
            raise HostBusy(f"a program got {cpu_s:.1f} s of a core in {result.wall_s:.0f} s")
        has_failed = any(ending.exit_code for ending in result.endings)
        if has_failed and not result.is_late and oom_kills() > self._oom_kills:
            raise HostBusy("the host ran out of memory while a program ran")

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            self._receive(START_TIMEOUT_S)
            self._is_ready = True
            self._own_processes = descendants(self._process.pid)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._connection.settimeout(timeout_s)
        try:
            data = self._connection.recv(1 << 16)
        except TimeoutError as error:
            raise HostBusy(f"a sandbox was silent for {timeout_s:.0f} s") from error
        except ConnectionError:
            data = b""
        if not data:
            raise GradingError(f"a sandbox ended by itself: {self._last_words()}")
        return json.loads(data)

    def _last_words(self) -> str:
        return (
            os.pread(self._words, ERROR_BYTES, 0).decode(errors="replace").strip() or "no message"
        )

    def _start(
        self, roots: isolation.Roots, theirs: socket.socket, group: ControlGroup | None
    ) -> subprocess.Popen[bytes]:
        code = _make_file(isolation.server_code(roots.interpreter.prefix == sys.base_prefix))
        inner = [
            roots.interpreter.executable, "-I", "-S", "-X", "utf8", "-c", isolation.LOADER,
            str(code), str(theirs.fileno()),
        ]  # fmt: skip
        descriptors = [code, theirs.fileno()]
        try:
            if self._spec.kind == "bubblewrap":
                return self._start_bubblewrap(roots, inner, descriptors, group)
            process = self._spawn(inner, descriptors, uid=isolation.uid_of_server())
            if group is not None:
                group.add(process.pid)
            return process
        finally:
            os.close(code)

    def _start_bubblewrap(
        self,
        roots: isolation.Roots,
        inner: list[str],
        descriptors: list[int],
        group: ControlGroup | None,
    ) -> subprocess.Popen[bytes]:
        """Start bwrap, which waits until its first process is in the control group."""
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        with open(info_read, "rb"), open(block_write, "wb") as block:
            command = isolation.bubblewrap_command(
                self._spec.executable, roots, block_fd=block_read, info_fd=info_write
            )
            passed = [*descriptors, info_write, block_read]
            try:
                process = self._spawn(command + inner, passed, uid=None)
            finally:
                os.close(info_write)
                os.close(block_read)
            try:
                pid = _read_info(info_read)
                if group is not None:
                    group.add(pid)
                if isolation.is_root():
                    isolation.write_user_maps(pid)
            except (ValueError, OSError) as error:
                process.kill()
                process.wait()
                words = self._last_words()
                is_short = any(os.strerror(number) in words for number in SHORTAGES)
                kind = HostBusy if is_short else GradingError
                # It ended before it wrote its information: its own words say why.
                told = words if isinstance(error, ValueError) else f"{error}: {words}"
                raise kind(f"bwrap failed: {told}") from error
            block.write(b"x")
        return process

    def _spawn(
        self, command: list[str], descriptors: list[int], *, uid: int | None
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                pass_fds=descriptors,
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": "/nowhere"},
                cwd="/",
                user=uid,
                group=uid,
                extra_groups=None if uid is None else [],
            )
        except OSError as error:
            kind = HostBusy if error.errno in SHORTAGES else GradingError
            raise kind(f"a sandbox cannot be started with {command[0]}: {error}") from error

    def _settings(self, roots: isolation.Roots) -> dict[str, Any]:
        kind = self._spec.kind
        is_inside = kind == "bubblewrap"
        filters = {"test": b"", "compile": b""}
        if kind != "rlimits":
            # Landlock does not keep modes of the user's other files from being changed.
            compiling = seccomp.compile_filter(may_change_modes=is_inside)
            filters = {"test": seccomp.test_filter(), "compile": compiling}
        folder = self._folder or "/sandbox"
        return {
            "filters": {name: base64.b64encode(code).decode() for name, code in filters.items()},
            "landlock": kind == "landlock",
            "readable": isolation.readable_paths(roots) if kind == "landlock" else [],
            "may_mount": is_inside,
            # Elsewhere the kernel counts all that the user runs on the host: a loose cap.
            "other_processes": 0 if is_inside else isolation.count_tasks() + LOOSE_PROCESSES,
            "uid": isolation.NOBODY if is_inside and isolation.is_root() else None,
            "build": f"{folder}/build",
            "temporary": f"{folder}/{'empty' if kind == 'landlock' else 'tmp'}",
            "build_bytes": self._spec.build_bytes,
            "packages": list(self._spec.packages),
            "warm_modules": list(self._spec.warm_modules),
        }

    def _close_files(self) -> None:
        self._connection.close()
        with contextlib.suppress(OSError):
            os.close(self._words)
        self._words = -1
        if self._folder is not None:
            isolation.remove_folder(self._folder)


def _check_kernel(kind: str) -> None:
    """Raise GradingError if the kernel's Landlock is too old to protect files."""
    version = confinement.landlock_version()
    if kind == "landlock" and 0 < version < confinement.LEAST_LANDLOCK:
        raise GradingError(
            f"this kernel's Landlock {version} does not keep programs from truncating files: "
            f"version {confinement.LEAST_LANDLOCK} or later is needed (Linux 6.2)"
        )


def check_start(reply: dict[str, Any]) -> None:
    """Raise HostBusy or GradingError for a program that could not be started."""
    if "error" in reply:
        is_short = reply["errno"] in SHORTAGES
        kind = HostBusy if is_short else GradingError
        raise kind(f"a program could not be started in its sandbox: {reply['error']}")


def _read_info(descriptor: int) -> int:
    """Process id of a sandbox's first process, as bwrap tells it; ValueError if it does not."""
    text = b""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        if is_readable(descriptor, left_s):
            received = os.read(descriptor, 4096)
            text += received
            if not received:
                break
    return json.loads(text)["child-pid"]


def _make_file(content: bytes | None = None) -> int:
    """Descriptor of a new file; a file created with content (even empty) is sealed."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size = len(content or b"")
    if limit != resource.RLIM_INFINITY and size > limit:
        raise GradingError(f"a test of {size} bytes exceeds this process's RLIMIT_FSIZE of {limit}")
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if content is not None:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextlib.contextmanager
def _closing(*descriptors: int) -> Iterator[list[int]]:
    """Close descriptors at the end."""
    try:
        yield list(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
