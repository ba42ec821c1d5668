"""Requests for completions, as a generator and its engine's process exchange them.

Shared by `generation/sglang_direct.py` and, inside SGLang's scheduler, `direct_requests.py` of
`backend/cpu/sglang`; vLLM's process uses them too. They travel over a Unix socket in a folder that
only this user can enter, in length-prefixed msgpack: typed, nothing is pickled.
"""

import struct
from typing import Any

import msgspec

SOCKET_VARIABLE = "MEGATRON_RL_REQUESTS"
"""Variable of the server's environment: path of the generator's socket; none: HTTP alone."""
NAME_PREFIX = "mrl-"
"""Begins every name of ours, and no name of SGLang's own."""
FIRST_SUFFIX = "-0."
"""Ends the name of the first completion of a request, and no other's."""
_LENGTH = struct.Struct("<I")


class Generate(msgspec.Struct, frozen=True, tag="Generate"):
    """Generator -> scheduler: generate a completion for each name."""

    names: list[str]
    """None of them is the beginning of another: SGLang aborts by beginnings."""
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """0: all tokens."""
    min_p: float
    stop: list[str]
    """Strings that end a completion."""
    stop_ids: list[int]
    extra_key: str
    """Requests with different ones share no prefix."""
    returns_expert_choices: bool


class Abort(msgspec.Struct, frozen=True, tag="Abort"):
    """Generator -> scheduler: stop these completions. No answer."""

    names: list[str]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler -> generator, many at once: a completion has ended."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    """(version, first token, token after the last) in order."""
    finish: str
    """"stop", "length", or "abort"."""
    message: str
    """Why it was aborted."""
    cached_tokens: int
    """Tokens of the prompt whose keys and values were there before."""
    expert_choices: bytes = b""
    """As in Completion."""
    first_token_at: float = -1.0
    """As in Completion: both processes run on one node."""


_encoder = msgspec.msgpack.Encoder()
order_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Generate | Abort)
ended_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[Ended])


def names_of(number: int, count: int) -> list[str]:
    """Names of the completions of request `number`."""
    return [f"{NAME_PREFIX}{number}-{place}." for place in range(count)]


def pack(message: msgspec.Struct | list[Ended]) -> bytes:
    """Frame of a message, with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
    """All complete messages at the front of a buffer, which loses them.

    Raises msgspec.DecodeError for what is none.
    """
    messages = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(buffer, start)
        end = start + _LENGTH.size + size
        if len(buffer) < end:
            break
        messages.append(decoder.decode(bytes(buffer[start + _LENGTH.size : end])))
        start = end
    del buffer[:start]
    return messages
