"""What the verifier and its grading processes say to each other over a socket pair.

Length-prefixed msgpack: typed, and nothing is pickled, because a grading process that hostile
text took over must not be able to run code in the verifier.
"""

import struct
from typing import Any

import msgspec

from megatron_rl.protocol.types import Score, ScoreRequest

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class FrameError(RuntimeError):
    """The other side sent something that is no frame."""


class Grade(msgspec.Struct, frozen=True, tag="Grade"):
    """Verifier -> grading process: grade this completion."""

    item_id: int
    request: ScoreRequest


class Loaded(msgspec.Struct, frozen=True, tag="Loaded"):
    """Grading process -> verifier: the libraries of a task are loaded."""

    task: str


class Graded(msgspec.Struct, frozen=True, tag="Graded"):
    """Grading process -> verifier: the verdict."""

    item_id: int
    score: Score


class GradeFailed(msgspec.Struct, frozen=True, tag="GradeFailed"):
    """Grading process -> verifier: no verdict, through no fault of the completion."""

    item_id: int
    reason: str


class Retiring(msgspec.Struct, frozen=True, tag="Retiring"):
    """Grading process -> verifier: I end in good order; unanswered items are nobody's fault."""


Reply = Loaded | Graded | GradeFailed | Retiring
_encoder = msgspec.msgpack.Encoder()
grade_decoder = msgspec.msgpack.Decoder(Grade)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack(message: Grade | Reply) -> bytes:
    """Frame of a message, with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
    """All complete messages at the front of a buffer, which loses them; FrameError for no frame."""
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
