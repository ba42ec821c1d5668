"""How the messages of a conversation become the token ids that the engine gets for a turn.

Used by the generator. `expert.render.history` decides what stands for earlier replies:

- keep: the ids that the engine saw and sampled;
- template: what the chat template writes for them, which may leave out thoughts. The template
  renders the whole conversation before each turn. If the result begins with the ids of an earlier
  turn, the new turn continues the longest such turn. Otherwise it begins a row of the rollout.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from generation.conversation import Turn
from megatron_rl.protocol.call_forms import find_call_form
from megatron_rl.protocol.chat_template import RenderError, Tool
from megatron_rl.protocol.chat_template import Turn as Message
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.tool_calls import ParsedReply, ToolCallParser, with_tools
from megatron_rl.protocol.turns import Turns

_REASONING = {"reasoning_content": "reasoning_content", "message.thinking": "thinking"}
"""Where chat templates read the thoughts of a reply, by what they write of it."""


class Place(NamedTuple):
    """Where a turn begins."""

    parent: Turn | None
    """The turn that it continues; None: it begins a row."""
    given: list[int]
    """Token ids behind the parent's reply."""


class Histories:
    """Renders the conversations of a model."""

    def __init__(self, renderer: Renderer) -> None:
        """Raises InputError for a chat template that cannot continue a conversation."""
        self._renderer = renderer
        self.is_rendered = renderer.history == "template"
        """Earlier replies are as the chat template writes them."""
        self._turns = Turns(renderer, is_continued=not self.is_rendered)
        self.parser = ToolCallParser(renderer)
        self.call_form = find_call_form(renderer.template)
        """How the chat template takes tool calls; None: it writes none."""
        template = renderer.tokenizer.get_chat_template()
        self._reasoning = next((key for mark, key in _REASONING.items() if mark in template), "")
        """Key of a message's thoughts; "": they are part of the content."""

    def place(
        self,
        parent: Turn | None,
        earlier: Iterable[Message],
        messages: Sequence[Message],
        tools: list[Tool],
        task: str,
    ) -> Place:
        """Where a turn begins that answers these messages. Raises RenderError.

        parent: turn of the latest reply; None: the messages begin a conversation. earlier: the
        messages up to that reply, read only where they are rendered.
        """
        offered = tools if "tools" in self._renderer.template.reads else []
        if parent is not None and self._renderer.form.has_channels:
            messages = self._with_names(messages, self.read(parent, tools))
        try:
            if parent is not None and not self.is_rendered:
                return Place(parent, self._turns.glue(parent.reply_ids, messages, offered))
            opened = self._renderer.opened([*earlier, *messages], task)
            if tools and not offered:
                opened = with_tools(opened, tools)
            ids = self._turns.start(opened, offered)
        except RecursionError as error:
            raise RenderError("the messages or tools are nested too deeply") from error
        for turn in reversed(parent.path if parent is not None else []):
            seen = turn.ids
            if len(seen) < len(ids) and ids[: len(seen)] == seen:
                return Place(turn, ids[len(seen) :])
        return Place(None, ids)

    def read(self, turn: Turn, tools: Sequence[Tool]) -> ParsedReply:
        """The parts of a turn's reply."""
        return self.parser.parse(self._renderer.decode(turn.reply_ids), tools)

    def message(self, turn: Turn, found: ParsedReply) -> Message:
        """A turn's reply as a message for the chat template. found: its parts."""
        calls = [*found.calls, *found.attempted]
        if (found.faults and not found.attempted) or (calls and self.call_form is None):
            return self._as_written(turn)
        if calls:
            assert self.call_form is not None
            # In channels a message that calls a tool has no room for other text.
            content = "" if self._renderer.form.has_channels else found.content
            message = self.call_form.turn(calls, content)
        elif self._reasoning:
            message = {"role": "assistant", "content": found.content}
        else:
            return self._as_written(turn)
        if self._reasoning:
            return message | {self._reasoning: found.reasoning}
        if found.reasoning and (tags := self._renderer.tags):
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

    def _as_written(self, turn: Turn) -> Message:
        """The whole text of a reply as content."""
        text, tags = self._renderer.decode(turn.reply_ids), self._renderer.tags
        opening = tags.open if tags is not None and self.parser.is_opened else ""
        return {"role": "assistant", "content": opening + text}
