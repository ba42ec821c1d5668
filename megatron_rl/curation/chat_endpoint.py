"""Sends one request to a server of OpenAI's chat completions, such as SGLang or vLLM.

Used by `data translate --endpoint`. The server is not trusted: the length of a response is bounded,
and each kind of failure has a name.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import without_thoughts
from megatron_rl.curation.tool import check_at_least

MAX_BODY_BYTES = 4 << 20
"""Longer responses are refused unread."""
_CHUNK_BYTES = 1 << 16
_BUSY = (408, 409, 425, 429)
"""Statuses after which a later try may succeed, as after 500 and above."""
_SHOWN_NAMES = 8


@dataclass(frozen=True)
class Endpoint:
    """A served model, and the limits of a request."""

    url: str
    """Up to and including /v1."""
    model: str
    """The server's name of the model."""
    timeout_s: float = 120.0
    """Per request."""
    max_tokens: int = 4096
    """Per response, thoughts included."""
    key: str = ""
    """Sent as a bearer token; empty: none."""

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise InputError(
                f"--endpoint {self.url}: expected an address such as http://127.0.0.1:30000/v1"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise InputError(f"--timeout-s {self.timeout_s:g}: expected seconds above 0")
        check_at_least("--max-tokens", self.max_tokens, 1)

    def address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"


class Answer(NamedTuple):
    """The text of a response, or its failure."""

    text: str = ""
    failure: str = ""
    """Empty for a text."""
    is_server_fault: bool = False
    """The server is away, busy or broken."""
    is_final: bool = False
    """The same request would fail again."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _TooLong(Exception):
    """A response of more than MAX_BODY_BYTES."""


def open_session(endpoint: Endpoint, connections: int) -> aiohttp.ClientSession:
    """A session of at most `connections`; use and close it in a running loop."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {},
        timeout=aiohttp.ClientTimeout(total=endpoint.timeout_s),
        connector=aiohttp.TCPConnector(limit=connections),
    )


async def check_served(session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
    """Raise InputError unless the server serves the model."""
    address = endpoint.address("models")
    try:
        async with session.get(address, allow_redirects=False) as response:
            status, body = response.status, await _read(response)
        names = [model.id for model in msgspec.json.decode(body, type=_Models).data]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise InputError(
            f"--endpoint {endpoint.url}: nothing answers at {address}: "
            f"{type(error).__name__}: {error}"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, _TooLong) as error:
        raise InputError(
            f"--endpoint {endpoint.url}: {address} answers {status} and no list of models: is the "
            "address that of an OpenAI-compatible server, with /v1 at its end?"
        ) from error
    if endpoint.model not in names:
        shown = ", ".join(names[:_SHOWN_NAMES]) or "none"
        raise InputError(f"--served-model {endpoint.model}: {endpoint.url} serves {shown}")


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    messages: list[dict[str, str]],
    *,
    temperature: float,
) -> Answer:
    """The first choice's text without its thoughts, or the failure."""
    body = {
        "model": endpoint.model,
        "messages": messages,
        "temperature": temperature,
        "max_tokens": endpoint.max_tokens,
        "stream": False,
    }
    address = endpoint.address("chat/completions")
    try:
        async with session.post(address, json=body, allow_redirects=False) as response:
            status = response.status
            if status != 200:
                is_later = status >= 500 or status in _BUSY
                return Answer("", f"status_{status}", is_server_fault=is_later,
                              is_final=not is_later)  # fmt: skip
            content = await _read(response)
    except TimeoutError:
        return Answer(failure="timeout", is_server_fault=True)
    except _TooLong:
        return Answer(failure="answer_too_long")
    except (aiohttp.ClientError, OSError):
        return Answer(failure="connection_lost", is_server_fault=True)
    return _of_body(content)


def _of_body(content: bytes) -> Answer:
    try:
        choices = msgspec.json.decode(content, type=_Completion).choices
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Answer(failure="malformed")
    if not choices or not choices[0].message.content:
        return Answer(failure="empty")
    if choices[0].finish_reason == "length":
        return Answer(failure="cut_at_limit")
    text = without_thoughts(choices[0].message.content)
    return Answer(text.strip()) if text.strip() else Answer(failure="empty")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _TooLong
    return bytes(body)
