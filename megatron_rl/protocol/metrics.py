"""Metrics as data: sums and counts, which only a writer formats.

Imported by every process. A metric is reduced from its sum and count, never as a mean of means.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_rl.protocol.disk_room import write_when_room
from megatron_rl.protocol.line_errors import complete_lines, line_error

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""A line of metrics.jsonl."""
Interval = tuple[float, float]
"""Unix seconds of a beginning and an end."""
RESUMED = "launch/resumed"
"""The run resumes after the step of the row (by the launcher)."""
CONTINUED = "launch/ledger_continued"
"""In a row with RESUMED: the queue continues its ledger, so only the trainer repeats steps."""
FIRST_STEP = "trainer/first_step"
"""The step after which a trainer begins, in its first row (by the trainer)."""
GENERATOR_RESTARTS = "launch/generator_restarts"
"""Number of restarted generators (by the launcher)."""
NODES = "launch/nodes"
"""Number of nodes, at the start of a resumed run; and in a row about a node that joined, left, came
back or was refused: the text `node_event`."""
GROUPS_DROPPED = "queue/groups_dropped_"
"""Prefix: groups not trained on, by reason."""
COMPLETIONS_DROPPED = "queue/completions_dropped_"
"""Prefix: completions that could not be graded, by reason."""
PASS_AT = "eval/pass_at_"
"""Prefix, with k or k_se; for evaluations with several samples per prompt."""
MAJ_AT = "eval/maj_at_"
"""Prefix, with k or k_se: majority votes."""
EVALUATION_RUNNING = "eval/running"
"""Label of the running evaluation, in a row with the next two."""
COMPLETIONS_DONE = "eval/completions_done"
COMPLETIONS_WANTED = "eval/completions_wanted"
_SHOWN_BYTES = 80
_BLOCK_BYTES = 1 << 16
_TAKEN_AGAIN = ("trainer", "queue")
"""Sources whose rows a resumed run writes again; a restarted trainer repeats only its own."""

_FIX = "take a line out that a crash has damaged, and `megatron-rl audit` says what is then missing"
_ROW = f"a JSON object; {_FIX}"
_NUMBERS = (
    "time", "step", "train/", "rollout/", "queue/", "wait/", "weight_sync/", "environment/",
    "eval/",
)  # fmt: skip
"""Beginnings of names whose values are numbers."""
Reduce = Literal["mean", "sum", "max"]


class Metric(NamedTuple):
    """One contribution to a quantity named `area/quantity_unit`."""

    name: str
    value: float
    """A sum over `count` items (mean, sum) or the largest of them (max)."""
    reduce: Reduce = "mean"
    count: float = 1.0  # type: ignore[assignment]  # hides tuple.count


class MetricSet:
    """Accumulates metrics by name."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, float, Reduce]] = {}

    def add(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            entry = self._entries.get(metric.name)
            if entry is None:
                self._entries[metric.name] = (metric.value, metric.count, metric.reduce)
                continue
            value, count, reduce = entry
            value = max(value, metric.value) if reduce == "max" else value + metric.value
            self._entries[metric.name] = (value, count + metric.count, reduce)

    def add_entries(self, entries: dict[str, tuple[float, float, Reduce]]) -> None:
        """Add the entries of another process's set."""
        self.add(
            Metric(name, value, reduce, count) for name, (value, count, reduce) in entries.items()
        )

    def entries(self) -> dict[str, tuple[float, float, Reduce]]:
        """name -> (value, count, reduce), for the wire."""
        return dict(self._entries)

    def values(self) -> dict[str, float]:
        """name -> reduced value, without means over nothing."""
        return {
            name: value / count if reduce == "mean" else value
            for name, (value, count, reduce) in self._entries.items()
            if reduce != "mean" or count
        }

    def clear(self) -> None:
        self._entries.clear()


class JsonlWriter:
    """Appends one JSON object a line: {"time", "step", ...values}."""

    def __init__(self, path: Path, source: str, *, limit_s: float = 0.0) -> None:
        """limit_s: how long a full disk is waited for."""
        self._source, self._path, self._limit_s = source, path, limit_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Write the values of a step in one write call, so that processes may share the file.

        Raises WriteFailed; the file ends with a whole row.
        """
        row = {"time": round(time.time(), 3), "source": self._source, "step": step, **values}
        self._append((json.dumps(row) + "\n").encode())

    def _append(self, row: bytes) -> None:
        write_when_room(self._path, partial(self._write_row, row), limit_s=self._limit_s)

    def _write_row(self, row: bytes) -> None:
        done = os.write(self._file, row)
        if done == len(row):
            return
        end = os.lseek(self._file, 0, os.SEEK_CUR)
        if end == os.fstat(self._file).st_size:
            # At once, while the disk has no room for a row of another process.
            os.ftruncate(self._file, end - done)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def drop_torn_line(path: Path) -> None:
    """Cut off a torn last line, which the next row would continue. Call while nobody writes."""
    if not path.exists():
        return
    complete = end_of_lines(path)
    with path.open("r+b") as file:
        file.seek(complete)
        if torn := file.read(_SHOWN_BYTES):
            log.warning("%s: cut off the torn last line %r", path, torn)
            file.truncate(complete)


def end_of_lines(path: Path) -> int:
    """Bytes of a file up to the end of its last complete line."""
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin:
            end, begin = begin, max(0, begin - _BLOCK_BYTES)
            file.seek(begin)
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
    return 0


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a small file, as `iter_jsonl`."""
    return list(iter_jsonl(path))


