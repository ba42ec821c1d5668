"""Requests and answers of `/v1/chat/completions`, as OpenAI's API has them. Pure.

Used by the generator's proxy (`proxy.py`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from megatron_rl.protocol.call_forms import CallForm, ToolCall
from megatron_rl.protocol.chat_template import RenderError, Tool, Turn
from megatron_rl.protocol.tool_calls import MAX_DEPTH, nested_beyond

MAX_MESSAGES = 2048
MAX_TOOLS = 256
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "reasoning_effort", "verbosity",
)  # fmt: skip
"""Fields that the run's own sampling replaces."""
_HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction",
)  # fmt: skip
_ONLY: dict[str, tuple[Any, str]] = {
    "n": (1, "send several requests"),
    "logprobs": (False, "logprobs stay with the run"),
    "top_logprobs": (0, "logprobs stay with the run"),
    "logit_bias": ({}, "the run's sampling decides"),
    "response_format": ({"type": "text"}, "describe the form in a message, and check the reply"),
    "tool_choice": ("auto", 'give "none", or offer only the tools that may be called'),
    "modalities": (["text"], "the policy writes text"),
    "functions": ([], "use tools"),
}
"""Fields whose other values cannot be honoured: (the value that can be, what to do instead)."""


class ApiError(Exception):
    """A refusal, as the API words it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        values = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": values}


class Message(NamedTuple):
    """A message of a history."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """Of a tool's result."""
    name: str = ""

    def key(self, before: bytes) -> bytes:
        """Key of a history that ends with this message. before: of the history before it.

        Assistants count by their text and calls alone: programs copy little else.
        """
        calls = [(call.name, call.arguments) for call in self.calls]
        values: list[Any] = [self.role, self.content, calls]
        if self.role != "assistant":
            values += [self.call_id, self.name]
        return _digest(before, values)

    def turn(self, form: CallForm | None) -> Turn:
        """The message for the chat template. Raises RenderError if it cannot write the calls."""
        if self.calls:
            if form is None:
                raise RenderError("the chat template writes no tool calls of an assistant")
            return form.turn(self.calls, self.content)
        more = {"tool_call_id": self.call_id, "name": self.name}
        return {"role": self.role, "content": self.content} | {k: v for k, v in more.items() if v}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request."""

    messages: list[Message]
    tools: list[Tool]
    max_tokens: int | None
    model: str
    is_streamed: bool
    has_usage_chunk: bool
    max_calls: int | None
    """Tool calls of the reply; 0 for tool_choice "none": a call is text then."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the request that the run's sampling replaces."""

    @property
    def replied(self) -> int:
        """Number of messages up to the last reply in the history."""
        return max(
            (n for n, one in enumerate(self.messages, 1) if one.role == "assistant"), default=0
        )

    @cached_property
    def keys(self) -> list[bytes]:
        """Keys of the histories of 0, 1, 2 ... messages, with these tools."""
        first = _digest(b"", self.tools)
        return list(accumulate(self.messages, lambda key, one: one.key(key), initial=first))


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True).encode()).digest()


class _Part(Struct):
    type: Literal["text"]
    text: str


class _CalledFunction(Struct):
    name: str
    arguments: str


class _Call(Struct):
    function: _CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Parameters(Struct):
    properties: dict[str, Any] = {}
    required: list[str] = []


