"""The verifier's end of one grading process: start, talk, kill.

Runs in the verifier; used by `pool.py`. The child inherits one socket and nothing else, has a
session of its own, so that killing it also ends what it started, and a clean environment.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque

import msgspec

from megatron_rl.protocol.config import VerifierConfig
from megatron_rl.protocol.types import ScoreRequest
from verification.frames import Grade, Reply, pack, reply_decoder, unpack
from verification.score import RewardRules

RECEIVE_BYTES = 1 << 18
LAST_WORDS_BYTES = 2000
EXIT_TIMEOUT_S = 1.0
KILL_TIMEOUT_S = 10.0
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Item(msgspec.Struct):
    """A completion on its way through the pool."""

    item_id: int
    request: ScoreRequest
    deaths: int = 0
    """Grading processes that died on it."""


class GradingProcess:
    """A child process with the items it was given, oldest first; it works on the first."""

    def __init__(self, cfg: VerifierConfig, rules: RewardRules) -> None:
        self.items: deque[Item] = deque()
        self.loaded: set[str] = set()
        self.deadline_s: float | None = None
        """Monotonic time by which the first item must be answered."""
        self.is_closed = False
        """The child hung up: it died or retired."""
        self._unsent = bytearray()
        self._received = bytearray()
        self._last_words = tempfile.TemporaryFile()
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        command = [
            sys.executable, "-m", "verification.grader", str(theirs.fileno()), str(os.getpid()),
            str(cfg.timeout_s), str(cfg.memory_bytes), msgspec.json.encode(rules).decode(),
        ]  # fmt: skip
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._last_words,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._unsent)

    def give(self, item: Item) -> None:
        """Queue an item for the child."""
        self.items.append(item)
        self._unsent += pack(Grade(item.item_id, item.request))
        self.flush()

    def flush(self) -> None:
        """Send what the socket has room for."""
        while self._unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # The replies sent before the child hung up are still to be read.
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Reply]:
        """Replies that have arrived; notes when the child hung up. FrameError for nonsense."""
        while not self.is_closed:
            try:
                received = self.connection.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                received = b""
            self.is_closed = not received
            self._received += received
        return unpack(self._received, reply_decoder)

    def wait_for_exit(self) -> None:
        """Give a child that hung up a moment to end by itself; it stays to be reaped."""
        descriptor = os.pidfd_open(self._process.pid)
        try:
            select.select([descriptor], [], [], EXIT_TIMEOUT_S)
        finally:
            os.close(descriptor)

    def last_words(self) -> str:
        """Last line that the child wrote to stderr."""
        file = self._last_words
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self) -> int:
        """Kill the child and its session, reap it, close its files; its exit code (-signal)."""
        self.connection.close()
        # Before the reaping: until then no other process can bear this id.
        os.killpg(self._process.pid, signal.SIGKILL)
        exit_code = self._process.wait(KILL_TIMEOUT_S)
        self._last_words.close()
        return exit_code


def _environment() -> dict[str, str]:
    """Clean environment: what a scorer reads there is no secret of ours."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return kept | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": search_path}
