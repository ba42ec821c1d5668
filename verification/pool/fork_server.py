"""The fork server: `python -m verification.pool.fork_server FD PARENT_PID RULES WORKER_POOLS`.

`ForkClient` starts one per verifier. It loads the judges' libraries once and forks grading
processes, so that a killed process is replaced in milliseconds. It is a separate process because a
fork copies only one thread, and the verifier has zmq's threads. It grades nothing. One thread:

| waits for | woken by | does |
|---|---|---|
| Fork | the socket | loads the step's libraries, forks, answers Born |
| a death | SIGCHLD's wake-up descriptor | kills the child's processes, reaps it, sends Died |
| the verifier's end | the socket closes, or SIGKILL from the kernel | kills all children, exits |
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from megatron_rl.config.reward import CODE, CUSTOM, VerifierConfig
from verification.pool.frames import MAX_DATAGRAM_BYTES, Born, Died, Fork, encoder, fork_decoder
from verification.pool.grader import Grader, limit_resources
from verification.rules import RewardRules
from verification.sandbox.cgroup import remove_stale_groups
from verification.sandbox.confinement import die_with
from verification.score import prepare
from verification.verdict import GradingError

FORK_PATIENCE_S = 60.0
"""Time to wait for a host without room for a new process."""
CLEAN_UP_S = 2.0
"""Time for sandboxes to die; later servers remove the remaining control groups."""


class ForkServer:
    """Forks and reaps grading processes."""

    def __init__(
        self, connection: socket.socket, wake_up: int, *, rules: RewardRules, cfg: VerifierConfig
    ) -> None:
        self._connection = connection
        self._wake_up = wake_up
        self._rules = rules
        self._cfg = cfg
        self._numbers: dict[int, int] = {}
        """Numbers of live children by pid."""
        self._prepared: set[tuple[str, str]] = set()
        self._has_sandboxes = False

    def run(self) -> None:
        """Serve until the verifier closes the socket."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(self._wake_up, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self._wake_up:
                    os.read(self._wake_up, 4096)
                    self._reap(os.WNOHANG)
                elif not self._receive():
                    return

    def end_children(self) -> None:
        """Kill and reap all children and their processes."""
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)
        while self._numbers:
            self._reap(0)
        deadline_s = time.monotonic() + CLEAN_UP_S
        # Programs in sandboxes die with the children, but a little later.
        while self._has_sandboxes and not remove_stale_groups():
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.01)

    def _receive(self) -> bool:
        try:
            body, descriptors, _, _ = socket.recv_fds(self._connection, MAX_DATAGRAM_BYTES, 2)
        except ConnectionResetError:
            return False  # The verifier closed before reading all reports.
        if not body:
            return False
        fork = fork_decoder.decode(body)
        self._has_sandboxes |= fork.pool == CODE
        # Custom rewards are loaded only in their grading process: side effects of their import
        # (threads, open files, a crash) must not reach this process, which all others copy.
        if fork.pool != CUSTOM:
            self._prepare(fork)
        server_pid = os.getpid()
        has_session, starts_session = os.pipe()
        pid = self._fork_patiently()
        if pid == 0:
            self._become_grader(fork, server_pid, starts_session, *descriptors)
        os.close(starts_session)
        # Wait for the child's own session: until then give_way would change the server's session.
        # A child that died closes the pipe too.
        os.read(has_session, 1)
        os.close(has_session)
        for descriptor in descriptors:
            os.close(descriptor)
        self._numbers[pid] = fork.number
        # Only this process reaps its children, so the pid is still the child's.
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(self._connection, [encoder.encode(Born(fork.number, pid))], [pidfd])
        except (BrokenPipeError, ConnectionResetError):
            return False
        finally:
            os.close(pidfd)
        return True

    def _fork_patiently(self) -> int:
        """Retry os.fork until the host has room, for FORK_PATIENCE_S. Raises OSError."""
        deadline_s = time.monotonic() + FORK_PATIENCE_S
        while True:
            try:
                return os.fork()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
            # Ended children take up room until they are reaped.
            self._reap(os.WNOHANG)
            time.sleep(0.1)

    def _prepare(self, fork: Fork) -> None:
        if (fork.kind, fork.task) in self._prepared:
            return
        try:
            prepare(fork.kind, fork.task, self._rules)
        except GradingError as error:
            # The child fails the same way and reports it for each completion.
            sys.stderr.write(f"cannot prepare task {fork.task!r}: {error}\n")
        self._prepared.add((fork.kind, fork.task))
        # Children share these pages until a write. The garbage collector writes to every object
        # that it visits, but not to frozen ones.
        gc.collect()
        gc.freeze()

    def _become_grader(
        self, fork: Fork, server_pid: int, starts_session: int, connection: int, last_words: int
    ) -> NoReturn:
        exit_code = 1
        try:
            # The server's wake-up pipe is still open: a signal would wake the server.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Killing this session kills all that the child started.
            os.setsid()
            os.close(starts_session)
            os.dup2(last_words, 2)
            # Keep only the standard streams and this socket: hostile text that takes over the
            # process must find no other connection.
            os.dup2(connection, 3)
            os.closerange(4, max(map(int, os.listdir("/proc/self/fd"))) + 1)
            die_with(server_pid)
            limits = self._cfg.pool(fork.pool)
            # Last: the set-up itself must not hit the limits.
            limit_resources(fork.pool, limits.memory_bytes)
            with socket.socket(fileno=3) as stream:
                Grader(stream, fork.pool, rules=self._rules, limits=limits).run()
            exit_code = 0
        except BrokenPipeError:
            pass  # The verifier gave this process up.
        except BaseException:  # noqa: BLE001  The process prints the exception and ends.
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(exit_code)

    def _reap(self, options: int) -> None:
        # One SIGCHLD may announce several deaths.
        while self._numbers:
            # WNOWAIT looks without reaping.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            if found is None:
                return
            # Kill the child's session before reaping: afterwards its number may be another
            # process's.
            try:
                os.killpg(found.si_pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # The child died before it had its own session.
            _, status = os.waitpid(found.si_pid, 0)
            number = self._numbers.pop(found.si_pid)
            try:
                died = Died(number, os.waitstatus_to_exitcode(status))
                self._connection.send(encoder.encode(died))
            except (BrokenPipeError, ConnectionResetError):
                pass  # The verifier closed.


def main() -> None:
    """Run the server."""
    descriptor, parent_pid, rules, pools = sys.argv[1:]
    # The verifier receives Ctrl-C too and closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(int(parent_pid))
    # poll() restarts after a signal (PEP 475), so a death must make a descriptor readable. Python
    # writes to it only for signals with a handler, hence the empty one.
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable)
    with socket.socket(fileno=int(descriptor)) as connection:
        server = ForkServer(
            connection,
            readable,
            rules=RewardRules.model_validate(json.loads(rules)),
            cfg=VerifierConfig.model_validate(json.loads(pools)),
        )
        try:
            server.run()
        finally:
            server.end_children()


if __name__ == "__main__":
    main()
