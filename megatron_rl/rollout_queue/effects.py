"""What the coordinator does besides sending messages: batches, records of rollouts, metrics.

Used by the ledger (`ledger.py`). Threads do this work, so when they are done is an input of the
coordinator too. Each class here tells it only what `look` saw, which the ledger writes down; in a
replay (`recovery.py`) it tells what the ledger says, and does none of the work again:

| class         | in a replay                                     | at its end                   |
|---------------|-------------------------------------------------|------------------------------|
| LedgerMaker   | deals nothing                                   | deals the latest batch       |
| LedgerWriter  | drops the jobs that are known to be on the disk | cuts off what they do not    |
|               |                                                 | explain, writes the others   |
| LedgerMetrics | drops as many rows as the file has              | writes all further rows      |
"""

import collections
import itertools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.rollout_files import LINES, WORD_BYTES, WORDS, read_records
from megatron_rl.protocol.types import RankBatch
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.batches import BatchOrder, deal_batch
from megatron_rl.rollout_queue.record_files import NOT_REMOVED, Job, RecordFiles, RecordThread

_ROW_OF_QUEUE = b'"source": "queue"'
_ROW_OF_THINNER = f'"{NOT_REMOVED}"'.encode()
"""In a row that a thread of the queue writes whatever the ledger says."""


class LedgerMaker(BatchMaker):
    """Deals by another maker."""

    def __init__(self, maker: BatchMaker) -> None:
        super().__init__()
        self._maker: BatchMaker | None = maker
        self._order: BatchOrder | None = None
        """The latest one."""
        self._is_held = False
        """The ledger lacks the cause of the latest order."""
        self.has_dealt = False
        """The last look found a batch. In a replay: the next look will."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the batch, which is dealt again from its order."""
        return {**self.__dict__, "_maker": None, "batch": [], "_fill": None, "_store": None}

    def _deal(self, order: BatchOrder) -> None:
        self._order, self._is_held = order, True

    def release(self) -> None:
        """Hand on the latest order, whose cause the ledger has now.

        So the ledger knows of each batch that is stored.
        """
        if self._is_held:
            assert self._maker is not None and self._order is not None
            self._is_held = False
            self._maker.put(self._order)

    def look(self) -> bool:
        if self._maker is not None:
            self.has_dealt = self.is_busy and self._maker.look()
            if self.has_dealt:
                self.batch = self._maker.batch
        elif self.has_dealt:
            assert self._order is not None
            size, step = self._order.dp_size, self._order.step
            self.batch = [RankBatch(step, rank, [], {}) for rank in range(size)]
        self.is_busy = self.is_busy and not self.has_dealt
        return self.has_dealt

    def end_replay(self, maker: BatchMaker) -> None:
        """Deal further batches, and the latest one again. Raises as `deal_batch`."""
        self._maker, self._is_held = maker, False
        if self._order is None:
            return
        if self.is_busy:
            maker.put(self._order)
        else:
            self.batch = deal_batch(self._order)


class LedgerWriter:
    """Writes records by another writer."""

    def __init__(self, writer: RecordFiles | RecordThread) -> None:
        self._writer: RecordFiles | RecordThread | None = writer
        self._jobs_limit = writer.jobs
        self.put = 0
        self.written = 0
        """Number of jobs that the last look found on the disk."""
        self._base = 0
        """Number of jobs before the first one of this process."""
        self._waiting: collections.deque[Job] = collections.deque()
        """Jobs that are not known to be on the disk."""
        self._lines: collections.Counter[str] = collections.Counter()
        """Lines of each name by the jobs that are."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}

    def write(self, job: Job) -> None:
        """Queue a job for `release`."""
        self.put += 1
        self._waiting.append(job)

    def release(self) -> None:
        """Hand on the jobs, whose cause the ledger has now. Raises as `RecordThread.write`."""
        assert self._writer is not None
        new = self.put - self._base - self._writer.put
        if not new:
            return
        for job in itertools.islice(self._waiting, len(self._waiting) - new, None):
            self._writer.write(job)

    def look(self) -> None:
        assert self._writer is not None
        self.note_written(self._base + self._writer.written)

    def note_written(self, written: int) -> None:
        while self.written < written:
            job = self._waiting.popleft()
            self._lines[job.stem] *= not job.is_first
            self._lines[job.stem] += len(job.entries)
            self.written += 1

    @property
    def is_full(self) -> bool:
        return self.put - self.written > self._jobs_limit

    def check(self) -> None:
        if self._writer is not None:
            self._writer.check()

    def end_replay(self, writer: RecordFiles | RecordThread, folder: Path) -> None:
        """Write the waiting jobs, and further ones. Raises InputError for damaged files."""
        by_stem = operator.attrgetter("stem")
        for stem, jobs in itertools.groupby(sorted(self._waiting, key=by_stem), key=by_stem):
            if not next(jobs).is_first:
                _cut(folder / stem, self._lines[stem])
        self._writer, self._base = writer, self.written


def _cut(stem: Path, lines: int) -> None:
    """Keep the first lines of a file, and their words. Raises InputError for a damaged line."""
    path = stem.with_name(stem.name + LINES)
    if not path.exists():
        return
    words = 0
    for record in itertools.islice(read_records(path), lines):
        if record.words is not None:
            words = max(words, record.words[1] + 2 * record.tokens)
    with path.open("r+b") as file:
        end = sum(map(len, itertools.islice(file, lines)))
        file.truncate(end)
    arrays = path.with_suffix(WORDS)
    if arrays.exists():
        with arrays.open("r+b") as file:
            file.truncate(words * WORD_BYTES)


class LedgerMetrics(JsonlWriter):
    """Writes rows by another writer."""

    def __init__(self, writer: JsonlWriter) -> None:
        self._writer: JsonlWriter | None = writer
        self._held: list[tuple[int, Mapping[str, float | int | str]]] = []
        """Rows whose cause the ledger lacks."""
        self._rows = 0
        self._in_file = 0
        """In a replay: rows of the file."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Queue a row for `release`."""
        self._rows += 1
        if self._rows > self._in_file:
            self._held.append((step, values))

    def release(self) -> None:
        """Write the rows, whose cause the ledger has now."""
        assert self._writer is not None
        for row in self._held:
            self._writer.write(*row)
        self._held.clear()

    def begin_replay(self, writer: JsonlWriter, path: Path, begin: int) -> None:
        """Write only rows that the file lacks after byte `begin`."""
        self._writer = writer
        with path.open("rb") as file:
            file.seek(begin)
            self._in_file = sum(
                _ROW_OF_QUEUE in line and _ROW_OF_THINNER not in line and line.endswith(b"\n")
                for line in file
            )

    def close(self) -> None:
        """Do nothing: the other writer is closed by its owner."""