class _Function(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: _Parameters | None = None


class _Tool(Struct):
    function: _Function
    type: Literal["function"]


class _StreamOptions(Struct):
    include_usage: bool | None = None


_Count = Annotated[int, Meta(ge=1)] | None


class _Body(Struct):
    """The fields that are read."""

    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str = ""
    tools: Annotated[list[_Tool], Meta(max_length=MAX_TOOLS)] | None = None
    max_tokens: _Count = None
    max_completion_tokens: _Count = None
    parallel_tool_calls: bool | None = None
    tool_choice: Any = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_FIELDS = {*_Body.__struct_fields__, *SAMPLING, *_HARMLESS, *_ONLY}


def read_request(body: bytes, stop: Sequence[str]) -> ChatRequest:
    """The request of a body. stop: the run's strings that end a reply. Raises ApiError."""
    try:
        fields = msgspec.json.decode(body)
        found = msgspec.convert(fields, _Body)
        if nested_beyond(fields, MAX_DEPTH):
            raise ApiError(400, f"the request is nested over {MAX_DEPTH} levels")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request cannot be read: {error}"[:500]) from error
    given = {name: value for name, value in fields.items() if value is not None}
    _check_fields(given)
    asked = [found.stop] if isinstance(found.stop, str) else found.stop or []
    if set(asked) - set(stop):
        raise ApiError(
            400,
            f"stop: the run's sampling decides, whose strings are {list(stop)}: set sampling.stop",
            param="stop",
        )
    one_call = 1 if found.parallel_tool_calls is False else None
    return ChatRequest(
        messages=list(_read_messages(found.messages)),
        tools=given.get("tools", []),
        max_tokens=found.max_completion_tokens or found.max_tokens,
        model=found.model,
        is_streamed=bool(found.stream),
        has_usage_chunk=bool(found.stream_options and found.stream_options.include_usage),
        max_calls=0 if found.tool_choice == "none" else one_call,
        ignored=[name for name in SAMPLING if name in given],
    )


def _check_fields(given: Mapping[str, Any]) -> None:
    """Refuse fields that cannot be honoured. Raises ApiError."""
    for name, value in given.items():
        if name not in _FIELDS:
            raise ApiError(400, f"{name[:64]}: no such field is known here", param=name[:64])
        if name == "tool_choice" and (value == "none" or not given.get("tools")):
            continue
        if name in _ONLY and value != _ONLY[name][0]:
            only, instead = _ONLY[name]
            text = f"{name}: only {json.dumps(only)} can be honoured: {instead}"
            raise ApiError(400, text, param=name)


def _read_messages(messages: list[_Message]) -> Iterator[Message]:
    names: dict[str, str] = {}
    """Called tools by the ids of their calls."""
    for place, one in enumerate(messages):
        where = f"messages.{place}"
        content = one.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        if content is None and one.role != "assistant":
            raise ApiError(400, f"{where}: the content is missing", param=where)
        calls = tuple(_read_call(call, where) for call in one.tool_calls or ())
        if calls and one.role != "assistant":
            raise ApiError(400, f"{where}: only an assistant has tool_calls", param=where)
        names |= {call.id: call.name for call in calls}
        role = "system" if one.role == "developer" else one.role
        name = one.name or ""
        call_id = one.tool_call_id or ""
        if role == "tool":
            name = names.get(call_id, name)
        yield Message(role, content or "", calls, call_id, name)


def _read_call(call: _Call, where: str) -> ToolCall:
    try:
        # As tool calls are read: msgspec takes other numbers.
        arguments = json.loads(call.function.arguments or "{}", strict=False)
    except (ValueError, RecursionError) as error:
        text = f"{where}: the arguments of {call.function.name!r} are no JSON: {error}"
        raise ApiError(400, text[:500], param=where) from error
    if not isinstance(arguments, dict) or nested_beyond(arguments, MAX_DEPTH):
        text = f"{where}: the arguments of {call.function.name!r} are no JSON object of few levels"
        raise ApiError(400, text[:500], param=where)
    return ToolCall(call.function.name, arguments, call.id)


class Answer(NamedTuple):
    """A reply of the policy, for the API."""

    message: Message
    reasoning: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    id: str
    model: str
    created: int
    """Unix seconds: an answer that is sent again is the same."""

    @property
    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.message.content or None}
        if not self.message.calls:
            message["content"] = self.message.content
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.message.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    # In ASCII: a model can escape halves of characters, which are no UTF-8.
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in self.message.calls
            ]
        return message

    @property
    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _shell(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}

    def body(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choice = {
            "index": 0, "message": self._message, "logprobs": None,
            "finish_reason": self.finish_reason,
        }  # fmt: skip
        return self._shell("chat.completion", [choice], usage=self._usage)

    def events(self, *, has_usage_chunk: bool) -> bytes:
        """The answer to a streamed request: the whole reply, and its end."""
        delta = self._message
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        kind = "chat.completion.chunk"
        chunks = [
            self._shell(kind, [{"index": 0, "delta": delta, "finish_reason": None}]),
            self._shell(kind, [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]),
        ]
        if has_usage_chunk:
            chunks.append(self._shell(kind, [], usage=self._usage))
        lines = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
        return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()
