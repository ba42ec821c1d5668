"""Tool calls as a model's chat template writes them: written, and read from a reply's text.

Training and evaluation read calls with the same parser. No call is dropped in silence: what cannot
be read or is not offered becomes a fault, a text that the model gets as the result of its call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.chat_template import ChatTemplate, RenderError, Tool, Turn
from megatron_rl.protocol.render import Renderer

_QUESTION: Turn = {"role": "user", "content": "probe-question"}
MAX_DEPTH = 64
"""Levels of a call's arguments; deeper ones exhaust the stack of what renders them."""
_SHOWN_CHARACTERS = 80
_BLANKS = re.compile(r"\s*")
_NAMED = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]")


class ToolCall(NamedTuple):
    """A call that a model made."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """As the model wrote it, for templates that repeat it with the result; "": it wrote none."""


class ParsedReply(NamedTuple):
    """What a reply's text consists of."""

    reasoning: str
    content: str
    calls: list[ToolCall]
    faults: list[str]
    """Why further calls cannot be made, for the model to read."""


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


_PROBE = ToolCall("probe_call", {"probe_key": "probe-value"}, "probe0123")
"""Mistral's templates want ids of nine characters."""
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
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
        turns = [_QUESTION, form.turn([_PROBE])]
        try:
            text = template.render(turns, opens_answer=False, tools=[PROBE_TOOL])
        except RenderError:
            continue
        if _PROBE.arguments["probe_key"] in text:
            return form
    return None


class _Malformed(ValueError):
    """A call that cannot be read."""


class _Written(NamedTuple):
    """A call as it stands in a text, unchecked."""

    name: Any
    arguments: Any
    id: Any = ""


class JsonForm(NamedTuple):
    """A JSON object for each call, or a JSON list of them, between two texts."""

    opening: str
    """ "": the whole reply is the call."""
    closing: str
    arguments: str = "arguments"
    """The key of the arguments, beside "name"."""
    is_list: bool = False

    @property
    def starts(self) -> re.Pattern[str]:
        """Finds where a call begins; an empty text before a closing text without its opening."""
        if not self.opening:
            return re.compile(r'\A\s*(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:)')
        stray = f"|(?={re.escape(self.closing)})" if self.closing else ""
        return re.compile(re.escape(self.opening) + stray)

    def read(self, text: str, place: int) -> tuple[list[_Written], int]:
        """(calls, place behind them) at a place behind an opening. Raises _Malformed."""
        value, end = _read_json(text, place)
        if not text.startswith(self.closing, end) or not (self.opening or end == len(text)):
            behind = f"by {self.closing}" if self.closing else "by nothing"
            raise _Malformed(f"the JSON of a call must be followed {behind}")
        if self.is_list != isinstance(value, list) or value == []:
            raise _Malformed(f"{self.opening} takes a JSON {'list' if self.is_list else 'object'}")
        return [self._take(one) for one in (value if self.is_list else [value])], end + len(
            self.closing
        )

    def _take(self, value: Any) -> _Written:
        keys = {"name", self.arguments}
        if not isinstance(value, dict) or not keys <= value.keys() <= keys | {"id"}:
            raise _Malformed(f'a call is {{"name": …, "{self.arguments}": {{…}}}}')
        return _Written(value["name"], value[self.arguments], value.get("id", ""))


class ArgsForm(NamedTuple):
    """[TOOL_CALLS]name[ARGS]{…}, for each call; [CALL_ID]id may follow the name."""

    opening: str = "[TOOL_CALLS]"
    closing: str = ""

    @property
    def starts(self) -> re.Pattern[str]:
        """Finds where a call begins."""
        return re.compile(re.escape(self.opening))

    def read(self, text: str, place: int) -> tuple[list[_Written], int]:
        """(calls, place behind them) at a place behind an opening. Raises _Malformed."""
        found = _NAMED.match(text, place)
        if not found:
            raise _Malformed(f"name[ARGS]{{…}} must follow {self.opening}")
        value, end = _read_json(text, found.end())
        return [_Written(found["name"], value, found["id"] or "")], end


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


