"""Encodes rendered text in which given content can hold no control token.

Control tokens open and close turns, thoughts and calls. A tool's output that holds "<|im_end|>"
must not end a turn. So a guard, a character that nobody uses, is put into such texts before the
chat template sees them; the rendered text is tokenized in the pieces between the guards. A
conversation without such texts is tokenized in one piece, as the template's own text would be.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.config.thinking import KNOWN_TAGS
from megatron_rl.protocol.chat_template import RenderError, Tool, Turn
from megatron_rl.protocol.render import Renderer

_OWN_ROLES = ("assistant", "system")
"""Roles whose messages come from the run or the model, and may have thoughts."""
_PRIVATE = range(0xE000, 0xF900)
"""Characters for private use."""
_READ_CHARACTERS = 8
"""Characters a token of room that are tokenized first of a long text; texts have fewer a token."""
_GROWTH = 4
_CUT_TOKENS = 128
"""A text that is cut may have that many tokens more than they are of the whole text."""


class TooManyTokens(RenderError):
    """A text has more tokens than its reader has room for."""


class ControlTokens:
    """A tokenizer's special tokens, think tags, and added tokens that its chat template writes."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        source = renderer.tokenizer.get_chat_template()
        thoughts = {tag for tags in KNOWN_TAGS for tag in (tags.open, tags.close)}
        added = {
            str(token): (index, token.special)
            for index, token in renderer.tokenizer.added_tokens_decoder.items()
        }
        # Some tokenizers have added tokens for runs of spaces and for tags of HTML.
        tokens = {
            text: index
            for text, (index, is_special) in added.items()
            if text.strip() and (is_special or text in thoughts or text in source)
        }
        # A tokenizer without bytes writes it for characters that it does not have.
        self._unknown = renderer.tokenizer.unk_token
        self._ids = frozenset(tokens[text] for text in tokens if text != self._unknown)
        self._texts = re.compile(
            "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
        )
        self._starts = _starts_of(tokens)
        self._own_starts = _starts_of(tokens.keys() - thoughts)

    def render(
        self, messages: Sequence[Turn], tools: Sequence[Tool] = (), *, most: int | None = None
    ) -> list[int]:
        """Token ids of messages, up to where the reply begins. Raises as `encode`."""
        guard = unused_character(messages, tools)
        text = self._renderer.template.render(
            [self.mark_turn(turn, guard) for turn in messages],
            tools=[self.mark_tool(tool, guard) for tool in tools],
        )
        return self.encode(text, guard, most=most)

    def at(self, text: str, place: int = 0) -> str:
        """The control token that a text has at this place; "": none."""
        found = self._texts.match(text, place)
        return found.group() if found else ""

    def mark_turn(self, turn: Turn, guard: str) -> Turn:
        """The message with the guard within the texts of control tokens.

        Messages of an assistant and of the system keep their think tags.
        """
        starts = self._own_starts if turn["role"] in _OWN_ROLES else self._starts
        marked: Turn = _mark(turn, starts, guard)
        return marked

    def mark_tool(self, tool: Tool, guard: str) -> Tool:
        """The tool with the guard within the texts of control tokens."""
        marked: Tool = _mark(tool, self._starts, guard)
        return marked

    def encode(self, text: str, guard: str, *, most: int | None = None) -> list[int]:
        """Token ids of rendered text.

        most: tokens that its reader has room for; None: any number. A text with many more is not
        read to its end, as to tokenize megabytes takes seconds. A text with a few more is encoded.
        Raises TooManyTokens; RenderError for text that is no Unicode, that gets other tokens than
        it spells, or that has a token that the model does not have.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError(f"a message is no text: {error}") from error
        if most is not None:
            self._check_size(text, guard, most)
        pieces = text.split(guard)
        ids = [token for piece in pieces for token in self._renderer.encode(piece)]
        meant = sum(one != self._unknown for piece in pieces for one in self._texts.findall(piece))
        if sum(token in self._ids for token in ids) != meant:
            raise RenderError(
                "the text cannot be encoded: the tokenizer finds other special tokens in it than "
                "it spells, as one does that normalizes text or has tokens with single_word"
            )
        if refusal := self._renderer.find_foreign(ids):
            raise RenderError(refusal)
        return ids

    def _check_size(self, text: str, guard: str, most: int) -> None:
        """Raise TooManyTokens for a text whose begin has clearly more than `most` tokens."""
        enough = max(0, most) + _CUT_TOKENS
        size = _READ_CHARACTERS * enough
        while size < len(text):
            begin = text[:size].split(guard)
            if sum(len(self._renderer.encode(piece)) for piece in begin) > enough:
                raise TooManyTokens(f"the text has more than {max(0, most)} tokens")
            size *= _GROWTH


def unused_character(*values: Any) -> str:
    """A character that these messages and tools do not have. Raises RenderError."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    found = next((one for one in map(chr, _PRIVATE) if one not in text), "")
    if not found:
        raise RenderError("the messages have all characters that are for private use")
    return found


def _starts_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the first character of each of these texts."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    branches = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(branches) or "(?!)")


def _mark(value: Any, starts: re.Pattern[str], guard: str) -> Any:
    if isinstance(value, str):
        return starts.sub(lambda found: found.group() + guard, value)
    if isinstance(value, Mapping):
        return {_mark(key, starts, guard): _mark(one, starts, guard) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(one, starts, guard) for one in value]
    return value
