"""How the messages of a conversation become the token ids that the engine gets for a turn.

Used by the generator. `expert.render.history` decides what stands for earlier replies:

- keep: the ids that the engine saw and sampled;
- template: what the chat template writes for them, which may leave out thoughts. The template
  renders the whole conversation before each turn. If the result begins with the ids of an earlier
  turn, the new turn continues the longest such turn. Otherwise it begins a row of the rollout.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from generation.conversation import Asked, Turn
from megatron_rl.protocol.call_forms import PROBE, PROBE_TOOL, QUESTION, find_call_form
from megatron_rl.protocol.chat_template import RenderError, Tool
from megatron_rl.protocol.chat_template import Turn as Message
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.tool_calls import ParsedReply, ToolCallParser, with_tools
from megatron_rl.protocol.turns import Turns

_RESULT = "probe-result"
_MOST_IDS = 64
"""Ids of calls of which is remembered whether the template takes them."""
_REASONING = {"reasoning_content": "reasoning_content", "message.thinking": "thinking"}
"""Where chat templates read the thoughts of a reply, by what they write of it."""


class Place(NamedTuple):
    """Where a turn begins."""

    parent: Turn | None
    """The turn that it continues; None: it begins a row."""
    given: list[int]
    """Token ids behind the parent's reply."""
    asked: Asked


class Histories:
    """Renders the conversations of a model."""

    def __init__(self, renderer: Renderer) -> None:
        """Raises InputError for a chat template that cannot continue a conversation."""
        self.renderer = renderer
        self.is_rendered = renderer.history == "template"
        """Earlier replies are as the chat template writes them."""
        self._turns = Turns(renderer, is_continued=not self.is_rendered)
        self.parser = ToolCallParser(renderer)
        self.call_form = find_call_form(renderer.template)
        """How the chat template takes tool calls; None: it writes none."""
        self._takes_id = lru_cache(_MOST_IDS)(self._probe_id)
        written = self._write_result(PROBE.id) if self.is_rendered else ""
        self._drops_results = bool(written) and _RESULT not in written
        template = renderer.tokenizer.get_chat_template()
        self._reasoning = next((key for mark, key in _REASONING.items() if mark in template), "")
        """Key of a message's thoughts; "": they are part of the content."""

    def place(
        self,
        parent: Turn | None,
        earlier: Iterable[Message],
        messages: Sequence[Message],
        tools: list[Tool],
        *,
        task: str,
        room: int,
    ) -> Place:
        """Where a turn begins that answers these messages. Raises RenderError, TooManyTokens.

        parent: turn of the latest reply; None: the messages begin a conversation. earlier: the
        messages up to that reply, read only where they are rendered. room: tokens that may follow
        the parent's reply.
        """
        asked = Asked(parent, list(messages), [] if parent is not None else tools)
        offered = tools if "tools" in self.renderer.template.reads else []
        if self._drops_results and any(message["role"] == "tool" for message in messages):
            raise RenderError(
                "the chat template leaves out messages of the role tool: the policy would not "
                "read the results of its calls. Give a render.chat_template that writes them"
            )
        if parent is not None and self.renderer.form.has_channels:
            messages = self._with_names(messages, self.read(parent, tools))
        try:
            if parent is not None and not self.is_rendered:
                glue = self._turns.glue(parent.reply_ids, messages, offered, most=room)
                return Place(parent, glue, asked)
            opened = self.renderer.opened([*earlier, *messages], task)
            if tools and not offered:
                opened = with_tools(opened, tools)
            ids = self._turns.start(opened, offered, most=self.renderer.context_tokens)
        except RecursionError as error:
            raise RenderError("the messages or tools are nested too deeply") from error
        for turn in reversed(parent.path if parent is not None else []):
            seen = turn.ids
            if len(seen) < len(ids) and ids[: len(seen)] == seen:
                return Place(turn, ids[len(seen) :], asked)
        return Place(None, ids, asked)

    def read(self, turn: Turn, tools: Sequence[Tool]) -> ParsedReply:
        """The parts of a turn's reply. A call keeps the id that the chat template takes."""
        found = self.parser.parse(self.renderer.decode(turn.reply_ids), tools)
        calls = [one if self._takes_id(one.id) else one._replace(id="") for one in found.calls]
        return found._replace(calls=calls)

    def with_ids(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, in which results of calls have an id if the chat template wants one."""
        if self._takes_id(""):
            return list(messages)
        results = [message for message in messages if message["role"] == "tool"]
        own = {id(one): {"tool_call_id": _own_id(place)} for place, one in enumerate(results)}
        return [own.get(id(message), {}) | message for message in messages]

    def message(self, turn: Turn, found: ParsedReply) -> Message:
        """A turn's reply as a message for the chat template. found: its parts."""
        calls = [*found.calls, *found.attempted]
        if (found.faults and not found.attempted) or (calls and self.call_form is None):
            return self._as_written(turn)
        if calls:
            assert self.call_form is not None
            if not self._takes_id(""):
                calls = [
                    one._replace(id=one.id or _own_id(place)) for place, one in enumerate(calls)
                ]
            # In channels a message that calls a tool has no room for other text.
            content = "" if self.renderer.form.has_channels else found.content
            message = self.call_form.turn(calls, content)
        elif self._reasoning:
            message = {"role": "assistant", "content": found.content}
        else:
            return self._as_written(turn)
        if self._reasoning:
            return message | {self._reasoning: found.reasoning}
        if found.reasoning and (tags := self.renderer.tags):
            message["content"] = tags.around(found.reasoning) + (message["content"] or "")
        return message

    def _with_names(self, messages: Sequence[Message], found: ParsedReply) -> list[Message]:
        """Give each tool result without a name the name of the call that it answers."""
        names = iter([call.name for call in (*found.calls, *found.attempted)])
        named = []
        for message in messages:
            if message["role"] == "tool":
                name = next(names, "unknown")
                message = message | {"name": message.get("name") or name}
            named.append(message)
        return named

    def _probe_id(self, call_id: str) -> bool:
        """Whether the template takes a call with this id; if it takes no results at all, too."""
        return bool(self._write_result(call_id) or not self._write_result(PROBE.id))

    def _write_result(self, call_id: str) -> str:
        """How the template writes a call with this id and its result; "": it refuses them."""
        called = {"role": "assistant", "content": "probe"}
        if self.call_form is not None:
            called = self.call_form.turn([PROBE._replace(id=call_id)])
        result = {"role": "tool", "name": PROBE.name, "content": _RESULT}
        if call_id:
            result["tool_call_id"] = call_id
        try:
            return self.renderer.template.render([QUESTION, called, result], tools=[PROBE_TOOL])
        except RenderError:
            return ""

    def _as_written(self, turn: Turn) -> Message:
        """The whole text of a reply as content."""
        text, tags = self.renderer.decode(turn.reply_ids), self.renderer.tags
        opening = tags.open if tags is not None and self.parser.is_opened else ""
        return {"role": "assistant", "content": opening + text}


def _own_id(place: int) -> str:
    """Id of a call that has none; Mistral's templates want nine characters."""
    return f"call{place:05d}"
