"""The verifier's end of one grading process: give items, read replies, kill.

Runs in the verifier. Made by `ForkClient`, scheduled by `Lane`.
"""

import os
import signal
import socket
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from megatron_rl.config.reward import StepKind
from megatron_rl.protocol.types import ScoreRequest
from verification.draft import Draft
from verification.pool.frames import Grade, Reply, pack, reply_decoder, unpack

RECEIVE_BYTES = 1 << 18
LAST_WORDS_BYTES = 2000
LOWEST_PRIORITY = 19


class Item(msgspec.Struct):
    """A draft waiting for its next step."""

    item_id: int
    draft: Draft
    lanes: frozenset[str]
    """Lanes in which it takes up room until its score is collected."""
    faults: list[str] = []
    """How earlier attempts at this step ended: "grading_timeout", "grading_crash", ..."""

    @property
    def request(self) -> ScoreRequest:
        """What the queue asked."""
        return self.draft.request

    @property
    def kind(self) -> StepKind:
        """Kind of the next step."""
        return self.draft.steps[0].kind

    @property
    def needs(self) -> tuple[StepKind, str]:
        """What must be loaded first: a kind of step, and a task."""
        return self.kind, self.request.task


class GradingProcess:
    """A child of the fork server with the items it was given; it works on the first."""

    def __init__(self, number: int, connection: socket.socket, last_words: IO[bytes]) -> None:
        self.number = number
        self.connection = connection
        self.items: deque[Item] = deque()
        """Oldest first."""
        self.loaded: set[tuple[StepKind, str]] = set()
        """Kinds of step, by task, that it is ready for."""
        self.first_since_s = 0.0
        """Monotonic time since when it works on the first item."""
        self.check_at_s: float | None = None
        """Monotonic time at which its limits are to be looked at."""
        self.pid: int | None = None
        """None until it is forked."""
        self.exit_code: int | None = None
        """Minus the signal's number when a signal ended it; None until it is reaped."""
        self.is_closed = False
        """It hung up: it died or retired."""
        self.is_retiring = False
        self._pidfd: int | None = None
        self._is_doomed = False
        self.has_given_way = False
        """It runs at the lowest priority."""
        self._must_give_way = False
        self._cpu_at_first_s = 0.0
        self._unsent = bytearray()
        self._received = bytearray()
        self._last_words = last_words
        connection.setblocking(False)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._unsent)

    def give(self, item: Item, now: float) -> None:
        """Queue an item for the child."""
        self.items.append(item)
        if len(self.items) == 1:
            self.note_first(now)
        self._unsent += pack(Grade(item.item_id, item.draft.question))
        self.flush()

    def note_first(self, now: float) -> None:
        """The child starts on its first item now."""
        self.first_since_s = now
        self._cpu_at_first_s = self._cpu_s()

    @property
    def cpu_on_first_s(self) -> float:
        """CPU time spent on the first item."""
        return self._cpu_s() - self._cpu_at_first_s

    def _cpu_s(self) -> float:
        """CPU time of the child's only thread; 0 before it lives and after it died."""
        if self.pid is None or self.exit_code is not None:
            return 0.0
        # Nanoseconds; /proc/PID/stat counts in ticks of 10 ms, too coarse for a limit of 25 ms.
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_bytes().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            return 0.0

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

    def give_way(self) -> None:
        """Run at the lowest CPU priority and on half of the cores from now on."""
        self._must_give_way = True
        if self.pid is None or self.exit_code is not None:
            return
        try:
            os.setpriority(os.PRIO_PROCESS, self.pid, LOWEST_PRIORITY)
            # Even the lowest priority runs on for milliseconds when another process wakes.
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(self.pid, cores[len(cores) // 2 :])
            # Where Linux groups processes by session, niceness counts inside the session only.
            autogroup = Path(f"/proc/{self.pid}/autogroup")
            if autogroup.exists():
                autogroup.write_text(str(LOWEST_PRIORITY))
            self.has_given_way = True
        except BlockingIOError:
            pass  # Users other than root may do so ten times a second: try again later.
        except (ProcessLookupError, FileNotFoundError):
            pass  # It ended meanwhile, which the fork server reports.

    def kill(self) -> None:
        """Kill the child, at its birth if it is not yet born; the fork server reports its death."""
        self._is_doomed = True
        # By pidfd: the fork server may have reaped it, and its number may be another's by now.
        if self._pidfd is None or self.exit_code is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # It ended meanwhile and is reaped; the report is on its way.

    def on_birth(self, pid: int, pidfd: int) -> None:
        """It is forked."""
        self.pid, self._pidfd = pid, pidfd
        if self._is_doomed:
            self.kill()
        elif self._must_give_way:
            self.give_way()

    def on_death(self, exit_code: int) -> None:
        """It is reaped."""
        self.exit_code = exit_code
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def last_words(self) -> str:
        """Last line that the child wrote to stderr."""
        file = self._last_words
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Close this end's files."""
        self.connection.close()
        self._last_words.close()
