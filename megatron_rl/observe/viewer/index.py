"""An SQLite index of a run's recorded rollouts and the places of their lines.

Used by the viewer. It is a temporary file, so that a long run needs little memory; each start of
the viewer makes a new one, which grows with the run.
"""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.line_errors import line_error
from megatron_rl.protocol.rollout_files import RolloutFile, RolloutRecord, rollout_files

CHUNK_BYTES = 16 << 20
"""Bytes of one read; a longer line takes several."""
_MARK_BYTES = 256
_PREVIEW_CHARS = 200
_MAX_CHOICES = 100
"""Most offered values of a facet."""
_COLUMNS = (
    "file", "start", "size", "step", "evaluation", "kind", "task", "language", "reason", "dropped",
    "reward", "tokens", "staleness", "finish", "generator", "prompt", "stage", "grp", "idx",
)  # fmt: skip
# Texts are a separate table, so that queries without a search read little.
_TABLE = f"""
create table rollouts (
    id integer primary key, {", ".join(_COLUMNS)}
);
create table texts (id integer primary key, problem, text);
create index by_group on rollouts (file, grp);
create index by_step on rollouts (step);
create index by_reward on rollouts (reward);
create index by_tokens on rollouts (tokens);
create index by_reason on rollouts (reason);
create index by_task on rollouts (task);
"""
SORTABLE = ("id", "step", "reward", "tokens", "staleness")
FACETS = ("kind", "evaluation", "task", "reason", "dropped", "language", "finish", "generator",
          "stage")  # fmt: skip
RANGES = ("step", "reward", "tokens", "staleness")


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions for rollouts; an unset field is no condition."""

    equals: dict[str, str] = {}
    """Value by facet."""
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    search: str = ""
    """Text in the question or completion; A to Z in any case."""
    prompt: str = ""
    """Id of a prompt."""


class Place(NamedTuple):
    """Place of a rollout's line in a file."""

    path: Path
    start: int
    size: int


class _Read(NamedTuple):
    """What of a file is indexed."""

    end: int
    """Bytes."""
    inode: int
    mark: bytes
    """The last bytes before the end."""

    def is_of(self, stream: BinaryIO) -> bool:
        """Whether the file continues it; a run that repeats a step writes another file."""
        stream.seek(self.end - len(self.mark))
        is_same = stream.read(len(self.mark)) == self.mark
        return is_same and self.inode in (0, os.fstat(stream.fileno()).st_ino)


_NOTHING = _Read(0, 0, b"")


