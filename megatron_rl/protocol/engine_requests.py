"""Requests for completions between a generator and its engine's process.

Used by `generation/sglang_direct.py`, `direct_requests.py` of `backend/cpu/sglang` inside SGLang's
scheduler, and vLLM's process. They travel as length-prefixed msgpack (nothing is pickled) over a
Unix socket in a folder that only this user can enter.
"""

import struct
from typing import Annotated, Any

import msgspec

from megatron_rl.protocol.limits import Count, Finite, Id, Name

SOCKET_VARIABLE = "MEGATRON_RL_REQUESTS"
"""Environment variable of the server: path of the generator's socket; if unset, only HTTP."""
DETERMINISTIC_VARIABLE = "MEGATRON_RL_DETERMINISTIC"
"""Environment variable of SGLang's server on the CPU: if set, a completion with a seed has the same
tokens and logprobs whatever else runs."""
NAME_PREFIX = "mrl-"
"""Prefix of our request names; SGLang's own names lack it."""
TURN_PREFIX = f"{NAME_PREFIX}turn-"
"""Prefix of those whose reply another request will continue."""
FIRST_SUFFIX = "-0."
"""Suffix of the name of the first completion of a request."""
_LENGTH = struct.Struct("<I")
MOST_BYTES = 1 << 30
"""Of a message; a longer one is not waited for."""


class Generate(msgspec.Struct, frozen=True, tag="Generate"):
    """Generator -> scheduler: generate a completion for each name."""

    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    """At least one. No name is a prefix of another, because SGLang aborts by prefix."""
    prompt_ids: list[Count]
    max_new_tokens: Count
    temperature: float
    top_p: float
    top_k: int
    """0: all tokens."""
    min_p: float
    stop: list[str]
    """Strings that end a completion."""
    stop_ids: list[int]
    extra_key: str
    """Requests with different keys share no cached prefix."""
    returns_expert_choices: bool
    choices_from: Count
    """As in Sampling."""
    seeds: list[Id] = []
    """Seed of each name, to draw its tokens; []: all draw from one stream."""
    is_turn: bool = False
    """As in Sampling."""


class Abort(msgspec.Struct, frozen=True, tag="Abort"):
    """Generator -> scheduler: stop these completions. No answer."""

    names: list[str]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler -> generator, in lists: a completion has ended."""

    name: str
    token_ids: list[Count]
    logprobs: list[float]
    spans: list[tuple[Name, Count, Count]]
    """(version, first token, token after the last) in order."""
    finish: str
    """"stop", "length", or "abort"."""
    message: str
    """The reason of an abort."""
    cached_tokens: Count
    """Prompt tokens whose keys and values were cached."""
    expert_choices: bytes = b""
    """As in Completion."""
    first_token_at: Finite = -1.0
    """As in Completion; both processes run on one node."""


_encoder = msgspec.msgpack.Encoder()
order_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Generate | Abort)
ended_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[Ended])


def names_of(number: int, count: int, *, is_turn: bool = False) -> list[str]:
    """Names of the completions of request `number`."""
    prefix = TURN_PREFIX if is_turn else NAME_PREFIX
    return [f"{prefix}{number}-{place}." for place in range(count)]


def pack(message: msgspec.Struct | list[Ended]) -> bytes:
    """A message with its length as prefix."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
    """Remove and return all complete messages of a buffer. Raises msgspec.DecodeError."""
    messages = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(buffer, start)
        if size > MOST_BYTES:
            raise msgspec.DecodeError(f"a message of {size} bytes begins; allowed: {MOST_BYTES}")
        end = start + _LENGTH.size + size
        if len(buffer) < end:
            break
        try:
            messages.append(decoder.decode(bytes(buffer[start + _LENGTH.size : end])))
        # msgspec raises other errors for texts that are no UTF-8, and arrays in arrays in arrays.
        except (ValueError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error
        start = end
    del buffer[:start]
    return messages