def _read_json(text: str, place: int) -> tuple[Any, int]:
    """(JSON value, place behind it and behind blanks). Raises _Malformed."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_blanks(text, place))
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"the call is no JSON: {error}"[: 2 * _SHOWN_CHARACTERS]) from error
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


class ToolCallParser:
    """Reads the calls of replies in the form that the model's chat template writes."""

    def __init__(self, renderer: Renderer) -> None:
        """Raises InputError if the template fails with a tool offered."""
        self._tags = renderer.tags
        try:
            prompt = renderer.template.render([_QUESTION], tools=[PROBE_TOOL])
        except RenderError as error:
            raise InputError(
                f"model.path={renderer.model}: with a tool offered, {error}"
            ) from error
        self._is_opened = self._tags is not None and self._tags.is_opened_by(prompt)
        """The prompt opens the thoughts."""
        self.form: JsonForm | ArgsForm = HERMES
        self.note = (
            "note: the chat template writes no tool calls, so they are read as "
            '<tool_call>{"name": …, "arguments": {…}}</tool_call>; a system message says so'
        )
        """A line to show; "": calls are read as the template writes them."""
        self.refusal = ""
        """Why no calls can be read: the template writes them in a form that is not known."""
        if form := find_call_form(renderer.template):
            try:
                self.form, self.note = _find_form(renderer, form, prompt), ""
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
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        faults: list[str] = []
        place = self._take_thought(text, 0, thoughts) if self._is_opened else 0
        while place < len(text):
            thought = text.find(self._tags.open, place) if self._tags else -1
            call = self._starts.search(text, place) if tools else None
            if thought >= 0 and not (call and call.start() < thought):
                content.append(text[place:thought])
                place = self._take_thought(text, thought, thoughts)
                continue
            content.append(text[place : call.start() if call else len(text)])
            if not call:
                break
            try:
                written, place = self.form.read(text, call.end())
            except _Malformed as error:
                faults.append(str(error))
                place = self._find_next(text, call.end())
                continue
            for one in written:
                fault = _find_fault(one, calls, tools)
                if fault:
                    faults.append(fault)
                else:
                    calls.append(ToolCall(one.name, one.arguments, one.id))
        return ParsedReply("\n".join(thoughts), "".join(content).strip(), calls, faults)

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


def _find_form(renderer: Renderer, form: CallForm, prompt: str) -> JsonForm | ArgsForm:
    """The form in which a template writes calls. Raises InputError for one that is not known."""
    turns = [_QUESTION, form.turn([_PROBE])]
    text = renderer.template.render(turns, opens_answer=False, tools=[PROBE_TOOL])
    end = str(renderer.tokenizer.convert_ids_to_tokens(renderer.end_id))
    reply = text.removeprefix(prompt)
    if reply == text:  # the prompt opens thoughts, and the template leaves the opening out
        reply = text.partition(_QUESTION["content"])[2]
    reply = reply.rstrip().removesuffix(end).rpartition(end)[2]
    tried: list[JsonForm | ArgsForm] = [ArgsForm()]
    for begin in (found.start() for found in re.finditer(r"[\[{]", reply)):
        try:
            _, behind = _read_json(reply, begin)
        except _Malformed:
            continue
        opening = reply[:begin].rstrip().rpartition("</think>")[2]
        texts = (opening.split()[-1:] or [""])[0], (reply[behind:].split()[:1] or [""])[0]
        for arguments in ("arguments", "parameters"):
            tried.append(JsonForm(*texts, arguments, is_list=reply[begin] == "["))
    for one in tried:
        start = one.starts.search(reply)
        try:
            written, _ = one.read(reply, start.end()) if start else ([], 0)
        except _Malformed:
            continue
        if [(call.name, call.arguments) for call in written] == [_PROBE[:2]]:
            return one
    raise InputError(
        f"model.path={renderer.model}: its chat template writes tool calls as {reply!r}, which is "
        "no JSON with a name between two texts and not [TOOL_CALLS]name[ARGS]{…}: give a template "
        "that writes one of these forms (render.chat_template), or offer no tools"
    )


def _find_fault(call: _Written, earlier: Sequence[ToolCall], tools: Sequence[Tool]) -> str:
    """Why a call cannot be made; "": it can."""
    if nested_beyond(list(call), MAX_DEPTH + 1):
        return f"a call is nested over {MAX_DEPTH} levels"
    offered: dict[str, Mapping[str, Any]] = {
        tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
    }
    name, arguments = call.name, call.arguments
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
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
