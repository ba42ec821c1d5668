"""Appends records of rollouts to the files that `record.py` names: arrays first, then lines.

Used by the rollout queue, in the thread of `record_thread.py`, and by tools without one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.protocol.rollout_files import (
    LINES,
    WORD_BYTES,
    WORDS,
    RolloutRecord,
    WordBuffer,
)
from megatron_rl.protocol.types import Rollout
from megatron_rl.rollout_queue.thinning import Thinner


class Entry(NamedTuple):
    """A rollout to be written."""

    record: RolloutRecord
    """Without `words`."""
    rollout: Rollout


class Job(NamedTuple):
    """What is to be appended to the two files of a name."""

    stem: str
    entries: Sequence[Entry]
    is_first: bool
    """The files are made anew."""
    formed_step: int | None = None
    """The batch of this step is formed: tokens of old steps may go."""


class RecordFiles:
    """Writes at once."""

    def __init__(self, folder: Path, *, keeps_tokens: bool, thinner: Thinner | None = None) -> None:
        """keeps_tokens: write arrays too. thinner: removes the arrays of old steps."""
        self.folder = folder
        self._thinner = thinner
        self._keeps_tokens = keeps_tokens
        self.put = 0
        """Jobs that `write` was called with."""
        self.is_full = False
        """Nothing ever waits."""

    def write(self, job: Job) -> None:
        """Append to the files of a job. Raises OSError."""
        self.put += 1
        lines, words = (self.folder / (job.stem + suffix) for suffix in (LINES, WORDS))
        if job.is_first:
            # Lines first, as words alone are read by nobody.
            lines.unlink(missing_ok=True)
            words.unlink(missing_ok=True)
        records = [entry.record for entry in job.entries]
        if self._keeps_tokens:
            records = list(_append_words(words, job.entries))
        encoder = msgspec.json.Encoder()
        with lines.open("ab") as file:
            # One by one: while a text is turned into JSON no other thread of the process runs.
            for record in records:
                file.write(encoder.encode(record))
                file.write(b"\n")
        if job.formed_step is not None and self._thinner is not None:
            self._thinner.thin(job.formed_step)

    @property
    def written(self) -> int:
        """Jobs that are written: all of them."""
        return self.put

    def check(self) -> None:
        """Errors were raised where they came up."""


def _append_words(path: Path, entries: Sequence[Entry]) -> Iterator[RolloutRecord]:
    """The records, which say where their arrays are."""
    with path.open("ab") as file:
        words = WordBuffer(begins_at=file.tell() // WORD_BYTES)
        places = [words.add(entry.rollout) for entry in entries]
        words.write_to(file)
    for entry, place in zip(entries, places, strict=True):
        yield msgspec.structs.replace(entry.record, words=place)
