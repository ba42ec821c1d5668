"""Format of RUN/ledger: all that reached the rollout queue, in order.

Written by the queue (`rollout_queue/ledger.py`), which a new process continues after a kill
(`rollout_queue/recovery.py`). A segment is two files:

- NNNNNN.state: a `Began` record, then the state of the queue at the beginning of the segment. It
  names the rollouts that are in earlier logs;
- NNNNNN.log: a record for each input of the coordinator, and for each time that it sent messages.

A record on the disk: its size and CRC-32 (two little-endian uint32), then its frames: their number
and sizes (uint32), then their bytes. The first frame is a struct below in msgpack; the others are
the frames of a received message. A kill can tear only the end of a log, which the sizes tell; so
the CRC leaves out frames of `APART_BYTES` and more, the token arrays.
"""

import contextlib
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import write_when_room
from megatron_rl.protocol.frames import APART_BYTES, Frame
from megatron_rl.protocol.whole_file import PRIVATE_FILE

log = logging.getLogger(__name__)

FOLDER = "ledger"
STATE, LOG = ".state", ".log"
_PARTIAL = ".partial"
_NAME = re.compile(r"(\d{6,})\.(?:state|log|partial)")
_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<I")
_MOST_BUFFERS = 1_000
"""Buffers of one write call; Linux takes 1024."""
_MOST_BEGAN_BYTES = 1 << 16
"""Room for 3,000 launchers that have ended."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A segment begins."""

    start: str
    """Digest of the label of the start of the run that wrote it."""
    metrics_begin: int
    """Bytes of metrics.jsonl when the ledger began."""
    offset_s: float
    """Unix seconds at time 0 of the queue's clock."""
    program: str = ""
    """Digest of the program that wrote the state; earlier releases wrote none."""
    now: float = 0.0
    """Time of the queue's clock."""
    built: int = 0
    """Batches that the queue had built."""
    ended: tuple[tuple[float, float], ...] = ()
    """(last time, unix seconds at time 0) of launchers that had ended, oldest first."""


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """A message, whose frames follow. All times here are those of the queue's clock."""

    endpoint: str
    peer: str
    now: float


class Unreachable(msgspec.Struct, frozen=True, array_like=True, tag="unreachable"):
    """A peer could not be reached, or sent nonsense."""

    endpoint: str
    peer: str


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag="ticked"):
    """The deadlines were checked."""

    now: float
    has_heard_all: bool
    offset_s: float
    """As in `Began`; grows when the clock stands still."""


class StopAsked(msgspec.Struct, frozen=True, array_like=True, tag="stop_asked"):
    """The run is asked to stop before its last step."""


class TrainerExpected(msgspec.Struct, frozen=True, array_like=True, tag="trainer_expected"):
    """Supervised training is over."""

    now: float


class Relaunched(msgspec.Struct, frozen=True, array_like=True, tag="relaunched"):
    """Another start of the run continues the ledger: all peers are new."""

    start: str
    """As in `Began`."""
    now: float


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    """The server wrote a row of counts."""

    values: dict[str, float]


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """The coordinator was asked for messages."""

    now: float
    written: int
    """Record jobs on the disk."""
    has_dealt: bool
    """A batch had been dealt to ranks since the last time."""
    messages: int
    check: int
    """Checksum of what the messages were, to notice a replay that differs."""
    built: int = 0
    """As in `Began`."""


