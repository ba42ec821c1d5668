"""A grading process: answers `Grade` frames of one socket, in order, in its only thread.

The fork server forks it; the pool may kill it. Its only open files are the socket and stderr. It
dies with the fork server and has limits on memory, CPU time, file size and open files. After an
unexpected exception it ends, and the pool gives the item to another process.
"""

import math
import resource
import socket

from megatron_rl.config.reward import CODE, StepKind, WorkerPoolConfig
from verification.pool.faults import HOST
from verification.pool.frames import (
    Aborted,
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
from verification.rules import RewardRules
from verification.run_time import available_bytes
from verification.score import prepare, take_step
from verification.verdict import GradingError, HostBusy

RETIRE_AFTER_ITEMS = 50_000
RETIRE_AT_MEMORY_SHARE = 0.5
SHORT_OF_MEMORY_BYTES = 256 << 20
"""With less available memory the host may refuse memory below our limits."""
MAX_FILE_BYTES = 1 << 20
MAX_OPEN_FILES = 64
RECEIVE_BYTES = 1 << 18
CPU_GRACE_S = 2


def limit_resources(pool: str, memory_bytes: int) -> None:
    """Cap address space, written files and open files; disable core dumps.

    The code pool has no file limits: its sandboxed programs inherit limits, and a compiler needs
    more. The sandbox sets its own.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if pool != CODE:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after `seconds` of CPU time, in case the pool hangs."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # RLIMIT_CPU counts from the process's birth. It counts ticks, which run ahead on a busy host:
    # hence twice.
    soft = math.ceil(usage.ru_utime + usage.ru_stime + 2 * seconds) + CPU_GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    # Not ru_maxrss: exec inherits the verifier's peak.
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Grader:
    """Answers the frames of one socket until it closes or the process retires."""

    def __init__(
        self, connection: socket.socket, pool: str, *, rules: RewardRules, limits: WorkerPoolConfig
    ) -> None:
        self._connection = connection
        self._pool = pool
        self._rules = rules
        self._limits = limits
        self._loaded: set[tuple[StepKind, str]] = set()
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
        question = message.question
        try:
            self._load(question.kind, question.request.task)
            # After loading, which may exceed the grading limit.
            if self._pool != CODE:
                limit_cpu(self._limits.timeout_s)
            reply: Reply = Graded(message.item_id, take_step(question, self._rules))
        except HostBusy as error:
            reply = Aborted(message.item_id, HOST, str(error))
        except GradingError as error:
            reply = GradeFailed(message.item_id, str(error))
        except MemoryError:
            # The failed item's heap may make a later item fail.
            self._is_spoilt = True
            is_hosts = available_bytes() < SHORT_OF_MEMORY_BYTES
            reply = Aborted(message.item_id, HOST if is_hosts else "grading_memory")
        except RecursionError:
            reply = Aborted(message.item_id, "grading_depth")
        self._send(reply)
        self._items += 1

    def _load(self, kind: StepKind, task: str) -> None:
        if (kind, task) not in self._loaded:
            prepare(kind, task, self._rules)
            self._loaded.add((kind, task))
            self._send(Loaded(kind, task))

    def _is_used_up(self) -> bool:
        # Near the limit a later, innocent completion would fail.
        is_heavy = peak_memory_bytes() > RETIRE_AT_MEMORY_SHARE * self._limits.memory_bytes
        return self._is_spoilt or is_heavy or self._items >= RETIRE_AFTER_ITEMS

    def _send(self, reply: Reply) -> None:
        self._connection.sendall(pack(reply))
