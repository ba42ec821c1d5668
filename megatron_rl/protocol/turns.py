"""Continues conversations token by token, without tokenizing anything twice.

A conversation is a rendered prompt, a sampled reply, glue, a sampled reply, and so on. Glue is what
the chat template writes behind a reply, up to where the next one begins: the token that closes the
reply, and the messages given to the model. Used by generators; needs the tokenizer only.
"""

import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, product

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import HOUSE_TAGS, in_tags
from megatron_rl.protocol.call_forms import PROBE_TOOL, ToolCall, find_call_form
from megatron_rl.protocol.chat_template import RenderError, Tool, Turn
from megatron_rl.protocol.control_tokens import ControlTokens, unused_character
from megatron_rl.protocol.render import Renderer

_SHOWN_CHARACTERS = 60
_INSTEAD = 'expert.render.history="template"'
_MOST_KINDS = 256
"""Kinds of glue whose proof is remembered."""
_KINDS = (("user",), ("tool",), ("tool", "tool"))
"""Roles of given messages that are proven at the start; others when they first come."""
_LONGEST_RUN = 3
"""Messages of one role in a row that are proven; more of them continue as these do."""
_CALLED, _ID = "probe_tool", "probe0123"
_PROBES: dict[str, Turn] = {
    "system": {"role": "system", "content": "probe system"},
    "user": {"role": "user", "content": "probe question"},
    "tool": {"role": "tool", "name": _CALLED, "tool_call_id": _ID, "content": "probe result"},
    "assistant": {"role": "assistant", "content": "probe answer"},
}
_CALL = ToolCall(f"{_CALLED}_of_history", {"probe_key": 1}, _ID)
_HISTORIES = ("u", "su", "uau", "suauau", "uct", "suctau", "uctct", "ucttau")
"""Roles before a reply, by their first letters; c: an assistant that calls a tool."""
_REPLY_ENDS = (
    "", " ", "  \n", "\n\n", "\t", "hal", "12", ".", '"', "<", "<|", "[/", "日本", "\u0645\u0631",
    "🙂", "👩\u200d", "e\u0301", "\u0301", "\u00a0", "\ufeff", "</tool_call>", "\r\n", "'",
)  # fmt: skip
"""Ends of replies that a tokenizer may merge with what follows."""
_GIVEN_FORMS = (
    "{}",
    " {}\n",
    "\n\n{} ",
    "🙂{}日本",
    "\u0301{}e\u0301",
    '"{}"',
    "{}<|",
    "{end}{}",
)
"""Given texts that a tokenizer may merge with what the template writes around them."""


