"""The verifier's end of the fork server: requests grading processes and receives their births and
deaths.

Runs in the verifier; used by `pool.py`. The first request starts the server.
"""

import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from megatron_rl.config.reward import StepKind, VerifierConfig
from verification.pool.frames import MAX_DATAGRAM_BYTES, Born, Fork, encoder, news_decoder
from verification.pool.grading_process import GradingProcess
from verification.rules import RewardRules

MAX_STARTS = 3
"""Limit of started fork servers; each later one replaces a dead one."""
END_TIMEOUT_S = 10.0
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LOST = 255
"""Exit code of a process that died with its fork server; no item caused it."""

log = logging.getLogger(__name__)


class ForkServerDied(RuntimeError):
    """The fork server died MAX_STARTS times."""


class ForkClient:
    """Grading processes by number, from request to reported death."""

    def __init__(self, cfg: VerifierConfig, rules: RewardRules) -> None:
        self._cfg = cfg
        self._rules = rules
        self._numbers = itertools.count()
        self._processes: dict[int, GradingProcess] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starts = 0

    @property
    def descriptor(self) -> int | None:
        """Readable when `receive` has work; None before the first fork."""
        return None if self._socket is None else self._socket.fileno()

    def fork(self, pool: str, needs: tuple[StepKind, str]) -> GradingProcess:
        """A new grading process, ready for that kind of step and task.

        It accepts items at once: they wait in its socket until the fork.
        """
        if self._socket is None:
            self._start()
        assert self._socket is not None
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        # The process object closes the file.
        last_words = tempfile.TemporaryFile()
        process = GradingProcess(number, ours, last_words)
        self._processes[number] = process
        message = encoder.encode(Fork(number, pool, *needs))
        with theirs:
            try:
                socket.send_fds(self._socket, [message], [theirs.fileno(), last_words.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                pass  # `receive` finds the server dead, and this process with it.
        return process

    def receive(self) -> list[GradingProcess]:
        """Read the server's reports; return dead processes. Raises ForkServerDied."""
        died = []
        while self._socket is not None:
            try:
                body, descriptors, _, _ = socket.recv_fds(self._socket, MAX_DATAGRAM_BYTES, 1)
            except BlockingIOError:
                break
            except ConnectionResetError:
                body, descriptors = b"", []
            if not body:
                # Deaths reported before the server's own keep their exit codes.
                return died + self._lose_all()
            news = news_decoder.decode(body)
            if isinstance(news, Born):
                self._processes[news.number].on_birth(news.pid, *descriptors)
            else:
                process = self._processes.pop(news.number)
                process.on_death(news.exit_code)
                died.append(process)
        return died

    def close(self) -> None:
        """End the server, which ends its children."""
        if self._server is None or self._socket is None:
            return
        # The server ends when the connection closes.
        self._socket.close()
        self._socket = None
        try:
            self._server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The kernel kills its children with it.
            self._server.kill()
            self._server.wait(END_TIMEOUT_S)
        self._give_up_all()

    def _start(self) -> None:
        self._starts += 1
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # recv_fds of Python 3.11 ignores its flags, so MSG_DONTWAIT would block.
        self._socket.setblocking(False)
        command = [
            sys.executable, "-m", "verification.pool.fork_server",
            str(theirs.fileno()), str(os.getpid()),
            self._rules.model_dump_json(), self._cfg.model_dump_json(),
        ]  # fmt: skip
        with theirs:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C reaches only the verifier, which then ends the server.
                start_new_session=True,
                env=clean_variables(path or os.getcwd() for path in sys.path),
            )

    def _lose_all(self) -> list[GradingProcess]:
        assert self._server is not None and self._socket is not None
        self._socket.close()
        self._socket = None
        exit_code = self._server.wait(END_TIMEOUT_S)
        if self._starts >= MAX_STARTS:
            raise ForkServerDied(
                f"the fork server of the grading processes died {self._starts} times, "
                f"now with exit code {exit_code}: see this log for its last words"
            )
        log.error("the fork server of the grading processes died (exit code %d)", exit_code)
        return self._give_up_all()

    def _give_up_all(self) -> list[GradingProcess]:
        lost = list(self._processes.values())
        for process in lost:
            process.on_death(LOST)
        self._processes.clear()
        return lost


def clean_variables(search_path: Iterable[str], names: Iterable[str] = ()) -> dict[str, str]:
    """Variables for a process of a user's functions, which finds no secrets of the run in them.

    names: of further variables that pass.
    """
    kept = {name: os.environ[name] for name in (*_KEPT_VARIABLES, *names) if name in os.environ}
    one_thread = dict.fromkeys(_ONE_THREAD, "1")
    return kept | one_thread | {"PYTHONPATH": os.pathsep.join(search_path)}
