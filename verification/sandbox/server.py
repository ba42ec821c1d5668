"""The server inside a sandbox: forks a confined child for each program that `sandbox.py` sends.

Runs as the first program of a sandbox and runs no untrusted code itself. Forking a warm interpreter
saves its start for each test. Requests are JSON on a SEQPACKET socket, with the descriptors of the
child's files. The server reads only a compiler's source: a child starts as a copy of the server's
memory, which must hold nothing of another test. The child inherits no descriptor of the server.

| waits for | woken by | does |
|---|---|---|
| a request | the socket | forks children |
| the children | their pidfds | replies with how they ended |
| the order to stop them | the socket | kills them |
| their last deadline | the poll's timeout | kills them |
| the end of the grading process | the socket | kills them, exits |
"""

import _sitebuiltins
import atexit
import base64
import builtins
import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from verification.sandbox import call_proxy, confinement, solution_process, tests_process
from verification.sandbox.standard_streams import named_streams

REQUEST_BYTES = 1 << 16
STOP = b"stop"
"""The grading process measures the children's time and sends this order at the limit."""
STOP_GRACE_S = 30.0
"""How late a grading process that waits for a core may send STOP."""
KILL_TIMEOUT_S = 10.0
EXIT_OUT_OF_MEMORY = 95
EXIT_SYNTAX = 96
FREE_DESCRIPTOR = 32
"""Above the server's own descriptors, below the lowest limit on open files."""
BUILD_INODES = 256
TEMPORARY_INODES = 1024

Program = Callable[[int], None]
"""A child's work; the argument is the descriptor to close when set-up has succeeded."""


class Child:
    """A forked child and how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.ending: dict[str, Any] | None = None

    def kill(self) -> None:
        """Kill it and its process group."""
        # The leader of a session cannot leave its group, and its filter has no call to move others.
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Record how the ended child ended."""
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        self.ending = {
            "exit_code": code,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss << 10,
        }


