"""Encodes messages as frames: one of msgpack, and one for each long array.

Imported by every process, mostly through `wire.py`. An array of at least `APART_BYTES` has a
separate frame, so that a process forwards a rollout without a copy: received arrays are views of
the network's buffers. Nothing is pickled. Limits of numbers are those of `limits.py`.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_rl.protocol.types import AnyMessage

APART_BYTES = 32 << 10
"""Minimum size of an array with a separate frame; for smaller ones a copy is cheaper."""
_ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "i": np.dtype("<i4"),
    "h": np.dtype("<i2"),
    "B": np.dtype("u1"),
    "f": np.dtype("<f4"),
}
_SHORT_CODES = {np.dtype(np.int16): "h", np.dtype(np.uint8): "B"}
"""Codes of integers that keep their size."""
_ALIGN = 8
"""Alignment of joined frames in bytes."""

Frame = bytes | memoryview


class WireError(RuntimeError):
    """A peer sent an invalid message, or a socket could not be used."""

    peer = ""
    """The sender, if known."""


def _code_of(array: np.ndarray) -> str | None:
    """The code of an array's dtype on the wire; None if it cannot be sent."""
    if array.ndim != 1:
        return None
    kind = str(array.dtype.kind)
    return _SHORT_CODES.get(array.dtype, kind if kind in "if" else None)


class _Encoding:
    """Encodes one message, and collects its separate array frames."""

    def __init__(self, least_bytes: float) -> None:
        self._least_bytes = least_bytes
        self.apart: list[memoryview] = []

    def encode_array(self, obj: Any) -> tuple[str, bytes | int]:
        """(code, bytes or number of the array frame)."""
        code = _code_of(obj) if isinstance(obj, np.ndarray) else None
        if code is None:
            raise NotImplementedError(f"cannot send {type(obj).__name__}: {obj!r:.80}")
        array = np.ascontiguousarray(obj, dtype=_ARRAY_DTYPES[code])
        if array.nbytes < self._least_bytes:
            return code, array.tobytes()
        self.apart.append(array.data.cast("B"))
        return code, len(self.apart)


def encode(message: Any) -> bytes:
    """A message in one frame. int16 and uint8 stay; other integers become int32, floats float32."""
    return msgspec.msgpack.encode(message, enc_hook=_Encoding(float("inf")).encode_array)


def encode_frames(message: Any) -> list[Frame]:
    """Frames of a message. Long arrays are not copied, so they must not change any more."""
    encoding = _Encoding(APART_BYTES)
    head = msgspec.msgpack.encode(message, enc_hook=encoding.encode_array)
    return [head, *encoding.apart]


class _Apart(threading.local):
    """The array frames of the message that this thread decodes."""

    frames: Sequence[Frame] = ()
    used = 0


_apart = _Apart()


def _decode_array(kind: type, obj: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"cannot receive {kind.__name__}")
    code, data = obj
    if isinstance(data, int):
        # In order, so that each frame belongs to one array.
        if data != _apart.used + 1 or data > len(_apart.frames):
            raise ValueError(f"an array names frame {data}, of {len(_apart.frames)} array frames")
        _apart.used, data = data, _apart.frames[data - 1]
    return np.frombuffer(data, dtype=_ARRAY_DTYPES[code])


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    # Creating a decoder costs more than decoding a small message.
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def decode(frame: Frame, kind: Any = AnyMessage) -> Any:
    """The message of one frame. Raises WireError."""
    return decode_frames([frame], kind)


def decode_frames(frames: Sequence[Frame], kind: Any = AnyMessage) -> Any:
    """The message of these frames; long arrays are views. Raises WireError."""
    head, *_apart.frames = frames
    _apart.used = 0
    try:
        message = _decoder(kind).decode(head)
        if _apart.used != len(_apart.frames):
            raise ValueError(
                f"{len(_apart.frames)} array frames came, and the message names {_apart.used}"
            )
        # Only some kinds of messages have limits that types do not say.
        find_fault = getattr(message, "find_fault", None)
        if find_fault is not None and (fault := find_fault()):
            raise ValueError(fault)
        return message
    # RecursionError: msgspec's answer to arrays in arrays in arrays.
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(
            f"received a frame of {len(head)} bytes that is no message: {error}"
        ) from error
    finally:
        _apart.frames = ()


def join_frames(frames: Sequence[Frame]) -> bytearray:
    """All frames in one buffer, for a broadcast."""
    return bytearray().join(joined_parts(frames))


def joined_parts(frames: Sequence[Frame]) -> list[Frame]:
    """The parts of the buffer of `join_frames`, without a copy."""
    sizes = np.array([len(frames), *map(len, frames)], np.int64)
    parts: list[Frame] = [sizes.tobytes()]
    for frame in frames:
        parts += [frame, bytes(-len(frame) % _ALIGN)]
    return parts


def split_frames(joined: bytearray) -> list[Frame]:
    """The frames of `join_frames`, as views."""
    sizes = np.frombuffer(joined, np.int64, 1 + int(np.frombuffer(joined, np.int64, 1)[0]))
    frames: list[Frame] = []
    begin = sizes.nbytes
    for size in map(int, sizes[1:]):
        frames.append(memoryview(joined)[begin : begin + size])
        begin += size + -size % _ALIGN
    return frames
