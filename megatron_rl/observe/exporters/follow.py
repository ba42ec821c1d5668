"""Reads metrics.jsonl as it grows. Used by the exporter."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.protocol.metrics import RESUMED, end_of_lines, stream_rows

Row = dict[str, Any]
CHUNK_BYTES, CHUNK_ROWS = 1 << 18, 100
"""Read at once; a longer file takes several calls."""


class Follower:
    """The rows of a file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._torn = b""

    def read(self) -> list[Row]:
        """Some rows that were completed since the last call; [] when there are none.

        A file that is not there yet has none.
        """
        rows: list[Row] = []
        if not self._path.exists():
            return rows
        with self._path.open("rb") as file:
            file.seek(self._position)
            # A row may be longer than what is read at once.
            while not rows and (data := file.read(CHUNK_BYTES)):
                self._position += len(data)
                *lines, self._torn = (self._torn + data).split(b"\n")
                rows = [json.loads(line) for line in lines if line]
        return rows

    def read_all(self) -> Iterator[list[Row]]:
        """All rows until now, in parts, without rows of steps that a resumed run took again."""
        if not self._path.exists():
            return
        self._position, self._torn = end_of_lines(self._path), b""
        stream = stream_rows(self._path, end=self._position)
        while rows := list(itertools.islice(stream, CHUNK_ROWS)):
            yield rows

    def skip(self) -> None:
        """Pass over the rows that are there."""
        self._position = self._path.stat().st_size if self._path.exists() else 0


def is_rewritten(rows: list[Row]) -> bool:
    """Whether new rows say that steps before them are taken again."""
    return any(RESUMED in row for row in rows)


def numbers(row: Row) -> dict[str, float]:
    """The metrics of a row: no texts, and none of what says where the row is from."""
    return {
        name: float(value)
        for name, value in row.items()
        if "/" in name and isinstance(value, int | float)
    }


def split_label(label: str) -> tuple[str, str]:
    """When an evaluation was made, and of which set: ("step_10", "aime24"); "" for held-out."""
    when, _, name = label.partition(".")
    return when, name
