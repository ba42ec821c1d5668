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
        self._limit_s = limit_s
        self._line: queue.Queue[Job | threading.Event | None] = queue.Queue(jobs)
        """An event is set once all before it is written; None ends the thread."""
        self._error: OSError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (asked := self._line.get()) is not None:
            if isinstance(asked, threading.Event):
                asked.set()
                continue
            try:
                self._files.write(asked)
            except OSError as error:
                self._error = error
                return

    def write(self, job: Job) -> None:
        """Let a job be written after those before. Raises InputError, DeadlineExceeded."""
        self._put(job)

    def check(self) -> None:
        """Raise InputError when something could not be written."""
        if self._error is not None:
            raise InputError(
                f"rollouts could not be recorded in {self._files.folder}: {self._error}. Make room "
                "or mend the disk, then start the run again: it resumes from its newest checkpoint"
            ) from self._error
        if not self._thread.is_alive():
            raise RuntimeError("the thread that records rollouts has ended; see its traceback")

    def flush(self) -> None:
        """Wait until all is written. Raises InputError, DeadlineExceeded."""
        written = threading.Event()
        self._put(written)
        deadline = time.monotonic() + self._limit_s
        while not written.wait(_TURN_S):
            self._check_wait(deadline)

    def _put(self, asked: Job | threading.Event | None) -> None:
        deadline = time.monotonic() + self._limit_s
        while True:
            self.check()
            try:
                self._line.put(asked, timeout=_TURN_S)
                return
            except queue.Full:
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
        self._put(None)
        self._thread.join(self._limit_s)
        if self._error is not None or self._thread.is_alive():
            self._check_wait(deadline=0.0)
