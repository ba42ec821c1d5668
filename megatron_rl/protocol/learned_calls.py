"""The form in which a chat template writes tool calls, found by rendering probes.

| a call is | for example |
|---|---|
| a JSON object, or one of a JSON list (`JsonForm`) | Qwen2.5, Qwen3, Llama 3, Mistral Nemo |
| [TOOL_CALLS]name[ARGS]{…} (`ArgsForm`) | Ministral |
| a name and JSON between texts (`TaggedForm`) | DeepSeek V3, Kimi K2 |
| a message to=functions.NAME (`ChannelForm`) | gpt-oss |
| a name, and key and value between texts for each argument (`TaggedForm`) | Qwen3.5, GLM-4.5 |

The texts of a `TaggedForm` are those in which renderings of one and of two calls, with one and with
two arguments, agree and differ. A form counts as found only if it reads all these renderings again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.call_forms import (
    PROBE,
    PROBE_TOOL,
    QUESTION,
    ArgsForm,
    CallForm,
    ChannelForm,
    JsonForm,
    MalformedCall,
    ToolCall,
    WrittenCall,
    read_json,
)
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.render import Renderer

_PIECE = re.compile(r"<[^<>\s]*>?|\[[^\[\]\s]*\]?|\s+|[^<\[\s]+")
_NAME = re.compile(r"\s*(?P<name>[\w.-]+)(?P<id>)")
_NUMBERED = re.compile(r"\s*(?P<id>functions\.(?P<name>[\w.-]+):\d+)")
"""Kimi's names, which are the ids of calls as well."""
_KEY, _VALUE = PROBE.arguments.copy().popitem()
_KEY_2, _VALUE_2 = "probe_other", "probe-text"
_PROBES = (
    [PROBE],
    [PROBE._replace(arguments={_KEY: _VALUE, _KEY_2: _VALUE_2})],
    [PROBE, PROBE._replace(arguments={_KEY: _VALUE_2})],
    [PROBE._replace(arguments={})],
)


@dataclass(frozen=True)
class TaggedForm:
    """A name and its arguments between texts. Blanks between the texts may be others."""

    before: str
    """Before the first name, with what may surround several calls."""
    again: str
    """Before the name of a further call within the same surroundings."""
    behind_name: str
    behind_call: str
    behind_all: str
    """Behind the last call, if something surrounds them."""
    before_key: str = ""
    behind_key: str = ""
    behind_value: str = ""
    """Of each argument; all "": the arguments are one JSON object."""
    name: re.Pattern[str] = _NAME
    """Finds a name, and the id of the call if it has one."""

    @property
    def opening(self) -> str:
        """The first text of a call."""
        return _pieces(self.before)[0]

    @property
    def closing(self) -> str:
        """The last text of a call."""
        return [one for one in _pieces(self.behind_call + self.behind_all) if one.strip()][-1]

    @cached_property
    def starts(self) -> re.Pattern[str]:
        """Finds where a call begins; an empty text before a closing text without its opening."""
        return re.compile(f"{re.escape(self.opening)}|(?={re.escape(self.closing)})")

    def read(self, text: str, place: int) -> tuple[list[WrittenCall], int]:
        """(calls, place behind them) at a place behind an opening. Raises MalformedCall.

        Values that stand between texts are texts, of whatever type they are.
        """
        calls: list[WrittenCall] = []
        place = self._skip(self.before[len(self.opening) :], text, place)
        while True:
            call, place = self._read_call(text, place)
            calls.append(call)
            if not self.behind_all:
                return calls, place
            end = _find(self.behind_all, text, place)
            if end >= 0:
                return calls, end
            place = self._skip(self.again, text, place)

    def _read_call(self, text: str, place: int) -> tuple[WrittenCall, int]:
        found = self.name.match(text, place)
        if not found:
            form = "functions.NAME:NUMBER" if self.name is _NUMBERED else "a name"
            raise MalformedCall(f"{form} must follow {self.before.strip()}")
        place = self._skip(self.behind_name, text, found.end())
        if not self.behind_key:
            value, place = read_json(text, place)
            call = WrittenCall(found["name"], value, found["id"])
            return call, self._skip(self.behind_call, text, place)
        arguments: dict[str, Any] = {}
        while (begin := _find(self.before_key, text, place)) >= 0:
            key = self._key_end.search(text, begin)
            value = self._value_end.search(text, key.end()) if key else None
            if not key or not value:
                texts = f"{self.behind_key.strip()}VALUE{self.behind_value.strip()}"
                raise MalformedCall(f"{self.before_key.strip()} must be followed by KEY{texts}")
            name, place = text[begin : key.start()], value.end()
            if name in arguments:
                raise MalformedCall(f"the argument {name} is given twice")
            arguments[name] = text[key.end() : value.start()]
        call = WrittenCall(found["name"], arguments, found["id"])
        return call, self._skip(self.behind_call, text, place)

    @cached_property
    def _key_end(self) -> re.Pattern[str]:
        core = self.behind_key.rstrip()
        return re.compile(f"{_pattern(core)}(?:{re.escape(self.behind_key[len(core) :])})?")

    @cached_property
    def _value_end(self) -> re.Pattern[str]:
        """The closing text of a value, where a key or the end of the call follows it."""
        core = self.behind_value.lstrip()
        blanks = re.escape(self.behind_value[: -len(core)])
        follows = f"{_pattern(self.before_key)}|{_pattern(self.behind_call)}"
        return re.compile(f"(?:{blanks})?{_pattern(core)}(?=\\s*(?:{follows}))")

    def _skip(self, expected: str, text: str, place: int) -> int:
        end = _find(expected, text, place)
        if end < 0:
            raise MalformedCall(f"{expected.strip()} is missing in a call")
        return end


