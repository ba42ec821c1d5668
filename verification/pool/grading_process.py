"""The verifier's end of one grading process: gives items, reads replies, measures, pauses, kills.

Runs in the verifier. `ForkClient` makes the process, `WorkerPool` schedules it.
"""

import os
import resource
import signal
import socket
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from megatron_rl.config.reward import StepKind
from megatron_rl.protocol.types import ScoreRequest
from verification.comparisons import FORKED
from verification.draft import Draft
from verification.pool.faults import HOST
from verification.pool.frames import Grade, Reply, pack, reply_decoder, unpack
from verification.run_time import Watch, process_cpu_s

RECEIVE_BYTES = 1 << 18
LAST_WORDS_BYTES = 2000


class Item(msgspec.Struct):
    """A draft waiting for its next step."""

    item_id: int
    draft: Draft
    pools: frozenset[str]
    """Worker pools that count the item until its score is collected."""
    faults: list[str] = []
    """Faults of earlier attempts at this step: "grading_timeout", "grading_crash", ..."""
    since_s: float = 0.0
    """Monotonic time of the score request."""
    burnt_s: float = 0.0
    """CPU time of earlier attempts at this step."""

    @property
    def request(self) -> ScoreRequest:
        """The queue's request."""
        return self.draft.request

    @property
    def needs_quiet(self) -> bool:
        """Whether the host was too busy for an earlier attempt."""
        return HOST in self.faults

    @property
    def needs(self) -> tuple[StepKind, str]:
        """Kind of step and task to load first."""
        return self.draft.steps[0].kind, self.request.task


