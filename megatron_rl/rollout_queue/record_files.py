"""Appends records of rollouts to the files that `record.py` names, and removes old token files.

Used by the rollout queue in a thread, so that its loop never waits for the disk, and by tools
without a thread. Two threads:

| thread           | does                        | waits for    | ends                             |
|------------------|-----------------------------|--------------|----------------------------------|
| the queue's loop | puts jobs of one group each | nothing      | after `close`                    |
| `records`        | writes the jobs in order    | the next job | at `close` after all, or at an   |
|                  |                             |              | error                            |

While `is_full`, the queue leases nothing and builds no batch, so only groups in flight add jobs. A
job does not change after it is put. On a full disk the thread waits for room. `write`, `check` and
`close` raise a disk error of the thread, after which nothing more is written.

The threads share only SimpleQueues. A signal's exception may interrupt the loop anywhere; inside
Python's own locks (queue.Queue, threading.Event, Thread.is_alive) it can leave a lock taken, lose
a wake-up, or make a running thread look ended.
"""

import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, steps_by_name
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import WriteFailed, free_text, write_when_room
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.rollout_files import (
    FOLDER,
    LINES,
    WORDS,
    RolloutRecord,
    append_words,
    write_thinned,
)
from megatron_rl.protocol.types import Rollout
from megatron_rl.protocol.wire import DeadlineExceeded

log = logging.getLogger(__name__)

NOT_REMOVED = "queue/token_files_not_removed"
_TOKEN_FILE = re.compile(r"(?:step|dropped|trained)_(\d{6,})\.(?:int32|\d+\.npz)")


class Thinner:
    """Removes the token files of old steps (queue.keep_tokens_of_steps).

    A file that cannot be removed is logged and counted once, and retried at each later step.
    """

    def __init__(self, config: Config, metrics: JsonlWriter) -> None:
        """metrics: a writer that may be called in any thread."""
        self._run_dir = config.run.dir
        self._keep_steps = config.queue.keep_tokens_of_steps
        self._replayed_steps = config.replay.steps_in_buffer(config.sampled_groups)
        self._metrics = metrics
        self._failed: set[Path] = set()

    def thin(self, step: int) -> None:
        """Remove the token files that are too old when the batch of `step` is built."""
        before = step - self._keep_steps
        if not self._keep_steps or before <= 0:
            return
        folder = self._run_dir / FOLDER
        try:
            doomed = self._doomed(folder, before)
            if doomed:
                # Before the removal, so that no reader reports missing files.
                write_thinned(folder, before)
        except (OSError, InputError) as error:
            self._note_failure(step, folder, error)
            return
        for path in doomed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._note_failure(step, path, error)

    def _doomed(self, folder: Path, before: int) -> list[Path]:
        kept = self._needed_to_resume()
        return [
            path
            for place in (folder, *folder.glob("superseded_*"))
            for step, path in _token_files(place)
            if step < before and (step not in kept or place != folder)
        ]

    def _needed_to_resume(self) -> set[int]:
        """Steps that fill the replay buffer of a resumed run."""
        if not self._replayed_steps:
            return set()
        checkpoints = steps_by_name(self._run_dir / CHECKPOINTS)
        return {s for at in checkpoints for s in range(at - self._replayed_steps, at)}

    def _note_failure(self, step: int, path: Path, error: Exception) -> None:
        if path in self._failed:
            return
        self._failed.add(path)
        log.warning("token files of old steps stay (queue.keep_tokens_of_steps): %s", error)
        self._metrics.write(step, {NOT_REMOVED: 1})


def _token_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir():
        if (match := _TOKEN_FILE.fullmatch(path.name)) is not None:
            yield int(match[1]), path


class Entry(NamedTuple):
    """A rollout to be written."""

    record: RolloutRecord
    """Without `words`."""
    rollout: Rollout


class Job(NamedTuple):
    """Entries to append to the two files of a name."""

    stem: str
    entries: Sequence[Entry]
    is_first: bool
    """Replace the files."""
    is_removal: bool = False
    """Only remove the files."""
    formed_step: int | None = None
    """The batch of this step is formed: tokens of old steps may be removed."""


class Writer(Protocol):
    """Writes jobs, now or later."""

    put: int
    """Number of jobs so far."""

    @property
    def written(self) -> int:
        """Number of jobs on the disk."""

    @property
    def is_full(self) -> bool:
        """Whether too many jobs wait."""

    def write(self, job: Job) -> None:
        """Write a job, or queue it."""

    def check(self) -> None:
        """Raise the error of an earlier job."""