class Turns:
    """How conversations of a model continue; proven for its chat template by rendering probes."""

    def __init__(
        self, renderer: Renderer, *, is_continued: bool = True, instead: str = _INSTEAD
    ) -> None:
        """Raises InputError if the template lets no reply be followed by anything.

        is_continued: False: nothing is proven before `glue` asks for it. instead: what `glue`
        advises, beside another template.
        """
        self._instead = instead
        self._renderer = renderer
        self._template = renderer.template
        self._calls = find_call_form(renderer.template)
        self._tokens = ControlTokens(renderer)
        self._ends = self._find_ends()
        self._find_refusal = lru_cache(_MOST_KINDS)(self._prove)
        self.refusals = {
            (roles, has_tools): reason
            for has_tools, roles in product((False, True), _KINDS if is_continued else ())
            if (reason := self._find_refusal(roles, has_tools))
        }
        """Why glue of (roles of the given messages, whether tools are offered) is refused."""
        if len(self.refusals) == 2 * len(_KINDS):
            raise InputError(
                f"model.path={renderer.model}: its chat template cannot continue a conversation "
                f"token by token: {self.refusals[_KINDS[0], False]}. Give a template whose text "
                "behind a reply depends only on the messages that follow it "
                "(render.chat_template), or let this one write earlier replies for each turn "
                'anew (expert.render.history="template")'
            )

    @property
    def notes(self) -> list[str]:
        """Lines to show: what is refused, and why."""
        kinds: dict[str, list[str]] = {}
        for (roles, has_tools), reason in self.refusals.items():
            kinds.setdefault(reason, []).append(_name(roles, has_tools))
        return [
            f"note: the chat template cannot continue a conversation with {' or '.join(names)} "
            f"token by token: {reason}"
            for reason, names in kinds.items()
        ]

    def start(
        self, messages: Sequence[Turn], tools: Sequence[Tool] = (), *, most: int | None = None
    ) -> list[int]:
        """Prompt token ids of a first turn, up to where the reply begins.

        most: as for `ControlTokens.encode`. Raises RenderError if the template refuses the messages
        or writes no tools; and TooManyTokens.
        """
        if tools and "tools" not in self._template.reads:
            raise RenderError(
                f"the chat template writes no tools, and {len(tools)} are offered: describe them "
                "in a system message, or give a render.chat_template that writes them"
            )
        return self._tokens.render(messages, tools, most=most)

    def call(
        self,
        calls: Sequence[ToolCall],
        content: str,
        *,
        thoughts: str = "",
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Token ids of a reply with calls, as the template writes it behind a prompt, and its end.

        thoughts: apart from the content. Raises RenderError if the template refuses the reply or
        leaves out a part of it.
        """
        if self._calls is None:
            raise RenderError(
                "the chat template writes no tool calls: its text with and without tool_calls is "
                "the same. Write the calls into the content, or give a render.chat_template that "
                "writes them"
            )
        tags, parts = self._renderer.tags, [content, thoughts]
        if tags is not None:
            content = in_tags(content, tags)
            # Templates may write other blanks around the tags.
            parts = [thoughts, *content.replace(tags.close, tags.open).split(tags.open)]
        # The name of a tool may also stand in the content, the thoughts and the results.
        mark = unused_character(content, thoughts, calls)
        marks = re.compile(f"{mark}([0-9]+){mark}")
        named = [call._replace(name=f"{mark}{n}{mark}{call.name}") for n, call in enumerate(calls)]
        turn = self._calls.turn(named, content)
        # Templates read thoughts under one of two names, or within the content.
        forms = [turn | {"reasoning_content": thoughts, "thinking": thoughts} if thoughts else turn]
        if thoughts and tags is not None:
            forms.append(turn | {"content": tags.around_thoughts(thoughts) + content})
        result = _PROBES["tool"] | {"content": mark * 2}
        results = [result | {"name": call.name, "tool_call_id": call.id} for call in calls]
        lost = ""
        # In some templates only the next message ends a reply.
        for form, behind in product(forms, ([], results)):
            guard = unused_character([form, *behind], tools)
            written = self._written([form, *behind], tools, guard).partition(mark * 2)[0]
            places = {int(found[1]): found.end() for found in reversed([*marks.finditer(written)])}
            lost = _find_lost(marks.sub("", written).replace(guard, ""), parts, calls, places)
            end = self._ends.search(written, max(places.values(), default=0))
            if end and not lost:
                return self._tokens.encode(marks.sub("", written[: end.end()]), guard)
        raise RenderError(
            lost or "the chat template writes no token behind tool_calls that ends a reply"
        )

    def _written(self, turns: Sequence[Turn], tools: Sequence[Tool], guard: str) -> str:
        """What the template writes of these messages behind a prompt. Raises RenderError."""
        offered = [self._tokens.mark_tool(tool, guard) for tool in tools]
        opening = self._template.render([_PROBES["user"]], tools=offered)
        text = self._template.render(
            [_PROBES["user"], *(self._tokens.mark_turn(turn, guard) for turn in turns)],
            opens_answer=False,
            tools=offered,
        )
        if not text.startswith(opening):
            raise RenderError(
                f"the chat template opens a reply with {opening[-_SHOWN_CHARACTERS:]!r}, and "
                "writes a message with tool_calls otherwise: give another render.chat_template"
            )
        return text.removeprefix(opening)

    def glue(
        self,
        sampled: Sequence[int],
        given: Sequence[Turn],
        tools: Sequence[Tool] = (),
        *,
        most: int | None = None,
    ) -> list[int]:
        """Token ids to append behind a reply, up to where the next reply begins.

        sampled: the reply's ids. Its closing token is added if it lacks it, as when it was
        truncated. tools: as at the start. most: as for `ControlTokens.encode`. Raises RenderError
        if the template refuses the messages, or if the glue is not proven for their roles; and
        TooManyTokens.
        """
        if not given:
            raise RenderError("no message is given: a reply follows a message")
        roles = tuple(turn["role"] for turn in given)
        if reason := self._find_refusal(_shortened(roles), bool(tools)):
            name = _name(roles, bool(tools))
            raise RenderError(
                f"the chat template cannot continue a conversation with {name} "
                f"token by token: {reason}. Give another render.chat_template, or {self._instead}"
            )
        guard = unused_character(given, tools)
        ids = self._tokens.encode(self._text(given, tools, guard), guard, most=most)
        return ids[1:] if sampled and sampled[-1] == ids[0] else ids

    def _text(self, given: Sequence[Turn], tools: Sequence[Tool], guard: str) -> str:
        """Glue text: the closing token, the messages, the opening of a reply. Raises RenderError.

        guard: a character that neither the messages nor the tools have; it splits control tokens.
        """
        marked = [self._tokens.mark_turn(turn, guard) for turn in given]
        offered = [self._tokens.mark_tool(tool, guard) for tool in tools]
        sentinel = f"probe{guard}reply"
        refusal = RenderError("")
        for reply in self._replies(marked, sentinel):
            try:
                text = self._template.render([_PROBES["user"], reply, *marked], tools=offered)
            except RenderError as error:
                refusal = error
                continue
            behind = text.partition(sentinel)[2].lstrip()  # blanks belong to the reply
            if "tool_calls" in reply:  # as does the rest of a call
                end = self._ends.search(behind)
                behind = behind[end.start() :] if end else ""
            if self._tokens.at(behind):
                return behind
            refusal = RenderError(
                f"no token closes a reply: it writes {behind[:_SHOWN_CHARACTERS]!r}"
            )
        raise refusal

    def _replies(self, given: Sequence[Turn], sentinel: str) -> list[Turn]:
        """Replies with the sentinel that may come before these messages, the likeliest first."""
        plain: Turn = {"role": "assistant", "content": sentinel}
        if self._calls is None or given[0]["role"] != "tool":
            return [plain]
        calls = [
            ToolCall(
                turn.get("name") or _CALLED, {"probe_key": sentinel}, turn.get("tool_call_id", _ID)
            )
            for turn in given
            if turn["role"] == "tool"
        ]
        # Some templates want a call for each result, some take one call a message.
        return [self._calls.turn(calls), self._calls.turn(calls[:1]), plain]

    def _find_ends(self) -> re.Pattern[str]:
        """Finds the tokens that end a reply: the template's own, and the model's."""
        try:
            text = self._template.render([self._probe(letter) for letter in "uau"])
            closing = self._tokens.at(text.partition(_PROBES["assistant"]["content"])[2].lstrip())
        except RenderError:
            closing = ""
        known = map(self._renderer.tokenizer.convert_ids_to_tokens, self._renderer.stop_ids)
        return re.compile("|".join(map(re.escape, filter(None, {closing, *known}))))

    def _prove(self, roles: tuple[str, ...], has_tools: bool) -> str:
        """Why glue of messages with these roles is not proven; "": it is."""
        tools = [PROBE_TOOL] if has_tools else []
        end = self._renderer.decode([self._renderer.end_id, self._renderer.end_id])
        for form in _GIVEN_FORMS:
            given = [
                {
                    **_PROBES.get(role, {"role": role}),
                    "content": form.replace("{end}", end).replace("{}", word),
                }
                for role, word in zip(roles, _words(roles), strict=True)
            ]
            try:
                fault = self._find_fault(given, tools, is_thorough=form == "{}")
            except RenderError as error:
                fault = f"it fails: {error.__cause__}" if error.__cause__ else str(error)
            if fault:
                return fault
        return ""

    def _find_fault(
        self, given: Sequence[Turn], tools: Sequence[Tool], *, is_thorough: bool
    ) -> str:
        """What the glue of these messages depends on; "": only on them. Raises RenderError."""
        guard = unused_character(given, tools)
        guarded = self._text(given, tools, guard)
        glue, ids = guarded.replace(guard, ""), self._tokens.encode(guarded, guard)
        places = [glue.find(word) for word in _words([turn["role"] for turn in given])]
        if -1 in places or places != sorted(places):
            return "it does not write the messages in order, behind the token that ends the reply"
        for turns, end in self._conversations(given, is_thorough=is_thorough):
            try:
                found = self._template.render([*turns, *given], tools=tools)
            except RenderError:
                continue  # the template takes no such conversation
            if not (found.endswith(glue) and found.removesuffix(glue).rstrip().endswith(end)):
                return _difference(turns, glue, found)
        for end in _REPLY_ENDS if guarded == glue else ():
            reply = f"probe{end}"
            if self._renderer.encode(reply + glue) != [*self._renderer.encode(reply), *ids]:
                return (
                    f"the tokenizer joins a reply that ends with {end!r} to the closing token "
                    f"{self._renderer.decode(ids[:1])!r}, as tokens with lstrip do"
                )
        return ""

    def _conversations(
        self, given: Sequence[Turn], *, is_thorough: bool
    ) -> Iterator[tuple[list[Turn], str]]:
        """(messages up to a reply, text with which the reply surely ends) to try."""
        tags = self._renderer.tags or HOUSE_TAGS
        thought = tags.around("\nprobe thought\n")
        replies = [("probe reply", "probe reply")]
        if is_thorough:
            replies.append((f"{thought}\n\nprobe reply", "probe reply"))
            replies.append((f"{tags.open}probe thought", ""))
            for end in _REPLY_ENDS:
                yield [self._probe("u"), {"role": "assistant", "content": f"probe{end}"}], ""
        for history in _HISTORIES:
            turns = [self._probe(letter) for letter in history]
            for reply, end in replies:
                yield [*turns, {"role": "assistant", "content": reply}], end
            if given[0]["role"] == "tool" and self._calls:
                # gpt-oss' template names the call behind it, as the message of the result does.
                names_call = self._renderer.form.has_channels
                call = _CALL._replace(name=_CALLED) if names_call else _CALL
                yield [*turns, self._calls.turn([call])], ""

    def _probe(self, letter: str) -> Turn:
        if letter == "c" and self._calls:
            return self._calls.turn([_CALL])
        return next(
            (turn for role, turn in _PROBES.items() if role[0] == letter), _PROBES["assistant"]
        )


def _find_lost(
    text: str, parts: Iterable[str], calls: Sequence[ToolCall], found: Container[int]
) -> str:
    """What is wrong if the text lacks a part, or a call is not among the found ones; "": nothing.

    found: places of the calls that the text has.
    """
    lost = [(repr(part[:_SHOWN_CHARACTERS]), "") for part in parts if part.strip() not in text]
    lost += [
        (f"call {place + 1} of {len(calls)} ({call.name!r})", " or put it into its own message,")
        for place, call in enumerate(calls)
        if place not in found
    ]
    return next(
        (
            f"the chat template leaves {part} out of a message with tool_calls: take it out,{other}"
            " or give a render.chat_template that writes it"
            for part, other in lost
        ),
        "",
    )


def _words(roles: Sequence[str]) -> list[str]:
    return [f"probe-{place}-seen" for place in range(len(roles))]


def _shortened(roles: Iterable[str]) -> tuple[str, ...]:
    return tuple(role for _, run in groupby(roles) for role in list(run)[:_LONGEST_RUN])


def _name(roles: Sequence[str], has_tools: bool) -> str:
    return f"the roles {', '.join(roles)}" + (" while tools are offered" if has_tools else "")


def _difference(turns: Sequence[Turn], glue: str, found: str) -> str:
    """Where the glue behind a conversation differs from that behind a first reply."""
    same = len(os.path.commonprefix([glue[::-1], found[::-1]]))
    shown, other = (
        text[max(0, len(text) - same - _SHOWN_CHARACTERS) : len(text) - same + 8]
        for text in (glue, found)
    )
    roles = ", ".join(turn["role"] for turn in turns)
    return f"behind {roles} it writes {other!r}, and behind a first reply {shown!r}"
