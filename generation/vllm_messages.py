"""Messages between a generator and its vLLM process.

Shared by `vllm_engine.py` and, under vLLM's own interpreter, `vllm_server.py`; needs neither torch
nor vLLM. Over a Unix socket in a folder that only this user can enter, in length-prefixed msgpack:
typed, nothing is pickled. Requests and completions are those of `protocol/engine_requests.py`.
"""

from typing import Any

import msgspec

from megatron_rl.protocol.engine_requests import Abort, Ended, Generate
from megatron_rl.protocol.types import LeaveGroup, Receive, Resume


class Job(msgspec.Struct, frozen=True):
    """Settings of a vLLM process; JSON in a file next to the socket."""

    model: str
    dtype: str
    stop_ids: list[int]
    max_running: int
    kv_tokens: int
    context_tokens: int
    seed: int
    version: int
    socket: str


class PauseNow(msgspec.Struct, frozen=True, tag="PauseNow"):
    """Generator -> vLLM: stop between two tokens."""

    recomputes: bool
    """Drop the KV cache of running requests, and the prefix cache."""


Order = PauseNow | Receive | Resume | LeaveGroup


class Ask(msgspec.Struct, frozen=True, tag="Ask"):
    """Generator -> vLLM: obey, then answer."""

    number: int
    order: Order


class Answer(msgspec.Struct, frozen=True, tag="Answer"):
    """vLLM -> generator: the order of this number was obeyed, or why not."""

    number: int
    error: str


class Ends(msgspec.Struct, frozen=True, tag="Ends"):
    """vLLM -> generator: these completions have ended."""

    completions: list[Ended]


READY = 0
"""Number of the answer after loading the model; orders count from 1."""
asked_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Generate | Abort | Ask)
told_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ends | Answer)
