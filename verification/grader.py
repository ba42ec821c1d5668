"""A grading process: `python -m verification.grader FD PARENT_PID TIMEOUT_S MEMORY_BYTES RULES`.

Started and killed by `pool.py`. Reads `Grade` frames from the inherited socket FD and answers each
in order, in its main thread. It has no other open file, dies with its parent, and lives under
limits of memory, CPU time, file size and open files. An exception that no task foresaw ends it:
the pool then gives the completion to another process.
"""

import ctypes
import math
import os
import resource
import signal
import socket
import sys

import msgspec

from megatron_rl.protocol.types import Score
from verification.frames import (
    Grade,
    Graded,
    GradeFailed,
    Loaded,
    Reply,
    Retiring,
    grade_decoder,
    pack,
    unpack,
)  # fmt: skip
from verification.score import RewardRules, Task, load_task, score_unverified
from verification.verdict import GradingError

RETIRE_AFTER_ITEMS = 50_000
RETIRE_AT_MEMORY_SHARE = 0.5
MAX_FILE_BYTES = 1 << 20
MAX_OPEN_FILES = 64
RECEIVE_BYTES = 1 << 18
CPU_GRACE_S = 2
_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(0)


def limit_resources(memory_bytes: int) -> None:
    """Cap address space, written files, open files; no core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after that many more CPU seconds, if the pool is stuck."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + CPU_GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def peak_memory_bytes() -> int:
    """Most memory that this program has held.

    Not getrusage's ru_maxrss: that survives exec, so a child of a big process starts out big.
    """
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Grader:
    """Answers the frames of one socket until it closes or the process is used up."""

    def __init__(
        self, connection: socket.socket, *, rules: RewardRules, timeout_s: float, memory_bytes: int
    ) -> None:
        self._connection = connection
        self._rules = rules
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._tasks: dict[str, Task] = {}
        self._items = 0
        self._is_spoilt = False

    def run(self) -> None:
        """Serve until the verifier closes the socket, or until retirement."""
        buffer = bytearray()
        while received := self._connection.recv(RECEIVE_BYTES):
            buffer += received
            for message in unpack(buffer, grade_decoder):
                self._answer(message)
                if self._is_used_up():
                    self._send(Retiring())
                    return

    def _answer(self, message: Grade) -> None:
        request = message.request
        try:
            task = self._task(request.task)
            limit_cpu(self._timeout_s)
            score = task(request, self._rules)
            _check_score(score, request.task)
        except GradingError as error:
            self._send(GradeFailed(message.item_id, str(error)))
        except MemoryError:
            self._is_spoilt = True
            score = score_unverified(request, self._rules, "grading_memory")
            self._send(Graded(message.item_id, score))
        else:
            self._send(Graded(message.item_id, score))
        self._items += 1

    def _task(self, name: str) -> Task:
        if name not in self._tasks:
            self._tasks[name] = load_task(name)
            self._send(Loaded(name))
        return self._tasks[name]

    def _is_used_up(self) -> bool:
        # Near the limit a later, innocent completion would be the one to fail.
        is_heavy = peak_memory_bytes() > RETIRE_AT_MEMORY_SHARE * self._memory_bytes
        return self._is_spoilt or is_heavy or self._items >= RETIRE_AFTER_ITEMS

    def _send(self, reply: Reply) -> None:
        self._connection.sendall(pack(reply))


def _check_score(score: Score, task: str) -> None:
    """Raise GradingError for what a plugged-in task must not return."""
    if not isinstance(score, Score):
        raise GradingError(f"task {task!r} returned {type(score).__name__}, expected a Score")
    if not math.isfinite(score.reward):
        raise GradingError(f"task {task!r} returned the reward {score.reward}")


def main() -> None:
    """Entry of the process."""
    descriptor, parent_pid, timeout_s, memory_bytes, rules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(int(parent_pid))
    limit_resources(int(memory_bytes))
    with socket.socket(fileno=int(descriptor)) as connection:
        Grader(
            connection,
            rules=msgspec.json.decode(rules, type=RewardRules),
            timeout_s=float(timeout_s),
            memory_bytes=int(memory_bytes),
        ).run()


if __name__ == "__main__":
    main()
