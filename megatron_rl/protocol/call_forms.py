"""Forms in which models write tool calls: how a chat template takes calls, and two forms of JSON.

`learned_calls.py` finds the form of a template; `tool_calls.py` reads replies with it.
"""

import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from megatron_rl.protocol.chat_template import ChatTemplate, RenderError, Tool, Turn
from megatron_rl.protocol.types import escaped

QUESTION: Turn = {"role": "user", "content": "probe-question"}
SHOWN_CHARACTERS = 80
_BLANKS = re.compile(r"\s*")
_RECEIVER = re.compile(r"(?P<name>[\w.-]+)[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>")
_CHANNEL_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_NAMED = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]")


class ToolCall(NamedTuple):
    """A call that a model made."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """As the model wrote it, for templates that repeat it with the result; "": it wrote none."""


class CallForm(NamedTuple):
    """How a template takes a message with calls."""

    takes_text: bool
    """It takes the arguments as JSON text, not as an object."""
    content: str | None
    """What it takes as the content of a message that only calls."""

    def turn(self, calls: Sequence[ToolCall], content: str = "") -> Turn:
        """The message of an assistant that makes these calls."""
        made = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False)
                    if self.takes_text
                    else call.arguments,
                },
            }
            for call in calls
        ]
        return {"role": "assistant", "content": content or self.content, "tool_calls": made}


PROBE = ToolCall("probe_call", {"probe_key": "probe-value"}, "probe0123")
"""Mistral's templates want ids of nine characters."""
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}


def find_call_form(template: ChatTemplate) -> CallForm | None:
    """How the template takes calls; None: it writes none."""
    for takes_text, content in product((False, True), ("", None)):
        form = CallForm(takes_text, content)
        turns = [QUESTION, form.turn([PROBE])]
        try:
            text = template.render(turns, opens_answer=False, tools=[PROBE_TOOL])
        except RenderError:
            continue
        if PROBE.arguments["probe_key"] in text:
            return form
    return None


class MalformedCall(ValueError):
    """A call that cannot be read."""


class WrittenCall(NamedTuple):
    """A call as it stands in a text, unchecked."""

    name: Any
    arguments: Any
    id: Any = ""


class JsonForm(NamedTuple):
    """A JSON object for each call, or a JSON list of them, between two texts."""

    opening: str
    """ "": the whole reply is the call, but for thoughts before it."""
    closing: str
    arguments: str = "arguments"
    """The key of the arguments, beside "name"."""
    is_list: bool = False

    @property
    def starts(self) -> re.Pattern[str]:
        """Finds where a call begins; an empty text before a closing text without its opening."""
        if not self.opening:
            return re.compile(r'\s*(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:)')
        stray = f"|(?={re.escape(self.closing)})" if self.closing else ""
        return re.compile(re.escape(self.opening) + stray)

    def read(self, text: str, place: int) -> tuple[list[WrittenCall], int]:
        """(calls, place behind them) at a place behind an opening. Raises MalformedCall."""
        value, end = read_json(text, place)
        if not text.startswith(self.closing, end) or not (self.opening or end == len(text)):
            behind = f"by {self.closing}" if self.closing else "by nothing"
            raise MalformedCall(f"the JSON of a call must be followed {behind}")
        if self.is_list != isinstance(value, list) or value == []:
            raise MalformedCall(
                f"{self.opening} takes a JSON {'list' if self.is_list else 'object'}"
            )
        return [self._take(one) for one in (value if self.is_list else [value])], end + len(
            self.closing
        )

    def _take(self, value: Any) -> WrittenCall:
        keys = {"name", self.arguments}
        if not isinstance(value, dict) or not keys <= value.keys() <= keys | {"id"}:
            raise MalformedCall(f'a call is {{"name": …, "{self.arguments}": {{…}}}}')
        return WrittenCall(value["name"], value[self.arguments], value.get("id", ""))


class ArgsForm(NamedTuple):
    """[TOOL_CALLS]name[ARGS]{…}, for each call; [CALL_ID]id may follow the name."""

    opening: str = "[TOOL_CALLS]"
    closing: str = ""

    @property
    def starts(self) -> re.Pattern[str]:
        """Finds where a call begins."""
        return re.compile(re.escape(self.opening))

    def read(self, text: str, place: int) -> tuple[list[WrittenCall], int]:
        """(calls, place behind them) at a place behind an opening. Raises MalformedCall."""
        found = _NAMED.match(text, place)
        if not found:
            raise MalformedCall(f"name[ARGS]{{…}} must follow {self.opening}")
        value, end = read_json(text, found.end())
        return [WrittenCall(found["name"], value, found["id"] or "")], end


class ChannelForm(NamedTuple):
    """gpt-oss': a message to=functions.NAME, whose text is JSON and which ends the reply."""

    opening: str = " to="
    closing: str = "<|call|>"

    @property
    def starts(self) -> re.Pattern[str]:
        """Finds the receiver of a message in its header."""
        return re.compile(r" to=(?:functions\.)?")

    def read(self, text: str, place: int) -> tuple[list[WrittenCall], int]:
        """([call], place behind it) at a place behind "to=". Raises MalformedCall."""
        found = _RECEIVER.match(text, place)
        if not found:
            raise MalformedCall("<|message|> must follow the name of a call")
        value, end = read_json(text, found.end())
        if text[end:].strip() not in ("", self.closing):
            raise MalformedCall("the JSON of a call must be followed by nothing")
        return [WrittenCall(found["name"], value)], len(text)


class ChannelMessage(NamedTuple):
    """A message of a reply in channels."""

    header: str
    """Its channel, and its receiver if it is a call."""
    body: str


def channel_messages(reply: str) -> list[ChannelMessage]:
    """The messages of a reply behind <|start|>assistant, without what ends them."""
    found = []
    for text in reply.split("<|start|>assistant"):
        header, start, body = text.partition("<|message|>")
        if not start:
            is_header = text.lstrip().startswith(("<|channel|>", "to="))
            header, body = (text, "") if is_header else ("", text)
        found.append(ChannelMessage(header, _CHANNEL_ENDS.sub("", body)))
    return found


def read_json(text: str, place: int) -> tuple[Any, int]:
    """(JSON value, place behind it and behind blanks). Raises MalformedCall."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_blanks(text, place))
    except (ValueError, RecursionError) as error:
        # It may quote a key with half of a surrogate pair, which the model could not be told.
        text = escaped(f"the call is no JSON: {error}")
        raise MalformedCall(text[: 2 * SHOWN_CHARACTERS]) from error
    return value, _skip_blanks(text, end)


def _skip_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else place


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is given twice in {', '.join(key for key, _ in pairs)}")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_repeats, parse_constant=_refuse_constant, strict=False
)
"""Takes line breaks within texts, as models write them."""
