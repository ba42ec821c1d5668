"""Reads JSONL files that may not fit into memory, with one wording for errors.

Imported by every process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_rl.config.errors import InputError

Kind = TypeVar("Kind")


def line_error(path: Path, number: int, error: Exception, *, expected: str) -> InputError:
    """The error for line `number`, from 1, of a JSONL file. expected: what a line holds."""
    return InputError(f"{path}:{number}: {error}; expected {expected}")


def complete_lines(path: Path, *, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each complete line that is not empty; nothing if the file is missing.

    end: bytes to read, None for all. Raises InputError for an unreadable file.
    """
    try:
        # Only newlines separate: JSON strings may have other separators, such as U+2028.
        with path.open("rb") as file:
            position = 0
            for number, line in enumerate(file, 1):
                position += len(line)
                if end is not None and position > end:
                    return
                # A process may be writing this line.
                if not line.endswith(b"\n"):
                    return
                if line != b"\n":
                    yield number, line
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def decode_lines(
    path: Path, decoder: "msgspec.json.Decoder[Kind]", *, expected: str
) -> Iterator[Kind]:
    """The complete lines of a file, decoded one at a time. Raises InputError for a bad one."""
    for number, line in complete_lines(path):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise line_error(path, number, error, expected=expected) from error