Form = JsonForm | ArgsForm | ChannelForm | TaggedForm


def _pattern(text: str) -> str:
    """Pattern for a text, whose blanks may be others."""
    return r"\s*".join(map(re.escape, text.split()))


def _find(expected: str, text: str, place: int) -> int:
    """Place behind an expected text, with blanks before it; -1: it is not there."""
    found = re.compile(rf"\s*{_pattern(expected)}").match(text, place)
    return found.end() if found else -1


def _pieces(text: str) -> list[str]:
    """Tags, blanks, and other texts, which together are the text."""
    return _PIECE.findall(text)


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The leading elements that both share."""
    pairs = zip(one, other, strict=False)
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _common_end(one: str, other: str) -> str:
    """The pieces with which both end."""
    shared = _common(_pieces(one)[::-1], _pieces(other)[::-1])
    return "".join(shared[::-1])


def _behind(text: str, begin: str) -> str:
    """The text without the pieces with which both begin."""
    return text.removeprefix("".join(_common(_pieces(text), _pieces(begin))))


def _learn(single: str, double: str, pair: str) -> TaggedForm | None:
    """The form of renderings of a call, of one with two arguments, and of two calls."""
    name = PROBE.name
    before, _, rest = single.partition(name)
    before = before.rpartition("</think>")[2].lstrip()
    between = pair.partition(_VALUE)[2].partition(name)[0]
    head, found_key, tail = rest.partition(_KEY)
    end = ("", "", "")
    behind_name = head
    if not (before.strip() and found_key and between):
        return None
    if head.rstrip().endswith('{"'):
        behind_name, behind = head.rstrip()[:-2], tail.partition(_VALUE)[2].lstrip()[2:]
        between = between.lstrip()[2:]
    else:
        behind_key, _, behind = tail.partition(_VALUE)
        more = double.partition(_VALUE)[2].partition(_KEY_2)[0]
        before_key = _common_end(head, more)
        behind_name = head.removesuffix(before_key)
        end = before_key, behind_key, more.removesuffix(before_key)
        if not all(one.strip() for one in end) or not behind.startswith(end[2]):
            return None
        between, behind = between.removeprefix(end[2]), behind.removeprefix(end[2])
    again = _common_end(before, between)
    behind_call = between.removesuffix(again).strip()
    outer = before.removesuffix(again).strip()
    behind_all = behind.strip().removeprefix(behind_call).strip() if outer else ""
    return TaggedForm(before, again, behind_name, behind_call, behind_all, *end)


def find_form(renderer: Renderer, form: CallForm, prompt: str) -> Form:
    """The form in which a template writes calls. Raises InputError for one that is not known."""
    end = str(renderer.tokenizer.convert_ids_to_tokens(renderer.end_id))

    def written(calls: Sequence[ToolCall]) -> str:
        turns = [QUESTION, form.turn(calls)]
        text = renderer.template.render(turns, opens_answer=False, tools=[PROBE_TOOL])
        reply = text.removeprefix(prompt)
        if reply == text:  # the prompt opens thoughts, and the template leaves the opening out
            asked = QUESTION["content"]
            reply = _behind(text.partition(asked)[2], prompt.partition(asked)[2])
        return reply.rstrip().removesuffix(end).rpartition(end)[2]

    reply = written([PROBE])
    for one in _forms_of_json(reply):
        if _reads(one, reply, [PROBE]):
            return one
    try:
        replies = [written(calls) for calls in _PROBES]
        learned = _learn(*(_NUMBERED.sub(r"\g<name>", reply) for reply in replies[:3]))
    except RenderError:
        learned = None
    if learned and _NUMBERED.search(reply):
        learned = replace(learned, name=_NUMBERED)
    if learned and all(map(_reads, [learned] * len(_PROBES), replies, _PROBES)):
        return learned
    raise InputError(
        f"model.path={renderer.model}: its chat template writes tool calls as {reply!r}, in which "
        "no form is found that reads them again: give a template that writes calls as JSON, or as "
        "name, keys and values between tags (render.chat_template), or offer no tools"
    )


def _forms_of_json(reply: str) -> list[JsonForm | ArgsForm | ChannelForm]:
    """Forms that a rendered call may have."""
    found: list[JsonForm | ArgsForm | ChannelForm] = [ArgsForm(), ChannelForm()]
    for begin in (place.start() for place in re.finditer(r"[\[{]", reply)):
        try:
            _, behind = read_json(reply, begin)
        except MalformedCall:
            continue
        opening = reply[:begin].rstrip().rpartition("</think>")[2]
        texts = (opening.split()[-1:] or [""])[0], (reply[behind:].split()[:1] or [""])[0]
        for arguments in ("arguments", "parameters"):
            found.append(JsonForm(*texts, arguments, is_list=reply[begin] == "["))
    return found


def _reads(form: Form, reply: str, calls: Sequence[ToolCall]) -> bool:
    """Whether a form finds the calls in a reply."""
    found: list[WrittenCall] = []
    start = form.starts.search(reply)
    try:
        while start:
            written, place = form.read(reply, start.end())
            found += written
            start = form.starts.search(reply, place)
    except MalformedCall:
        return False
    return [(call.name, call.arguments) for call in found] == [call[:2] for call in calls]
