"""A message of an SFT example, in the form of OpenAI's and TRL's data. Pure.

No key of a message is ignored: a key that templates do not take, or that cannot be taught, is an
error where the line is read.
"""

from typing import Any, Literal

import msgspec

from megatron_rl.config.thinking import KNOWN_TAGS
from megatron_rl.protocol.call_forms import ToolCall
from megatron_rl.protocol.chat_template import Turn
from megatron_rl.protocol.prompt import ChatMessage, text_of_parts

ASSISTANT = "assistant"


class SftFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that a call names."""

    name: str
    arguments: dict[str, Any] | str
    """An object, or its JSON text."""

    def __post_init__(self) -> None:
        self.decoded()

    def decoded(self) -> dict[str, Any]:
        """The arguments as an object, which most templates expect. Raises ValueError."""
        if isinstance(self.arguments, dict):
            return self.arguments
        try:
            return msgspec.json.decode(self.arguments, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the arguments {self.arguments[:80]!r} of {self.name!r} are no JSON object: "
                f"{error}"
            ) from error


class SftCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool call."""

    function: SftFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """As answers that were streamed have it; the order of the list counts."""


class SftMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message."""

    role: str
    content: str | list[Any] | None = None
    """A list: parts of text. null: only with tool_calls."""
    tool_calls: list[SftCall] | None = None
    tool_call_id: str | None = None
    """On a tool's result: the call that it answers."""
    name: str | None = None
    reasoning_content: str | None = None
    """Thoughts of the assistant."""
    thinking: str | None = None
    """Another name for reasoning_content."""
    weight: float | None = None
    """0: the message is not taught."""
    function_call: None = None
    """Older form of tool_calls; answers of OpenAI's API have this key and the next two as null."""
    refusal: None = None
    audio: None = None

    def __post_init__(self) -> None:
        if self.role != ASSISTANT:
            for key in ("tool_calls", "reasoning_content", "thinking", "weight"):
                if getattr(self, key) is not None:
                    raise ValueError(f"`{key}` is allowed only where the role is {ASSISTANT!r}")
        if self.content is None and not self.tool_calls:
            raise ValueError("`content` is missing; it may be null only with `tool_calls`")
        if isinstance(self.content, list):
            text_of_parts(self.content)
        if self.weight not in (None, 0, 1):
            raise ValueError(f"`weight` is {self.weight:g}; allowed are 0 (not taught) and 1")
        if self.reasoning_content and self.thinking:
            raise ValueError("`reasoning_content` and `thinking` are both given: keep one")
        if self.thoughts and any(self.text.lstrip().startswith(one.open) for one in KNOWN_TAGS):
            raise ValueError(
                "thoughts are given twice, apart and between think tags in `content`: keep one"
            )

    @property
    def text(self) -> str:
        """The content; "" where it is null."""
        content = self.content or ""
        return content if isinstance(content, str) else text_of_parts(content)

    @property
    def thoughts(self) -> str:
        """Thoughts given apart from the content."""
        return self.reasoning_content or self.thinking or ""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, with arguments as objects."""
        return [
            ToolCall(call.function.name, call.function.decoded(), call.id or "")
            for call in self.tool_calls or ()
        ]

    @property
    def is_taught(self) -> bool:
        """Whether its tokens carry loss."""
        return self.role == ASSISTANT and self.weight != 0

    @property
    def is_empty(self) -> bool:
        """Whether a message of the assistant says nothing at all."""
        return not (self.tool_calls or self.text.strip() or self.thoughts.strip())

    @property
    def plain(self) -> ChatMessage:
        """Role and text alone."""
        return ChatMessage(self.role, self.text)

    @property
    def keys_beside_text(self) -> list[str]:
        """Keys beside role and content that have a value."""
        own = self.__struct_fields__[2:]
        return [key for key in own if getattr(self, key) not in (None, [], "")]

    def turn(self) -> Turn:
        """The message of a user, a system or a tool for the chat template."""
        ids = {"tool_call_id": self.tool_call_id, "name": self.name}
        return {
            "role": self.role,
            "content": self.text,
            **{key: value for key, value in ids.items() if value is not None},
        }


ALLOWED_KEYS = ", ".join(SftMessage.__struct_fields__[:8])
