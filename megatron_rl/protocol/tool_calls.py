"""Tool calls as a model's chat template writes them: written, and read from a reply's text.

Training and evaluation read calls with the same parser. No call is dropped in silence: what cannot
be read or is not offered becomes a fault, a text that the model gets as the result of its call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.call_forms import (
    PROBE_TOOL,
    QUESTION,
    SHOWN_CHARACTERS,
    ChannelForm,
    JsonForm,
    MalformedCall,
    ToolCall,
    WrittenCall,
    channel_messages,
    find_call_form,
    read_json,
)
from megatron_rl.protocol.chat_template import RenderError, Tool, Turn
from megatron_rl.protocol.learned_calls import Form, TaggedForm, find_form
from megatron_rl.protocol.render import Renderer

MAX_DEPTH = 64
"""Levels of a call's arguments; deeper ones exhaust the stack of what renders them."""

MAX_CALLS = 64
"""Calls and faults of a reply; a call that nothing closes is looked for in all that follows."""


class ParsedReply(NamedTuple):
    """What a reply's text consists of."""

    reasoning: str
    content: str
    calls: list[ToolCall]
    faults: list[str]
    """Why further calls cannot be made, for the model to read."""
    attempted: tuple[ToolCall, ...] = ()
    """Those calls, without arguments, where results name the call that they answer."""


HERMES = JsonForm("<tool_call>", "</tool_call>")


def describe_tools(tools: Sequence[Tool]) -> str:
    """Text for a system message, where the chat template writes no tools itself."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        (
            "You can call these functions, which are given as JSON, one a line:",
            *lines,
            "To call one, write its name and its arguments in this form, once for each call:",
            f'{HERMES.opening}{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}'
            f"{HERMES.closing}",
        )
    )


def with_tools(messages: list[Turn], tools: list[dict[str, Any]]) -> list[Turn]:
    """The messages, whose system message describes the tools for a template that writes none."""
    described = describe_tools(tools)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]


class ToolCallParser:
    """Reads the calls of replies in the form that the model's chat template writes."""

    def __init__(self, renderer: Renderer) -> None:
        """Raises InputError if the template fails with a tool offered."""
        self._tags = renderer.tags
        try:
            prompt = renderer.template.render([QUESTION], tools=[PROBE_TOOL])
        except RenderError as error:
            raise InputError(
                f"model.path={renderer.model}: with a tool offered, {error}"
            ) from error
        self.is_opened = self._tags is not None and self._tags.is_opened_by(prompt)
        """The prompt opens the thoughts."""
        self.form: Form = HERMES
        self.note = (
            "note: the chat template writes no tool calls, so they are read as "
            '<tool_call>{"name": …, "arguments": {…}}</tool_call>; a system message says so'
        )
        """A line to show; "": calls are read as the template writes them."""
        self.refusal = ""
        """Why no calls can be read: the template writes them in a form that is not known."""
        if form := find_call_form(renderer.template):
            try:
                self.form, self.note = find_form(renderer, form, prompt), ""
            except InputError as error:
                self.refusal, self.note = str(error), f"note: no tools can be offered: {error}"
        self._starts = self.form.starts

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedReply:
        """A reply's parts; calls within thoughts are none.

        text: as `Renderer.decode` gives it. tools: those that were offered; without any, text in
        the form of a call is content. Raises RenderError if calls cannot be read.
        """
        if tools and self.refusal:
            raise RenderError(self.refusal)
        if isinstance(self.form, ChannelForm):
            return self._parse_channels(text, tools)
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        faults: list[str] = []
        place = self._take_thought(text, 0, thoughts) if self.is_opened else 0
        call: re.Match[str] | None = None
        may_follow, is_blank = bool(tools), True
        while place < len(text):
            thought = text.find(self._tags.open, place) if self._tags else -1
            # Not once a thought: the time for many thoughts would grow with their square.
            if may_follow and (call is None or call.start() < place):
                call = self._next_call(text, place, is_blank=is_blank)
                may_follow = call is not None or not self.form.opening
            if thought >= 0 and not (call and call.start() < thought):
                content.append(text[place:thought])
                is_blank = is_blank and not content[-1].strip()
                place = self._take_thought(text, thought, thoughts)
                continue
            content.append(text[place : call.start() if call else len(text)])
            is_blank = is_blank and not content[-1].strip()
            if not call or _are_too_many(calls, faults):
                break
            place = self._take_call(text, call.end(), tools, calls, faults)
        return ParsedReply("\n".join(thoughts), "".join(content).strip(), calls, faults)

    def _next_call(self, text: str, place: int, *, is_blank: bool) -> re.Match[str] | None:
        """Where the next call begins; without an opening, the call is all that is not a thought.

        is_blank: nothing but thoughts was said before.
        """
        if self.form.opening:
            return self._starts.search(text, place)
        return self._starts.match(text, place) if is_blank else None

    def _parse_channels(self, text: str, tools: Sequence[Tool]) -> ParsedReply:
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        faults: list[str] = []
        attempted: list[ToolCall] = []
        for header, body in channel_messages(text):
            call = self._starts.search(header) if tools else None
            if not call:
                (thoughts if "analysis" in header else content).append(body.strip())
                continue
            if _are_too_many(calls, faults):
                break
            before = len(calls)
            self._take_call(f"{header}<|message|>{body}", call.end(), tools, calls, faults)
            if len(calls) == before:
                name = re.match(r"[\w.-]*", header[call.end() :])
                attempted.append(ToolCall((name and name[0]) or "unknown", {}))
        said = "\n".join(filter(None, content))
        return ParsedReply("\n".join(thoughts), said, calls, faults, tuple(attempted))

    def _take_call(
        self, text: str, place: int, tools: Sequence[Tool], calls: list[ToolCall],
        faults: list[str],
    ) -> int:  # fmt: skip
        """Add the call behind an opening, or why it cannot be made; returns the place behind it."""
        try:
            written, end = self.form.read(text, place)
        except MalformedCall as error:
            faults.append(str(error))
            return self._find_next(text, place)
        if isinstance(self.form, TaggedForm) and self.form.behind_key:
            written = [_typed(one, tools) for one in written]
        for one in written:
            # One list or section may hold any number.
            if _are_too_many(calls, faults):
                return len(text)
            fault = _find_fault(one, calls, tools)
            if fault:
                faults.append(fault)
            else:
                calls.append(ToolCall(one.name, one.arguments, one.id))
        return end

    def _find_next(self, text: str, place: int) -> int:
        """The place behind a call that cannot be read."""
        closing, opening = self.form.closing, self.form.opening
        end = (
            text.find(closing, place) + len(closing) if closing and closing in text[place:] else -1
        )
        following = text.find(opening, place) if opening else -1
        return min((one for one in (end, following) if one >= 0), default=len(text))

    def _take_thought(self, text: str, place: int, thoughts: list[str]) -> int:
        """Take a thought that begins here; returns the place behind it, at the end if unclosed."""
        assert self._tags is not None
        begin = place + len(self._tags.open) if text.startswith(self._tags.open, place) else place
        end = text.find(self._tags.close, begin)
        thoughts.append(text[begin : end if end >= 0 else len(text)].strip())
        return end + len(self._tags.close) if end >= 0 else len(text)