class Server:
    """Answers the requests of one grading process until it hangs up."""

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        self._connection = connection
        self._settings = settings
        self._filters = {name: base64.b64decode(text) for name, text in settings["filters"].items()}
        self._rulesets: dict[str, int | None] = {"test": None, "compile": None}
        self._build = settings["build"]
        self._temporary = settings["temporary"]
        if settings["landlock"]:
            readable = settings["readable"]
            test = confinement.landlock_rules([*readable, self._build], ["/dev/null"])
            compiling = confinement.landlock_rules(readable, [self._build, "/dev/null"])
            self._rulesets = {"test": test, "compile": compiling}

    def serve(self) -> None:
        """Serve until the grading process hangs up."""
        actions = {"compile": self._compile, "program": self._program, "check": self._check}
        self._reply({"ready": True})
        while True:
            data, files, _, _ = socket.recv_fds(self._connection, REQUEST_BYTES, 8)
            if not data:
                return
            if data == STOP:
                continue  # It crossed with the news that the children had ended.
            request = json.loads(data)
            try:
                reply = actions[request["action"]](request, files)
            except OSError as error:
                reply = {"error": f"{type(error).__name__}: {error}", "errno": error.errno}
            for descriptor in files:
                os.close(descriptor)
            self._reply(reply)

    def _reply(self, reply: dict[str, Any]) -> None:
        self._connection.send(json.dumps(reply).encode())

    def _mount(self, path: str, size: int, inodes: int) -> None:
        # Open to all: the server and its children may be different users; no one else is inside.
        confinement.mount_tmpfs(path, f"size={size},nr_inodes={inodes},mode=777")

    def _compile(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Run a compiler in the build folder, once; tests cannot write there afterwards."""
        source, stdin, output = files
        # Until the first compiler runs, the folder is part of the read-only root.
        if self._settings["may_mount"]:
            self._mount(self._build, self._settings["build_bytes"], BUILD_INODES)
        path = os.path.join(self._build, request["source_name"])
        with open(path, "wb") as file:
            file.write(call_proxy.read_descriptor(source))
        os.chmod(path, 0o644)
        program = _execution(request["command"], self._build)
        files = [stdin, output, output]
        child = self._start(program, files, request, folder=self._build)
        reply = self._await([child], request["max_elapsed_s"])
        # Tests may read the build folder but must not see the source. A compiler that its source
        # took over can prevent this, but could copy the source anyway.
        with contextlib.suppress(OSError):
            os.unlink(path)
        if self._settings["may_mount"]:
            confinement.remount_read_only(self._build)
        elif self._settings["landlock"]:
            self._make_executable()
        return reply

    def _make_executable(self) -> None:
        """Set the mode of the compiler's output, which the compiler itself may not set."""
        for entry in os.scandir(self._build):
            # A hard link may name a file elsewhere.
            if entry.is_file(follow_symlinks=False) and entry.stat().st_nlink == 1:
                os.chmod(entry.path, 0o755)

    def _program(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Run a program on its input: a command, or Python source in the child itself."""
        # Without mounts the host's /proc has the names of the streams.
        may_mount = self._settings["may_mount"]
        names = (
            named_streams(files[:3], request["file_bytes"])
            if may_mount
            else contextlib.nullcontext()
        )
        with self._temporary_folder(request["disk_bytes"]) as folder, names:
            if request["command"]:
                program = _execution(request["command"], folder)
                # Only the compiler needs the source.
                files = files[:3]
            else:
                program = _interpretation(call_proxy.run_program)
            child = self._start(program, files, request, folder=folder)
            return self._await([child], request["max_elapsed_s"])

    def _check(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Run unit tests and the solution in two children that share one socket pair."""
        stdin, tests_stdin, solution_output, tests_output, solution, tests, report = files
        run_tests = _interpretation(tests_process.run_tests, 4, 5)
        serve_calls = _interpretation(solution_process.serve_calls, 4)
        ours, theirs = socket.socketpair()
        children: list[Child] = []
        with self._temporary_folder(request["disk_bytes"]) as folder:
            with ours, theirs:
                files = [tests_stdin, tests_output, tests_output, tests, ours.fileno(), report]
                children.append(self._start(run_tests, files, request, folder=folder))
                files = [stdin, solution_output, solution_output, solution, theirs.fileno()]
                try:
                    children.append(self._start(serve_calls, files, request, folder=folder))
                except OSError:
                    _end(children)
                    raise
            # Both ends are closed here, so that each child notices when the other ends.
            return self._await(children, request["max_elapsed_s"])

    @contextlib.contextmanager
    def _temporary_folder(self, size: int) -> Iterator[str]:
        """A folder that is empty at the start of a test and gone after it."""
        path = self._temporary
        if self._settings["may_mount"]:
            self._mount(path, size, TEMPORARY_INODES)
            yield path
            confinement.unmount(path)
        elif self._settings["landlock"]:
            # The host's disk has no cap here: the ruleset keeps the folder read-only and empty.
            yield path
        else:
            os.mkdir(path, 0o700)
            yield path
            shutil.rmtree(path)

    def _start(
        self, program: Program, files: list[int], request: dict[str, Any], *, folder: str
    ) -> Child:
        """Fork a child and return it once it is confined. Raises OSError."""
        # The child writes set-up errors to the pipe and closes it before the untrusted code starts:
        # an empty pipe means that the child is confined.
        setup_read, setup_write = os.pipe()
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ruleset = self._rulesets[_profile(request)]
                setup_write, ruleset = _arrange(files, setup_write, ruleset)
                os.chdir(folder)
                self._confine(request, ruleset, server_pid)
                program(setup_write)
            # Other exceptions are the untrusted program's; `program` handled them.
            except OSError as error:
                os.write(setup_write, f"{error.errno or 0} {error}".encode())
            finally:
                os._exit(1)
        os.close(setup_write)
        child = Child(pid)
        with open(setup_read, "rb") as setup:
            error = setup.read()
        if error:
            _end([child])
            number, _, text = error.decode().partition(" ")
            raise OSError(int(number), text)
        return child

    def _confine(self, request: dict[str, Any], ruleset: int | None, server_pid: int) -> None:
        processes = request["processes"] + self._settings["other_processes"]
        confinement.confine(
            request | {"processes": processes},
            syscalls=self._filters[_profile(request)],
            uid=self._settings["uid"],
            landlock=ruleset,
            parent_pid=server_pid,
        )
        if ruleset is not None:
            os.close(ruleset)

    def _await(self, children: list[Child], max_elapsed_s: float) -> dict[str, Any]:
        """Wait for the first child's end or the order to stop; return how each child ended."""
        start_s = time.monotonic()
        poll = select.poll()
        # While children run, only STOP or the end of the grading process arrives here.
        poll.register(self._connection, select.POLLIN | select.POLLRDHUP)
        # The tests' process notices the solution's end by their connection.
        poll.register(children[0].pidfd, select.POLLIN)
        events = dict(poll.poll((max_elapsed_s + STOP_GRACE_S) * 1000))
        elapsed_s = time.monotonic() - start_s
        is_late = children[0].pidfd not in events
        _end(children)
        if self._connection.fileno() in events and not self._connection.recv(len(STOP)):
            # Nobody is left to reply to.
            os._exit(0)
        endings = [child.ending for child in children]
        return {"endings": endings, "wall_s": elapsed_s, "is_late": is_late}


def _profile(request: dict[str, Any]) -> str:
    return "compile" if request["action"] == "compile" else "test"


def _end(children: list[Child]) -> None:
    """Kill children and all that they started; wait until all are reaped."""
    for child in children:
        child.kill()
    for child in children:
        child.reap()
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while True:
        # The server reaps its descendants, a compiler's orphans too. They must be gone before the
        # next program, which would share its limits with them.
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a process lives on {KILL_TIMEOUT_S:.0f} s after SIGKILL")
            time.sleep(0.001)


def _arrange(files: list[int], setup_write: int, ruleset: int | None) -> tuple[int, int | None]:
    """Make the files descriptors 0, 1, ...; close all others except the two returned."""
    extra = [setup_write] if ruleset is None else [setup_write, ruleset]
    # Move all out of the way first: a source may have the number of another's target.
    lifted = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FREE_DESCRIPTOR) for fd in [*files, *extra]]
    for target, source in enumerate(lifted):
        os.dup2(source, target, inheritable=target < len(files))
    os.closerange(len(lifted), 1 << 16)
    return len(files), None if ruleset is None else len(files) + 1


