"""Writes records beside the queue's loop, which so waits for no disk.

Used by the rollout queue's server. Two threads:

| thread           | does                      | waits for, woken by | ends                        |
|------------------|---------------------------|---------------------|-----------------------------|
| the queue's loop | puts jobs: of a group's   | nothing             | after `close`               |
|                  | completions, or fewer     |                     |                             |
| `records`        | takes jobs in their       | the next job        | at `close` once all are     |
|                  | order, writes them        |                     | written, or at an error     |

The line is bounded by its user: while it `is_full`, the queue leases nothing and forms no batch.
Only groups that are generated already are added.

A job is not changed once it is put: records are made by the loop, and arrays of rollouts are never
written to. An error of the disk stays with the thread until the loop meets it: at its next job or
check, or at `close`. From then on nothing more is written.

The threads meet at SimpleQueues alone: a signal's exception may hit the loop anywhere, and within
Python's own locks (queue.Queue, threading.Event, Thread.is_alive) it can leave one taken, lose a
wake-up, or have a thread pass for one that has ended.
"""

import queue
import threading
import time

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.record_files import Job, RecordFiles


class RecordThread(Closing):
    """A `RecordFiles` behind a line of jobs."""

    def __init__(self, files: RecordFiles, *, jobs: int, limit_s: float) -> None:
        """jobs: more that wait make it full. limit_s: for one job, and for all at the end."""
        self._files = files
        self._jobs, self._limit_s = jobs, limit_s
        self._line: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._written: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each job that is written."""
        self.put = 0
        """Jobs that `write` was called with."""
        self._known_written = 0
        """Jobs of which the loop knows that they are written."""
        self._moved_at = time.monotonic()
        """When the loop last saw a job written, or the line empty."""
        self._error: OSError | None = None
        self._has_ended = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (job := self._line.get()) is not None:
                self._files.write(job)
                self._written.put(None)
        except OSError as error:
            self._error = error
        finally:
            self._has_ended = True

    def write(self, job: Job) -> None:
        """Let a job be written after those before. Raises InputError, DeadlineExceeded."""
        self.check()
        self.put += 1
        self._line.put(job)

    @property
    def written(self) -> int:
        """Jobs that are on the disk: the first so many."""
        while not self._written.empty():
            self._written.get()
            self._known_written += 1
            self._moved_at = time.monotonic()
        if self._known_written == self.put:
            self._moved_at = time.monotonic()
        return self._known_written

    @property
    def is_full(self) -> bool:
        """Whether more jobs wait than may."""
        # One is being written, the others wait.
        return self.put - self.written > self._jobs

    def check(self) -> None:
        """Raise InputError where the disk failed, DeadlineExceeded where it is too slow."""
        self._check_error()
        waiting = self.put - self.written
        if waiting and time.monotonic() - self._moved_at > self._limit_s:
            self._refuse_slow(waiting)

    def _check_error(self) -> None:
        if self._error is not None:
            raise InputError(
                f"rollouts could not be recorded in {self._files.folder}: {self._error}. Make room "
                "or repair the disk, then start the run again: it resumes from its newest "
                "checkpoint"
            ) from self._error
        if self._has_ended:
            raise RuntimeError("the thread that records rollouts has ended; see its traceback")

    def _refuse_slow(self, waiting: int) -> None:
        raise DeadlineExceeded(
            f"{waiting} groups wait to be recorded in {self._files.folder}, and the disk took "
            f"none for {self._limit_s:.0f} s (expert.checkpoint.write_timeout_s)"
        )

    def close(self) -> None:
        """Write the rest, and end the thread. Raises InputError, DeadlineExceeded."""
        if self._is_closed:
            return
        self._is_closed = True
        self._check_error()
        self._line.put(None)
        self._thread.join(self._limit_s)
        if self._error is not None:
            self._check_error()
        if not self._has_ended:
            self._refuse_slow(self.put - self.written)