class RecordFiles:
    """Writes each job at once."""

    def __init__(
        self,
        folder: Path,
        *,
        keeps_tokens: bool,
        thinner: Thinner | None = None,
        limit_s: float = 0.0,
    ) -> None:
        """keeps_tokens: write arrays too. thinner: removes the arrays of old steps. limit_s: how
        long a full disk is waited for.
        """
        self.folder, self._limit_s = folder, limit_s
        self._thinner = thinner
        self._keeps_tokens = keeps_tokens
        self.put = 0
        self.is_full = False
        self.jobs = sys.maxsize
        """Maximum number that waits."""

    def write(self, job: Job) -> None:
        """Append to the files of a job. Raises WriteFailed."""
        self.put += 1
        lines, words = (self.folder / (job.stem + suffix) for suffix in (LINES, WORDS))
        sizes = {path: 0 if job.is_first else _size(path) for path in (lines, words)}
        write_when_room(
            lines,
            partial(self._write, job, lines, words),
            limit_s=self._limit_s,
            undo=partial(_cut_back, sizes),
        )
        if job.formed_step is not None and self._thinner is not None:
            self._thinner.thin(job.formed_step)

    def _write(self, job: Job, lines: Path, words: Path) -> None:
        if job.is_first:
            # Lines first: no reader looks for words without lines.
            lines.unlink(missing_ok=True)
            words.unlink(missing_ok=True)
        if job.is_removal:
            return
        records = [entry.record for entry in job.entries]
        if self._keeps_tokens:
            records = list(_append_words(words, job.entries))
        encoder = msgspec.json.Encoder()
        with lines.open("ab") as file:
            # One by one: encoding JSON blocks all other threads of the process.
            for record in records:
                file.write(encoder.encode(record))
                file.write(b"\n")

    @property
    def written(self) -> int:
        return self.put

    def check(self) -> None:
        """Do nothing: `write` raised all errors."""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cut_back(sizes: Mapping[Path, int]) -> None:
    for path, size in sizes.items():
        if not size:
            path.unlink(missing_ok=True)
        elif _size(path) > size:
            os.truncate(path, size)


def _append_words(path: Path, entries: Sequence[Entry]) -> Iterator[RolloutRecord]:
    """Append the arrays; yields the records with the places of their arrays."""
    with path.open("ab") as file:
        places = append_words(file, (entry.rollout for entry in entries))
    for entry, place in zip(entries, places, strict=True):
        # A conversation whose environment failed has no tokens.
        words = place if entry.record.tokens else None
        yield msgspec.structs.replace(entry.record, words=words)


class RecordThread(Closing):
    """Writes jobs by a `RecordFiles` in a thread."""

    def __init__(self, files: RecordFiles, *, jobs: int, limit_s: float) -> None:
        """jobs: maximum number that waits. limit_s: for one job, and for all at the end."""
        self._files = files
        self.jobs, self._limit_s = jobs, limit_s
        self._line: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._written: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item for each written job."""
        self.put = 0
        self._known_written = 0
        """Written jobs that the loop has counted."""
        self._moved_at = time.monotonic()
        """When the loop last saw progress, or no waiting job."""
        self._error: WriteFailed | None = None
        self._has_ended = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (job := self._line.get()) is not None:
                self._files.write(job)
                self._written.put(None)
        except WriteFailed as error:
            self._error = error
        finally:
            self._has_ended = True

    def write(self, job: Job) -> None:
        """Queue a job. Raises WriteFailed, DeadlineExceeded."""
        self.check()
        self.put += 1
        self._line.put(job)

    @property
    def written(self) -> int:
        # Jobs are written in order.
        while not self._written.empty():
            self._written.get()
            self._known_written += 1
            self._moved_at = time.monotonic()
        if self._known_written == self.put:
            self._moved_at = time.monotonic()
        return self._known_written

    @property
    def is_full(self) -> bool:
        # One job is being written, the others wait.
        return self.put - self.written > self.jobs

    def check(self) -> None:
        """Raise WriteFailed after a failed write, DeadlineExceeded if the disk is too slow."""
        self._check_error()
        waiting = self.put - self.written
        if waiting and time.monotonic() - self._moved_at > self._limit_s:
            self._refuse_slow(waiting)

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self._has_ended:
            raise RuntimeError("the thread that records rollouts has ended; see its traceback")

    def _refuse_slow(self, waiting: int) -> None:
        raise DeadlineExceeded(
            f"{waiting} groups wait to be recorded in {self._files.folder}, and the disk took "
            f"none for {self._limit_s:.0f} s (expert.checkpoint.write_timeout_s); "
            f"{free_text(self._files.folder)}"
        )

    def close(self) -> None:
        """Write all waiting jobs and end the thread. Raises WriteFailed, DeadlineExceeded."""
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