def _are_too_many(calls: Sequence[ToolCall], faults: list[str]) -> bool:
    """Whether a reply may have no further call; then a fault says so."""
    if len(calls) + len(faults) < MAX_CALLS:
        return False
    faults.append(f"over {MAX_CALLS} calls in one reply: the others are not made")
    return True


def _schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def _typed(call: WrittenCall, tools: Sequence[Tool]) -> WrittenCall:
    """The call with the arguments that its texts stand for, by the tool's schema.

    A text that does not parse as its type stays a text, and the tool refuses it.
    """
    properties = _schemas(tools).get(call.name, {}).get("properties") or {}
    typed = {key: _value_of(text, properties.get(key)) for key, text in call.arguments.items()}
    return call._replace(arguments=typed)


def _value_of(text: str, schema: Any) -> Any:
    options = [schema, *schema.get("anyOf", ())] if isinstance(schema, dict) else []
    kinds = [one.get("type") for one in options if isinstance(one, dict)]
    if any(kind == "string" or isinstance(kind, list) and "string" in kind for kind in kinds):
        return text
    # Some templates write values as Python does.
    text_of_json = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value, end = read_json(text_of_json, 0)
    except MalformedCall:
        return text
    return value if end == len(text_of_json) else text


def _find_fault(call: WrittenCall, earlier: Sequence[ToolCall], tools: Sequence[Tool]) -> str:
    """Why a call cannot be made; "": it can."""
    if nested_beyond(list(call), MAX_DEPTH + 1):
        return f"a call is nested over {MAX_DEPTH} levels"
    offered = _schemas(tools)
    name, arguments = call.name, call.arguments
    try:
        json.dumps(list(call), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a call spells half of a surrogate pair, such as \\ud83d, which is no character"
    if not isinstance(name, str) or name not in offered:
        known = ", ".join(offered) or "none"
        return f"there is no tool {_show(name)}; the tools are: {known}"
    if not isinstance(call.id, str):
        return f"{name}: the id {_show(call.id)} is no text"
    if not isinstance(arguments, dict):
        return f"{name}: the arguments {_show(arguments)} are no JSON object"
    schema = offered[name]
    properties: Mapping[str, Any] | None = schema.get("properties")
    if missing := [key for key in schema.get("required", ()) if key not in arguments]:
        return f"{name}: the argument {', '.join(missing)} is missing"
    is_open = properties is None or schema.get("additionalProperties", False) is not False
    unknown = [key for key in arguments if key not in (properties or ())]
    if unknown and not is_open:
        known = ", ".join(properties or ()) or "none"
        return f"{name}: there is no argument {_show(unknown[0])}; the arguments are: {known}"
    if any((name, arguments) == one[:2] for one in earlier):
        return f"{name}: the same call is made twice"
    return ""


def nested_beyond(value: Any, levels: int) -> bool:
    """Whether objects and lists of JSON lie within each other over so many levels."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(nested_beyond(one, levels - 1) for one in inner)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