class GradingProcess:
    """A child of the fork server and its items; the child works on the first item."""

    def __init__(self, number: int, connection: socket.socket, last_words: IO[bytes]) -> None:
        self.number = number
        self.connection = connection
        self.items: deque[Item] = deque()
        """Oldest first."""
        self.loaded: set[tuple[StepKind, str]] = set()
        """(kind of step, task) that the child has loaded."""
        self.first_since_s = 0.0
        """Monotonic time at which the child started on the first item."""
        self.check_at_s: float | None = None
        """Monotonic time of the next check of its limits."""
        self.pid: int | None = None
        """None until the fork."""
        self.exit_code: int | None = None
        """Minus the signal's number if a signal ended the child; None until it is reaped."""
        self.is_closed = False
        """The child closed the socket: it died or retired."""
        self.is_retiring = False
        self.is_waiting = False
        """At the last check, the first item needed no core: it waits, such as for a server."""
        self.used_s = 0.0
        """Last measured CPU time of the first item."""
        self._pidfd: int | None = None
        self._is_doomed = False
        self._paused_at_s: float | None = None
        self._niceness = 0
        self._wanted_niceness = 0
        self._cpu_at_first_s = 0.0
        self._watch: Watch | None = None
        self._unsent = bytearray()
        self._received = bytearray()
        self._last_words = last_words
        self._searched_bytes = 0
        """Of the child's stderr, by `find_forks`."""
        connection.setblocking(False)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._unsent)

    def give(self, item: Item, now: float) -> None:
        """Send an item to the child."""
        self.items.append(item)
        if len(self.items) == 1:
            self.note_first(now)
        self._unsent += pack(Grade(item.item_id, item.draft.question))
        self.flush()

    def note_first(self, now: float) -> None:
        """Record that the child starts on its first item now."""
        self.first_since_s = now
        self.used_s, self.is_waiting = 0.0, False
        self._cpu_at_first_s = self._cpu_s()
        self._watch = None

    def measure(self) -> None:
        """Update `used_s`."""
        self.used_s = max(self.used_s, self._cpu_s() - self._cpu_at_first_s)

    def own_elapsed_s(self, now: float) -> float:
        """Elapsed time on the first item, without waits of the child's processes for a core.

        Call it several times a second, from the item's start.
        """
        if self.pid is None:
            return 0.0
        if self._watch is None:
            self._watch = Watch(self.pid, now, with_root=True)
        else:
            self._watch.look(now)
        return now - self.first_since_s - self._watch.waited_s

    def note_wait(self) -> None:
        """Update `is_waiting`. Call after `own_elapsed_s`."""
        self.is_waiting = self._watch is not None and not self._watch.is_ready

    @property
    def computed_s(self) -> float:
        """CPU time of the first item, of the child's own processes too, at the last look."""
        return self.used_s + (self._watch.descendants_cpu_s if self._watch is not None else 0.0)

    def _cpu_s(self) -> float:
        """CPU time of the child; 0 before its birth and after its death."""
        if self.pid is None or self.exit_code is not None:
            return 0.0
        return process_cpu_s(self.pid)

    @property
    def resident_bytes(self) -> int:
        """The child's unshared memory."""
        try:
            _, resident, shared, *_ = Path(f"/proc/{self.pid}/statm").read_bytes().split()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return (int(resident) - int(shared)) * resource.getpagesize()

    def flush(self) -> None:
        """Send as much as the socket has room for."""
        while self._unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # The child's last replies are still to be read.
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Reply]:
        """Arrived replies; sets `is_closed` at the end of the stream. Raises FrameError."""
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

    def give_way(self, niceness: int) -> None:
        """Lower the CPU priority to `niceness` (1 to 19); it never rises again."""
        # Callers repeat the request, because the kernel may refuse it (see below).
        self._wanted_niceness = max(niceness, self._wanted_niceness)
        if self.pid is None or self.exit_code is not None:
            return
        if self._niceness == self._wanted_niceness:
            return
        try:
            os.setpriority(os.PRIO_PROCESS, self.pid, self._wanted_niceness)
            # If Linux groups processes by session, niceness counts only inside the session.
            autogroup = Path(f"/proc/{self.pid}/autogroup")
            if autogroup.exists():
                autogroup.write_text(str(self._wanted_niceness))
            self._niceness = self._wanted_niceness
        except BlockingIOError:
            pass  # Users other than root may change it ten times a second: try again later.
        except (ProcessLookupError, FileNotFoundError):
            pass  # The child ended; the fork server reports it.

    @property
    def is_paused(self) -> bool:
        """Whether the child is stopped; its time does not count then."""
        return self._paused_at_s is not None

    def pause(self, now: float) -> None:
        """Stop the child."""
        self._paused_at_s = now
        self._signal(signal.SIGSTOP)

    def resume(self, now: float) -> None:
        """Continue the child."""
        assert self._paused_at_s is not None
        self.first_since_s += now - self._paused_at_s
        self._paused_at_s = None
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the child, now or at its birth; the fork server reports its death."""
        self._is_doomed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # By pidfd: after reaping, the pid may be another process's.
        if self._pidfd is None or self.exit_code is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass  # The child ended; the fork server reports it.

    def on_birth(self, pid: int, pidfd: int) -> None:
        """Record the fork."""
        self.pid, self._pidfd = pid, pidfd
        if self._is_doomed:
            self.kill()
            return
        if self.is_paused:
            self._signal(signal.SIGSTOP)
        if self._wanted_niceness:
            self.give_way(self._wanted_niceness)

    def on_death(self, exit_code: int) -> None:
        """Record the death."""
        self.exit_code = exit_code
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def find_forks(self) -> list[str]:
        """New lines of the child's stderr that say that a user's function forked and returned."""
        descriptor = self._last_words.fileno()
        size = os.fstat(descriptor).st_size
        if size == self._searched_bytes:
            return []
        # The child writes at the offset of the same open file, which a read would move.
        new = os.pread(descriptor, size - self._searched_bytes, self._searched_bytes)
        self._searched_bytes += len(new)
        return [line for line in new.decode(errors="replace").splitlines() if FORKED in line]

    def last_words(self) -> str:
        """Last line of the child's stderr, but for those of `find_forks`: no item dies of them."""
        file = self._last_words
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if line and FORKED not in line), "")

    def close(self) -> None:
        """Close this end's files."""
        self.connection.close()
        self._last_words.close()
