"""Reads rows of one file in batches, and the names of its columns: JSON, CSV, Parquet, Arrow.

Parquet and Arrow files are read by column, so other columns cost nothing. Opening such a file
imports pyarrow.
"""

import codecs
import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.data.tables.data_sets import known_names
from megatron_rl.data.tables.plain_values import LongInteger, read_json
from megatron_rl.protocol.line_errors import half_pair_fault

LINES = (".jsonl", ".ndjson")
BINARY = (".parquet", ".arrow")
CSV = (".csv", ".tsv")
_GZIP = ".gz"
FORMATS = f"{', '.join((*LINES, '.json', *CSV))} (each also with {_GZIP}), {', '.join(BINARY)}"
"""The formats, for people."""
_BATCH_ROWS = 512
_BUFFER_BYTES = 1 << 20
_POINTER = b"version https://git-lfs"
_EXPECTED = "expected a list of objects, or an object a line"
_QUESTIONS = {name.partition(".")[0] for name in known_names("question")}
_MAX_FIELD = 1 << 30
"""Characters of one value of CSV; Python's own limit is 131,072, less than many tests have."""


class TableRow(NamedTuple):
    """One row of a file."""

    number: int
    """Number of the line in a JSONL file, else of the row; from 1."""
    fields: dict[str, Any]
    """Values by column, without missing values."""
    fault: str = ""
    """Reason why the line could not be read; it has no fields then."""


def format_of(path: PurePath) -> str:
    """The suffix that names a file's format, without that of compression; "" for other files."""
    plain = path.with_suffix("") if path.suffix == _GZIP else path
    known = (*LINES, ".json", *CSV) if path.suffix == _GZIP else (*LINES, ".json", *CSV, *BINARY)
    return plain.suffix if plain.suffix in known else ""


def stem_of(path: PurePath) -> str:
    """The name of a file without the suffixes of format and compression."""
    return (path.with_suffix("") if path.suffix == _GZIP else path).stem


def place_of(path: Path, number: int) -> str:
    """Place of a row, for messages to the user."""
    row = f"row {number}" if format_of(path) not in LINES else str(number)
    return f"{path}:{row}"


def read_columns(path: Path) -> list[str]:
    """Names of the columns (text: keys of the first row), with dots in structures.

    Raises InputError.
    """
    if format_of(path) in BINARY:
        with _open_binary(path) as opened:
            return _names_of(opened.schema)
    for row in read_rows(path, None, batch_rows=1):
        return _keys_of(row.fields, "")
    return []


def read_rows(
    path: Path, columns: Iterable[str] | None, *, batch_rows: int = _BATCH_ROWS
) -> Iterator[TableRow]:
    """All rows in their order. Raises InputError for a file that cannot be read.

    columns: names to read, without dots; None: all. batch_rows: maximum number of rows in memory,
    where the format allows a limit.
    """
    kind = format_of(path)
    if kind in BINARY:
        return _read_binary(path, None if columns is None else sorted(set(columns)), batch_rows)
    if kind in CSV:
        return _read_csv(path)
    return _read_document(path) if kind == ".json" and _is_document(path) else _read_lines(path)


def _refuse_pointer(path: Path, start: bytes) -> None:
    """Raise InputError for what `git clone` leaves in place of a large file."""
    if start == _POINTER:
        raise InputError(
            f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder, or "
            "copy the data set by `hf download`"
        )


# --- text ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """The bytes of a text file in UTF-8, without its mark. Raises InputError."""
    try:
        with gzip.open(path) if path.suffix == _GZIP else path.open("rb") as file:
            start = file.read(len(_POINTER))
            _refuse_pointer(path, start)
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InputError(
                    f"{path} is UTF-16; expected UTF-8: `iconv -f UTF-16 -t UTF-8` converts it"
                )
            file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read the prompts {path}: {error}") from error