class Index(Closing):
    """The rollouts of a run folder."""

    def __init__(self, run_dir: Path, database: Path) -> None:
        """database: the file to make. Raises InputError without rollouts."""
        self._run_dir = run_dir
        rollout_files(run_dir)  # says what is missing
        self._files: list[RolloutFile] = []
        self._read: dict[Path, _Read] = {}
        self._count = 0
        self._facets: dict[str, list[tuple[Any, int]]] | None = None
        self._connection = sqlite3.connect(database, check_same_thread=False)
        self._connection.execute("pragma journal_mode = off")
        self._connection.execute("pragma synchronous = off")
        self._connection.execute("pragma mmap_size = 2147483648")
        self._connection.executescript(_TABLE)

    def close(self) -> None:
        self._connection.close()

    def refresh(self) -> int:
        """Index new rollouts; returns their number.

        Rollouts of files that a resumed run has moved away or writes anew are left out.
        """
        count = 0
        present = rollout_files(self._run_dir)
        for path in self._read.keys() - {file.path for file in present}:
            self._forget(path)
        for file in present:
            if file.path not in self._read:
                self._files.append(file)
                self._read[file.path] = _NOTHING
            count += self._take(file)
        self._connection.commit()
        if count:
            self._facets = None
        return count

    def _number(self, path: Path) -> int:
        return next(i for i, known in enumerate(self._files) if known.path == path)

    def _forget(self, path: Path) -> None:
        """Remove the rollouts of a file, which is read from its beginning if it comes again."""
        if self._read[path].end:
            number = [self._number(path)]
            of_file = "select id from rollouts where file = ?"
            self._connection.execute(f"delete from texts where id in ({of_file})", number)
            self._connection.execute("delete from rollouts where file = ?", number)
            self._facets = None
        self._read[path] = _NOTHING

    def _take(self, file: RolloutFile) -> int:
        number = self._number(file.path)
        try:
            stream = file.path.open("rb")
        except FileNotFoundError:
            self._forget(file.path)
            return 0
        except OSError as error:
            raise InputError(f"cannot read {file.path}: {error.strerror}") from error
        count = 0
        marks = ", ".join("?" * (len(_COLUMNS) + 1))
        with stream:
            if not self._read[file.path].is_of(stream):
                self._forget(file.path)
            for rows, texts in self._rows(stream, file, number):
                first = self._count + 1
                self._connection.executemany(
                    f"insert into rollouts values ({marks})",
                    [(first + place, *row) for place, row in enumerate(rows)],
                )
                self._connection.executemany(
                    "insert into texts values (?, ?, ?)",
                    [(first + place, *row) for place, row in enumerate(texts)],
                )
                self._count += len(rows)
                count += len(rows)
        return count

    def _rows(
        self, stream: BinaryIO, file: RolloutFile, number: int
    ) -> Iterator[tuple[list[tuple[Any, ...]], list[tuple[str, str]]]]:
        """Rows and texts of new complete lines, chunk by chunk."""
        decoder = msgspec.json.Decoder(RolloutRecord)
        inode = os.fstat(stream.fileno()).st_ino
        start = self._read[file.path].end
        stream.seek(start)
        torn = b""
        while data := stream.read(CHUNK_BYTES):
            *lines, torn = (torn + data).split(b"\n")
            rows, texts = [], []
            for line in lines:
                record = self._decode(file.path, start, line, decoder)
                rows.append((number, start, len(line), *_values(file, record)))
                texts.append((record.problem, record.text))
                start += len(line) + 1
            yield rows, texts
            if lines:
                self._read[file.path] = _Read(start, inode, lines[-1][-_MARK_BYTES:] + b"\n")

    def _decode(
        self, path: Path, start: int, line: bytes, decoder: "msgspec.json.Decoder[RolloutRecord]"
    ) -> RolloutRecord:
        try:
            return decoder.decode(line)
        except msgspec.MsgspecError as error:
            with path.open("rb") as stream:
                number = stream.read(start).count(b"\n") + 1
            raise line_error(path, number, error, expected="a recorded rollout") from error

    def page(
        self, wanted: Filter, *, order: str, is_falling: bool, limit: int, offset: int
    ) -> tuple[int, list[dict[str, Any]]]:
        """Number of matching rollouts, and one page of them."""
        assert order in SORTABLE
        where, values = _where(wanted)
        sorting = f"order by {order} {'desc' if is_falling else 'asc'}, id"
        if wanted.search:
            # One pass over the texts gives all ids; the page is cut from them.
            found = self._connection.execute(
                f"select id from rollouts join texts using (id) {where} {sorting}", values
            ).fetchall()
            total, numbers = len(found), [number for (number,) in found[offset : offset + limit]]
        else:
            counted = self._connection.execute(f"select count(*) from rollouts {where}", values)
            (total,) = counted.fetchone()
            asked = f"select id from rollouts {where} {sorting} limit ? offset ?"
            numbers = [n for (n,) in self._connection.execute(asked, [*values, limit, offset])]
        marks = ", ".join("?" * len(numbers))
        cursor = self._connection.execute(
            f"select id, {', '.join(_COLUMNS[3:])}, "
            f"substr(problem, 1, {_PREVIEW_CHARS}) as problem, "
            f"substr(text, 1, {_PREVIEW_CHARS}) as text "
            f"from rollouts join texts using (id) where id in ({marks})",
            numbers,
        )
        rows = {row["id"]: row for row in _named(cursor)}
        return total, [rows[number] for number in numbers]

    def facets(self) -> dict[str, list[tuple[Any, int]]]:
        """Values of each facet with their counts, most frequent first."""
        if self._facets is None:
            self._facets = {
                name: self._connection.execute(
                    f"select {name}, count(*) from rollouts group by {name} order by 2 desc "
                    f"limit {_MAX_CHOICES}"
                ).fetchall()
                for name in FACETS
            }
        return self._facets

    def place(self, number: int) -> Place | None:
        """Place of a rollout's line; None for an unknown number."""
        row = self._connection.execute(
            "select file, start, size from rollouts where id = ?", [number]
        ).fetchone()
        return None if row is None else Place(self._files[row[0]].path, row[1], row[2])

    def group_of(self, number: int) -> list[dict[str, Any]]:
        """All rollouts of the same group; [] for an unknown number."""
        cursor = self._connection.execute(
            "select b.id, b.idx, b.reward, b.reason, b.tokens, t.text from rollouts a "
            "join rollouts b on a.file = b.file and a.grp = b.grp "
            "join texts t on t.id = b.id where a.id = ? "
            "order by b.idx, b.id",
            [number],
        )
        return _named(cursor)


def _named(cursor: sqlite3.Cursor) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _values(file: RolloutFile, record: RolloutRecord) -> tuple[Any, ...]:
    oldest = min(record.versions, default=None)
    is_aged = file.step is not None and not file.is_dropped and oldest is not None
    kind = "evaluated" if file.step is None else "trained"
    return (
        file.step, file.label, "dropped" if file.is_dropped else kind, record.task,
        record.language, record.reason, record.dropped, record.reward, record.tokens,
        file.step - oldest if is_aged else None, record.finish_reason, record.generator,
        record.prompt_id, record.stage, record.group, record.index,
    )  # fmt: skip


def _where(wanted: Filter) -> tuple[str, list[Any]]:
    """SQL and its values; column names come from our tables, never from the request."""
    parts: list[str] = []
    values: list[Any] = []
    for name in FACETS:
        if name in wanted.equals:
            parts.append(f"cast({name} as text) = ?" if name == "stage" else f"{name} = ?")
            values.append(wanted.equals[name])
    for name in RANGES:
        for given, sign in ((wanted.least, ">="), (wanted.most, "<=")):
            if name in given:
                parts.append(f"{name} {sign} ?")
                values.append(given[name])
    if wanted.prompt:
        parts.append("prompt = ?")
        values.append(wanted.prompt)
    if wanted.search:
        escaped = wanted.search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        parts.append("(text like ? escape '\\' or problem like ? escape '\\')")
        values += [f"%{escaped}%"] * 2
    return (f"where {' and '.join(parts)}" if parts else ""), values
