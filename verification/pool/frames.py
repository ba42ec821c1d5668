"""Messages between the verifier, its fork server and its grading processes.

Typed msgpack over socket pairs, never pickle: a grading process that hostile text took over must
not run code in the verifier.
"""

import struct
from typing import Any

import msgspec

from megatron_rl.config.reward import StepKind
from megatron_rl.protocol.types import sendable
from verification.draft import Finding, Question

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class FrameError(RuntimeError):
    """The other side sent something that is not a frame."""


# --- verifier <-> grading process: a stream of frames -------------------------------------------


class Grade(msgspec.Struct, frozen=True, tag="Grade"):
    """Verifier -> grading process: take this step."""

    item_id: int
    question: Question


class Loaded(msgspec.Struct, frozen=True, tag="Loaded"):
    """Grading process -> verifier: the libraries of a kind of step and task are loaded."""

    kind: StepKind
    task: str


class Graded(msgspec.Struct, frozen=True, tag="Graded"):
    """Grading process -> verifier: the result of the step."""

    item_id: int
    finding: Finding


class GradeFailed(msgspec.Struct, frozen=True, tag="GradeFailed"):
    """Grading process -> verifier: no finding, and not the completion's fault."""

    item_id: int
    reason: str

    def __post_init__(self) -> None:
        # Unencodable text would end the process, which looks like the completion's fault.
        msgspec.structs.force_setattr(self, "reason", sendable(self.reason))


class Aborted(msgspec.Struct, frozen=True, tag="Aborted"):
    """Grading process -> verifier: grading exceeded a limit of the process or of the host."""

    item_id: int
    fault: str
    """"grading_memory", "grading_depth", "host"."""
    detail: str = ""
    """Text for the log."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "detail", sendable(self.detail))


class Retiring(msgspec.Struct, frozen=True, tag="Retiring"):
    """Grading process -> verifier: a planned end; unanswered items did not cause it."""


Reply = Loaded | Graded | GradeFailed | Aborted | Retiring
encoder = msgspec.msgpack.Encoder()
grade_decoder = msgspec.msgpack.Decoder(Grade)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack(message: Grade | Reply) -> bytes:
    """Frame of a message: its length and msgpack."""
    body = encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
    """Remove all complete messages from the front of a buffer. Raises FrameError."""
    messages = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(buffer, start)
        if size > MAX_FRAME_BYTES:
            raise FrameError(f"a frame announces {size} bytes")
        end = start + _LENGTH.size + size
        if len(buffer) < end:
            break
        try:
            messages.append(decoder.decode(memoryview(buffer)[start + _LENGTH.size : end]))
        except msgspec.DecodeError as error:
            raise FrameError(f"a frame of {size} bytes is no message: {error}") from error
        start = end
    del buffer[:start]
    return messages


# --- verifier <-> fork server: datagrams with file descriptors -----------------------------------


class Fork(msgspec.Struct, frozen=True, tag="Fork"):
    """Verifier -> fork server, with a socket and a file for stderr: fork a grading process."""

    number: int
    pool: str
    kind: StepKind
    task: str
    """The server loads this step's and task's libraries first, shared by all forks."""


class Born(msgspec.Struct, frozen=True, tag="Born"):
    """Fork server -> verifier, with a pidfd: the grading process runs."""

    number: int
    pid: int


class Died(msgspec.Struct, frozen=True, tag="Died"):
    """Fork server -> verifier: the process and all that it started are gone."""

    number: int
    exit_code: int
    """Minus the signal's number if a signal ended the process."""


News = Born | Died
fork_decoder = msgspec.msgpack.Decoder(Fork)
news_decoder: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)
MAX_DATAGRAM_BYTES = 1 << 16