def _read_csv(path: Path) -> Iterator[TableRow]:
    """Rows by the names in the first line; empty values are missing."""
    csv.field_size_limit(_MAX_FIELD)
    with _open_text(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        separator = "\t" if format_of(path) == ".tsv" else ","
        rows = csv.DictReader(text, delimiter=separator, restkey="")
        try:
            for number, fields in enumerate(rows, 1):
                if "" in fields:
                    yield TableRow(number, {}, f"more values than the {len(fields) - 1} columns")
                    continue
                yield TableRow(number, {key: value or None for key, value in fields.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the prompts {path}: {error}") from error


def _is_document(path: Path) -> bool:
    """Whether a .json file is one value, not one object per line."""
    with _open_text(path) as file:
        lines = (line for line in file if line.strip())
        first = next(lines, b"")
        if first.lstrip().startswith(b"[") or not next(lines, b""):
            return True
    try:
        msgspec.json.decode(first, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return True
    return False


def _read_lines(path: Path) -> Iterator[TableRow]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    # Bytes: the text mode would split at a carriage return alone.
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = _decode(decoder, line)
            except (ValueError, RecursionError) as error:
                yield TableRow(number, {}, str(error))
                continue
            yield TableRow(number, fields)


def _read_document(path: Path) -> Iterator[TableRow]:
    """Rows of one JSON value: a list of objects, also as the only one of an object; or a row."""
    with _open_text(path) as file:
        data = file.read()
    try:
        found = _decode(msgspec.json.Decoder(list[dict[str, Any]] | dict[str, Any]), data or b"[]")
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read the prompts {path}: {error}; {_EXPECTED}") from error
    for number, fields in enumerate(_rows_in(found, path), 1):
        yield TableRow(number, {key: value for key, value in fields.items() if value is not None})


def _rows_in(found: list[dict[str, Any]] | dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The rows of a document. Raises InputError for one that is written by columns."""
    if isinstance(found, list):
        return found
    lists = [rows for rows in found.values() if _is_table(rows) and (rows or len(found) == 1)]
    # Messages or tests of one row are lists of objects, too.
    if len(lists) == 1 and _QUESTIONS.isdisjoint(found):
        return lists[0]
    if not all(isinstance(value, dict | list) for value in found.values()):
        return [found]
    raise InputError(
        f"cannot read the prompts {path}: it is one object of columns ({', '.join(found)}); "
        f"{_EXPECTED}, as pandas writes it by to_json(orient='records', lines=True)"
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """The value of JSON. Raises ValueError, RecursionError."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        # msgspec refuses integers beyond 4,300 digits, after it has seen that the JSON is whole,
        # and what Python and pandas write for a missing number.
        if not ("out of range" in str(error) or b"NaN" in data or b"Infinity" in data):
            raise
        value = msgspec.convert(read_json(data.decode()), decoder.type)
        _refuse_half_pairs(value)
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            # A column of its own is text then, such as an answer.
            row |= {key: str(one) for key, one in row.items() if isinstance(one, LongInteger)}
        return value


def _refuse_half_pairs(value: Any) -> None:
    """Raise ValueError for half of a surrogate pair, which Python's reader keeps."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(half_pair_fault(error.object[error.start])) from error


def _keys_of(fields: dict[str, Any], prefix: str) -> list[str]:
    found = []
    for key, value in fields.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _keys_of(value, f"{prefix}{key}.")
    return found


# --- Parquet and Arrow --------------------------------------------------------------------------


class _Binary(NamedTuple):
    """A file that pyarrow has opened."""

    schema: Any
    source: Any
    """pyarrow's ParquetFile, RecordBatchStreamReader or RecordBatchFileReader."""


def load_pyarrow() -> Any:
    """The library; InputError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "Parquet and Arrow files need pyarrow, which is not installed "
            f"({error}): .venv/bin/python -m pip install pyarrow==26.0.1"
        ) from error
    return pyarrow


@contextlib.contextmanager
def _open_binary(path: Path) -> Iterator[_Binary]:
    pyarrow = load_pyarrow()
    with contextlib.ExitStack() as stack:
        try:
            with path.open("rb") as start:
                _refuse_pointer(path, start.read(len(_POINTER)))
            if format_of(path) == ".parquet":
                # With a buffer a column chunk is read piece by piece, not as a whole.
                file = stack.enter_context(
                    pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES)
                )
                yield _Binary(file.schema_arrow, file)
                return
            opened = stack.enter_context(pyarrow.memory_map(str(path)))
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            make = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
            reader = stack.enter_context(make(opened))
            yield _Binary(reader.schema, reader)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the prompts {path}: {error}") from error


def _read_binary(path: Path, columns: Sequence[str] | None, batch_rows: int) -> Iterator[TableRow]:
    number = 0
    with _open_binary(path) as opened:
        known = opened.schema.names
        wanted = known if columns is None else [name for name in known if name in columns]
        for batch in _batches(opened, path, wanted, batch_rows):
            # Damaged offsets would end the process.
            batch.validate(full=True)
            for start in range(0, batch.num_rows, batch_rows):
                for fields in batch.slice(start, batch_rows).to_pylist():
                    number += 1
                    yield TableRow(number, _without_nulls(fields))


def _batches(opened: _Binary, path: Path, wanted: Sequence[str], batch_rows: int) -> Iterator[Any]:
    """Record batches of the wanted columns, in the order of the file."""
    source = opened.source
    if format_of(path) == ".parquet":
        yield from source.iter_batches(
            batch_size=batch_rows, columns=list(wanted), use_threads=False
        )
    elif hasattr(source, "num_record_batches"):
        for index in range(source.num_record_batches):
            yield source.get_batch(index).select(wanted)
    else:
        for batch in source:
            yield batch.select(wanted)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without null values, except inside lists."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if value is not None
    }


def _names_of(schema: Any) -> list[str]:
    pyarrow = load_pyarrow()
    found: list[str] = []

    def add(field: Any, prefix: str) -> None:
        found.append(prefix + field.name)
        if pyarrow.types.is_struct(field.type):
            for child in field.type:
                add(child, f"{prefix}{field.name}.")

    for field in schema:
        add(field, "")
    return found
