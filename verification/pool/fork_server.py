"""The fork server: `python -m verification.pool.fork_server FD PARENT_PID RULES WORKER_POOLS`.

Started by `ForkClient`, one a verifier. Loads the judges' libraries once and forks grading
processes, so that a killed one is replaced in milliseconds. It is a separate process because a fork
copies one thread only, and the verifier has those of zmq. It grades nothing itself. One thread:

| waits for | woken by | does |
|---|---|---|
| Fork | the socket | loads what the step needs, forks, answers Born |
| a death | SIGCHLD's wake-up descriptor | ends what the child started, reaps it, sends Died |
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
from verification.pool.frames import MAX_DATAGRAM_BYTES, Born, Died, Fork, encode, fork_decoder
from verification.pool.grader import Grader, die_with, limit_resources
from verification.rules import RewardRules
from verification.sandbox.cgroup import remove_stale_groups
from verification.score import prepare
from verification.verdict import GradingError

FORK_PATIENCE_S = 60.0
"""How long a host may be out of processes or memory."""
CLEAN_UP_S = 2.0
"""Time that dying sandboxes have before their control groups are left to a later server."""


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
        """Number of each live child by pid."""
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
        """Kill and reap all children and what they started."""
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)
        while self._numbers:
            self._reap(0)
        deadline_s = time.monotonic() + CLEAN_UP_S
        # What ran in their sandboxes dies with them, but not at the same instant.
        while self._has_sandboxes and not remove_stale_groups():
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.01)

    def _receive(self) -> bool:
        try:
            body, descriptors, _, _ = socket.recv_fds(self._connection, MAX_DATAGRAM_BYTES, 2)
        except ConnectionResetError:
            return False  # The verifier closed with news of ours unread.
        if not body:
            return False
        fork = fork_decoder.decode(body)
        self._has_sandboxes |= fork.pool == CODE
        # Functions of the user's own are loaded in their own process alone: whatever their import
        # does (threads, open files, a crash) must not reach this one, of which all are copies.
        if fork.pool != CUSTOM:
            self._prepare(fork)
        server_pid = os.getpid()
        has_session, starts_session = os.pipe()
        pid = self._fork_patiently()
        if pid == 0:
            self._become_grader(fork, server_pid, starts_session, *descriptors)
        os.close(starts_session)
        # Until the child has its own session it shares ours, and what the verifier does to its
        # session (see give_way) would be done to the server. A child that died is an end as well.
        os.read(has_session, 1)
        os.close(has_session)
        for descriptor in descriptors:
            os.close(descriptor)
        self._numbers[pid] = fork.number
        # Nobody else reaps our children, so until we do this number is the child's.
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(self._connection, [encode(Born(fork.number, pid))], [pidfd])
        except (BrokenPipeError, ConnectionResetError):
            return False
        finally:
            os.close(pidfd)
        return True

    def _fork_patiently(self) -> int:
        """What os.fork returns, once the host has room for one more process; OSError in the end."""
        deadline_s = time.monotonic() + FORK_PATIENCE_S
        while True:
            try:
                return os.fork()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
            # Those that ended and are not reaped take up the room.
            self._reap(os.WNOHANG)
            time.sleep(0.1)

    def _prepare(self, fork: Fork) -> None:
        if (fork.kind, fork.task) in self._prepared:
            return
        try:
            prepare(fork.kind, fork.task, self._rules)
        except GradingError as error:
            # The child fails the same way, and says so for each completion.
            sys.stderr.write(f"cannot prepare task {fork.task!r}: {error}\n")
        self._prepared.add((fork.kind, fork.task))
        # Children share these pages until one writes to them, and the garbage collector writes to
        # every object that it looks at. What is frozen it leaves alone.
        gc.collect()
        gc.freeze()

    def _become_grader(
        self, fork: Fork, server_pid: int, starts_session: int, connection: int, last_words: int
    ) -> NoReturn:
        exit_code = 1
        try:
            # The server's wake-up pipe is still open here: a signal would wake the server.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # To end this session is to end all that the child started.
            os.setsid()
            os.close(starts_session)
            os.dup2(last_words, 2)
            # Nothing but the standard streams and this socket: hostile text that takes the process
            # over finds no other verifier's, child's or server's connection.
            os.dup2(connection, 3)
            os.closerange(4, max(map(int, os.listdir("/proc/self/fd"))) + 1)
            die_with(server_pid)
            limits = self._cfg.pool(fork.pool)
            # Last: all that is done here must not fail for want of a resource.
            limit_resources(fork.pool, limits.memory_bytes)
            with socket.socket(fileno=3) as stream:
                Grader(stream, fork.pool, rules=self._rules, limits=limits).run()
            exit_code = 0
        except BrokenPipeError:
            pass  # The verifier gave this process up.
        except BaseException:  # noqa: BLE001  The process ends here; it says why, as Python would.
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(exit_code)

    def _reap(self, options: int) -> None:
        # One SIGCHLD may stand for several deaths, so all that can be reaped are.
        while self._numbers:
            # WNOWAIT looks without reaping.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            if found is None:
                return
            # Ends what the child started, before the reaping: once it is reaped, its number may be
            # that of another process, and this would kill a stranger.
            try:
                os.killpg(found.si_pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It died before it had its own session.
            _, status = os.waitpid(found.si_pid, 0)
            number = self._numbers.pop(found.si_pid)
            try:
                self._connection.send(encode(Died(number, os.waitstatus_to_exitcode(status))))
            except (BrokenPipeError, ConnectionResetError):
                pass  # The verifier closed; nobody asks any more.


def main() -> None:
    """Entry of the process."""
    descriptor, parent_pid, rules, pools = sys.argv[1:]
    # The verifier hears Ctrl-C too and closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(int(parent_pid))
    # poll() is restarted after a signal (PEP 475), so a death must show as a readable descriptor.
    # A signal without a handler of Python's writes nothing there, hence the empty one.
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
