"""Reads JSONL files, also those that may not fit into memory, with one wording for errors.

Imported by every process.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_rl.config.errors import InputError

Kind = TypeVar("Kind")
_SURROGATE = re.compile("[\ud800-\udfff]")


def line_error(path: Path, number: int, error: Exception, *, expected: str) -> InputError:
    """The error for line `number`, from 1, of a JSONL file. expected: what a line holds."""
    return InputError(f"{path}:{number}: {error}; expected {expected}")


def json_fault(line: str, error: Exception) -> str:
    """What is wrong with a line that `msgspec` refuses, which may call an escape a cut-off text."""
    if not isinstance(error, msgspec.DecodeError) or isinstance(error, msgspec.ValidationError):
        return str(error)
    try:
        # Python's reader joins whole pairs, and keeps halves.
        found = _SURROGATE.search(json.dumps(json.loads(line), ensure_ascii=False))
    except (ValueError, RecursionError):
        return str(error)
    if found is None:
        return str(error)
    return half_pair_fault(found[0])


def half_pair_fault(half: str) -> str:
    """What is wrong with a text that holds this surrogate alone."""
    return f"it holds half of a surrogate pair (\\u{ord(half):04x}), which is no character"


def text_lines(path: Path, *, holds: str = "", hint: str = "") -> list[tuple[int, str]]:
    """Number, from 1, and text of each line of a file that is not blank.

    Raises InputError for a file that cannot be read. holds: what the file holds, as "the prompts ",
    and hint: what may help, for its message.
    """
    try:
        # Not splitlines(), which also splits at U+2028 inside JSON strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = 1 + error.object.count(b"\n", 0, error.start)
        text = f"byte 0x{error.object[error.start]:02x} is no UTF-8; expected a file in UTF-8"
        raise InputError(f"cannot read {holds}{path}:{number}: {text}{hint}") from error
    except OSError as error:
        raise InputError(f"cannot read {holds}{path}: {error}{hint}") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def decode_texts(path: Path, kind: Any, *, expected: str) -> list[tuple[int, Any]]:
    """(number, line as `kind`) of a small file. Raises InputError with the first bad line.

    expected: example of a line, for the message.
    """
    decoder = msgspec.json.Decoder(kind)
    found = []
    for number, line in text_lines(path):
        try:
            found.append((number, decoder.decode(line)))
        except msgspec.MsgspecError as error:
            raise line_error(path, number, error, expected=expected) from error
    if not found:
        raise InputError(f"{path} has no lines; expected {expected}")
    return found


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