def iter_jsonl(path: Path, *, holding: str = "") -> Iterator[dict[str, Any]]:
    """The rows of a file, without a torn last line; nothing if the file does not exist.

    holding: only rows with this text. Raises InputError for an unreadable file or a damaged line.
    """
    wanted = holding.encode()
    for number, line in complete_lines(path):
        if wanted in line:
            yield _with_numbers(path, number, _row(path, number, line))


def stream_rows(
    path: Path, *, holding: str = "", end: int | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of `numbered_rows`; raises InputError for a text in place of a number too."""
    rows = numbered_rows(path, holding=holding, end=end)
    return (_with_numbers(path, number, row) for number, row in rows)


def numbered_rows(
    path: Path, *, holding: str = "", end: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a run as if it had never been interrupted; raises as `iter_jsonl`.

    A run that was resumed after step k repeats the later steps: earlier rows of trainer and queue
    about these steps are left out; so are those of a trainer that was restarted after step k.
    holding: only rows with this text. end: bytes to read.
    """
    wanted = holding.encode()
    repeats = list(_repeats(path, end))
    for number, line in complete_lines(path, end=end):
        if wanted not in line:
            continue
        row = _row(path, number, line)
        if not any(
            number < later and row.get("source") in sources and _is_after(row, step)
            for later, step, sources in repeats
        ):
            yield number, row


def _is_after(row: Row, step: int) -> bool:
    found = row.get("step")
    return isinstance(found, int) and found > step


def _repeats(path: Path, end: int | None) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """(line, step, sources) of each row after which these sources repeat what follows the step."""
    marks = RESUMED.encode(), FIRST_STEP.encode()
    for number, line in complete_lines(path, end=end):
        if not any(mark in line for mark in marks):
            continue
        row = _row(path, number, line)
        if RESUMED in row:
            yield number, row["step"], ("trainer",) if CONTINUED in row else _TAKEN_AGAIN
        elif FIRST_STEP in row:
            yield number, row[FIRST_STEP], ("trainer",)


def step_before(rows: Iterable[Row]) -> int:
    """The step after which a run begins: that of another run's checkpoint, or 0.

    The launcher says so in the first row; a run that resumes itself has earlier ones.
    """
    first = next(iter(rows), {})
    return int(first["step"]) if RESUMED in first and CONTINUED not in first else 0


def find_stops(rows: Iterable[Row]) -> list[Interval]:
    """Times in which the run was stopped, in order: from the last row before a resume to the first
    weight sync after it."""
    found: list[Interval] = []
    last, stopped = None, None
    for row in rows:
        if RESUMED in row:
            stopped = last
        elif row.get("source") == "trainer" and "weight_sync/s" in row:
            if stopped is not None:
                found.append((stopped, begin_of_loop(row)))
            last, stopped = row["time"], None
    return found


def begin_of_loop(first: Row) -> float:
    """Time of the first weight sync; without a row for it, the first step's wait begins there."""
    if "train/loss" not in first:
        return float(first["time"])
    parts = ("train/update_s", "weight_sync/s", "wait/batch_s")
    return float(first["time"] - sum(first.get(part, 0.0) for part in parts))


def overlap_s(interval: Interval, others: Iterable[Interval]) -> float:
    """Seconds of the interval inside the others, which do not overlap."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], start)) for start, end in others)


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        # A damaged line may not be valid UTF-8.
        row = json.loads(line.decode(errors="replace"))
    except json.JSONDecodeError as error:
        raise line_error(path, number, error, expected=_ROW) from error
    if not isinstance(row, dict):
        raise line_error(path, number, TypeError(f"it is {row!r:.40}"), expected=_ROW)
    return row


def _with_numbers(path: Path, number: int, row: Row) -> Row:
    for name, value in row.items():
        is_text = isinstance(value, str) and name != EVALUATION_RUNNING
        if is_text and name.startswith(_NUMBERS):
            wrong = TypeError(f"{name} is {value!r:.40}")
            raise line_error(path, number, wrong, expected=f"a number; {_FIX}")
    return row