AnyRecord = (
    Began | Received | Unreachable | Ticked | StopAsked | TrainerExpected | Relaunched | Counted
    | Sent
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


class Entry(NamedTuple):
    """A record that was read."""

    record: AnyRecord
    frames: list[memoryview]
    """Further frames."""
    end: int
    """Its end in the file, in bytes."""


def encode_record(record: AnyRecord, frames: Sequence[Frame] = ()) -> list[Frame]:
    """The buffers of a record on the disk. Long frames are not copied."""
    body: list[Frame] = [_encoder.encode(record), *frames]
    lengths = [*map(len, body)]
    sizes = struct.pack(f"<{1 + len(body)}I", len(body), *lengths)
    if max(lengths) < APART_BYTES:
        content = b"".join([sizes, *body])
        return [_HEAD.pack(len(content), zlib.crc32(content)) + content]
    return [_HEAD.pack(len(sizes) + sum(lengths), _check(sizes, body)), sizes, *body]


def _check(sizes: Frame, body: Sequence[Frame]) -> int:
    check = zlib.crc32(sizes)
    for frame in body:
        if len(frame) < APART_BYTES:
            check = zlib.crc32(frame, check)
    return check


def read_entries(path: Path) -> Iterator[Entry]:
    """The records of a file; ends before a torn one."""
    # Not a memory map: reading a map of a truncated file kills the process.
    content = memoryview(path.read_bytes())
    begin = 0
    while (entry := _read_entry(content, begin)) is not None:
        yield entry
        begin = entry.end
    if begin < len(content):
        log.warning("%s: what follows byte %d was cut short, and is left out", path, begin)


def read_entry(path: Path, begin: int, end: int) -> Entry | None:
    """The record at a place of a file; None if it is damaged."""
    with path.open("rb") as file:
        file.seek(begin)
        return _read_entry(memoryview(file.read(end - begin)), 0)


def _read_entry(content: memoryview, begin: int) -> Entry | None:
    """The record at a place; None at the end, and for a torn one."""
    at = begin + _HEAD.size
    if at > len(content):
        return None
    size, check = _HEAD.unpack_from(content, begin)
    body = content[at : at + size]
    if len(body) < size or size < _SIZE.size:
        return None
    (count,) = _SIZE.unpack_from(body)
    at = _SIZE.size * (1 + count)
    if at > size:
        return None
    sizes, frames = body[:at], []
    for length in struct.unpack_from(f"<{count}I", sizes, _SIZE.size):
        frames.append(body[at : at + length])
        at += length
    if at != size or _check(sizes, frames) != check:
        return None
    return Entry(_decoder.decode(frames[0]), frames[1:], begin + _HEAD.size + size)


class LogFile(Closing):
    """Appends records to a file, several with one write call.

    A written record survives the death of the process, but not that of its node.
    """

    def __init__(self, path: Path, *, end: int = 0, limit_s: float) -> None:
        """end: bytes to keep of an existing file. limit_s: how long a full disk is waited for."""
        self._path, self._limit_s = path, limit_s
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE_FILE)
        self._waiting: list[Frame] = []
        self.bytes = self.end = end
        """Bytes of all written records, and of the waiting ones too."""
        self._cut()

    def _cut(self) -> None:
        # Once an empty file was truncated, ext4 starts to write it out while it is closed.
        if os.fstat(self._file).st_size != self.bytes:
            os.ftruncate(self._file, self.bytes)
        os.lseek(self._file, self.bytes, os.SEEK_SET)

    def append(self, record: AnyRecord, frames: Sequence[Frame] = ()) -> None:
        """Add a record to those that `flush` writes."""
        buffers = encode_record(record, frames)
        self._waiting += buffers
        self.end += sum(map(len, buffers))

    def flush(self) -> None:
        """Write all waiting records. Raises InputError when the disk fails or stays full."""
        if self._waiting:
            # A half-written record would hide all later ones.
            write_when_room(self._path, self._write, limit_s=self._limit_s, undo=self._cut)

    def _write(self) -> None:
        parts = self._waiting
        while parts:
            some, parts = parts[:_MOST_BUFFERS], parts[_MOST_BUFFERS:]
            done = os.writev(self._file, some)
            if done < sum(map(len, some)):
                parts = [b"".join(some)[done:], *parts]
        self.bytes, self._waiting = self.end, []

    def close(self) -> None:
        """Close the file without writing the waiting records."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def segments(folder: Path) -> list[int]:
    """Numbers of the segments of a ledger, ascending."""
    return sorted({number for number, path in _files(folder) if path.suffix == STATE})


def _files(folder: Path) -> list[tuple[int, Path]]:
    """The files of all segments with their numbers, also those that a kill has left."""
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*"))
    return [(int(match[1]), path) for match, path in names if match]


def segment_path(folder: Path, number: int, suffix: str) -> Path:
    """Path of a file of a segment; suffix: STATE or LOG."""
    return folder / f"{number:06d}{suffix}"


def write_state(folder: Path, number: int, began: Began, dump: Callable[[BinaryIO], None]) -> int:
    """Write the state of a new segment, whole or not at all; returns its bytes. Raises OSError.

    dump: writes the state into a file.
    """
    path = segment_path(folder, number, STATE)
    partial = path.with_suffix(_PARTIAL)
    try:
        partial.touch(PRIVATE_FILE)
        with partial.open("wb") as file:
            file.writelines(encode_record(began))
            dump(file)
        size = partial.stat().st_size
        partial.replace(path)
    except OSError:
        # What a full disk took of it is room for the log before it.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return size


def read_began(folder: Path, number: int) -> Began | None:
    """How a segment began, without its state; None if its file is damaged."""
    with segment_path(folder, number, STATE).open("rb") as file:
        entry = _read_entry(memoryview(file.read(_MOST_BEGAN_BYTES)), 0)
    return entry.record if entry is not None and isinstance(entry.record, Began) else None


def read_built(folder: Path, number: int) -> int:
    """The batches that a segment whose `read_began` is not None knows to be built."""
    began = read_began(folder, number)
    assert began is not None
    path = segment_path(folder, number, LOG)
    entries = read_entries(path) if path.exists() else ()
    sent = [entry.record.built for entry in entries if isinstance(entry.record, Sent)]
    return max(sent, default=began.built)


def read_state(folder: Path, number: int) -> memoryview:
    """The state at the beginning of a segment whose `read_began` is not None."""
    content = memoryview(segment_path(folder, number, STATE).read_bytes())
    entry = _read_entry(content, 0)
    assert entry is not None
    return content[entry.end :]


def remove_segments(
    folder: Path, *, before: int | None = None, logs_before: int | None = None
) -> None:
    """Remove all segments, or those before a number, with what a kill has left. Raises OSError.

    logs_before: keep the logs from this number on, because a state names records of them.
    """
    limit = {LOG: before if logs_before is None else logs_before}
    doomed = [
        path
        for number, path in _files(folder)
        if (end := limit.get(path.suffix, before)) is None or number < end
    ]
    # States go first: without its state nobody reads a log.
    for path in sorted(doomed, key=lambda path: path.suffix != STATE):
        path.unlink(missing_ok=True)