def _execution(command: list[str], folder: str) -> Program:
    """A program that executes a command."""

    def execute(setup_write: int) -> None:
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        # The interpreter ignores these signals, and a new program would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execve(command[0], command, environment)
        except OSError as error:
            # A program with gigabytes of static data does not fit its memory limit.
            if error.errno in (errno.ENOMEM, errno.ENOEXEC):
                os._exit(EXIT_OUT_OF_MEMORY)
            raise

    return execute


def _interpretation(action: Callable[..., None], *arguments: int | str) -> Program:
    """A program that the child's own interpreter runs; it ends the child like a script."""

    def interpret(setup_write: int) -> None:
        # After the fork: see the module's docstring.
        source = call_proxy.read_descriptor(3)
        os.close(3)
        os.close(setup_write)
        try:
            action(source, *arguments)
        finally:
            _exit_interpreter(sys.exc_info()[1])

    return interpret


def _exit_interpreter(error: BaseException | None) -> None:
    """End the interpreter without freeing memory.

    Threads, atexit functions and buffers end in Python's order: a solution may print in each.
    """
    code = 1
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif isinstance(error, MemoryError):
            code = EXIT_OUT_OF_MEMORY
        elif isinstance(error, SyntaxError):
            code = EXIT_SYNTAX
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            code = 0
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 1
        raise
    finally:
        os._exit(code & 0xFF)


def main(descriptor: int) -> None:
    """Run the server; the first message on the socket holds its settings."""
    with socket.socket(fileno=descriptor) as connection:
        confinement.become_reaper()
        settings = json.loads(connection.recv(1 << 20))
        for name in settings["warm_modules"]:
            importlib.import_module(name)
        # Programs print and read integers of any size; the limit of CPU time bounds them.
        sys.set_int_max_str_digits(0)
        os.environ.update(HOME=settings["temporary"], TMPDIR=settings["temporary"])
        # The interpreter runs without `site`, which shows installed packages and defines these.
        for name in ("exit", "quit"):
            setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))
        if settings["packages"]:
            call_proxy.show_packages(settings["packages"])
        server = Server(connection, settings)
        # Pages of long-lived objects stay shared with the children.
        gc.freeze()
        server.serve()
