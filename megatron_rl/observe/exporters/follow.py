"""Reads metrics.jsonl as it grows. Used by the exporter and the live view."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.protocol.metrics import Row, end_of_lines, stream_rows

CHUNK_BYTES, CHUNK_ROWS = 1 << 18, 100
"""Limits of one read; a longer file takes several."""


class Follower:
    """The rows of a file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._torn = b""

    def read(self) -> list[Row]:
        """Some new complete rows; [] without any, or without a file."""
        rows: list[Row] = []
        if not self._path.exists():
            return rows
        with self._path.open("rb") as file:
            file.seek(self._position)
            # A row may be longer than a chunk.
            while not rows and (data := file.read(CHUNK_BYTES)):
                self._position += len(data)
                *lines, self._torn = (self._torn + data).split(b"\n")
                rows = [json.loads(line) for line in lines if line]
        return rows

    def read_all(self) -> Iterator[list[Row]]:
        """All present rows, in parts, without steps that a resumed run repeated."""
        if not self._path.exists():
            return
        self._position, self._torn = end_of_lines(self._path), b""
        stream = stream_rows(self._path, end=self._position)
        while rows := list(itertools.islice(stream, CHUNK_ROWS)):
            yield rows

    def skip(self) -> None:
        self._position = self._path.stat().st_size if self._path.exists() else 0


def numbers(row: Row) -> dict[str, float]:
    """The numeric metrics of a row."""
    return {
        name: float(value)
        for name, value in row.items()
        if "/" in name and isinstance(value, int | float)
    }


def set_suffix(row: Row) -> str:
    """`/SET` for metrics of an evaluation set, else ""; the row's label is WHEN.SET."""
    name = row.get("label", "").partition(".")[2]
    return f"/{name}" if name else ""
