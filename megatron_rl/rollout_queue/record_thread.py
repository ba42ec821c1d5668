"""Writes records beside the queue's loop, which so waits for no disk.

Used by the rollout queue's server. Two threads:

| thread           | does                    | waits for, woken by            | ends               |
|------------------|-------------------------|--------------------------------|--------------------|
| the queue's loop | puts jobs: of a group's | room in the line, where as     | after `close`      |
|                  | completions, or fewer   | many wait as it holds: a job   |                    |
|                  |                         | that is written; or limit_s    |                    |
| `records`        | takes jobs in their     | the next job                   | at `close` once    |
|                  | order, writes them      |                                | all are written,   |
|                  |                         |                                | or at an error     |

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

_TURN_S = 0.5
"""So often a wait looks whether the thread has failed."""


class RecordThread(Closing):
    """A `RecordFiles` behind a line of jobs."""

    def __init__(self, files: RecordFiles, *, jobs: int, limit_s: float) -> None:
        """jobs: that may wait. limit_s: for room in the line, and for all to be written."""
        self._files = files
        self._jobs, self._limit_s = jobs, limit_s
        self._line: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._written: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each job that is written."""
        self._unwritten = 0
        """Jobs that were put, and of which the loop does not know yet that they are written."""
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
        # One is being written, the others wait.
        self._await(self._jobs)
        self._unwritten += 1
        self._line.put(job)

    def check(self) -> None:
        """Raise InputError when something could not be written."""
        if self._error is not None:
            raise InputError(
                f"rollouts could not be recorded in {self._files.folder}: {self._error}. Make room "
                "or mend the disk, then start the run again: it resumes from its newest checkpoint"
            ) from self._error
        if self._has_ended:
            raise RuntimeError("the thread that records rollouts has ended; see its traceback")

    def flush(self) -> None:
        """Wait until all is written. Raises InputError, DeadlineExceeded."""
        self._await(0)

    def _await(self, most: int) -> None:
        """Wait until so many jobs at most are not written. Raises InputError, DeadlineExceeded."""
        deadline = time.monotonic() + self._limit_s
        self.check()
        while True:
            try:
                self._written.get(block=self._unwritten > most, timeout=_TURN_S)
                self._unwritten -= 1
            except queue.Empty:
                if self._unwritten <= most:
                    return
                self._check_wait(deadline)

    def _check_wait(self, deadline: float) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{self._line.qsize()} groups wait to be recorded in {self._files.folder}, and "
                f"the disk was too slow for {self._limit_s:.0f} s (checkpoint.write_timeout_s)"
            )

    def close(self) -> None:
        """Write the rest, and end the thread. Raises InputError, DeadlineExceeded."""
        if self._is_closed:
            return
        self._is_closed = True
        self.check()
        self._line.put(None)
        self._thread.join(self._limit_s)
        if self._error is not None or not self._has_ended:
            self._check_wait(deadline=0.0)
