"""Conversations of one rollout: a tree of turns, with the token ids that the engine saw. Pure.

Used by the generator. A turn is one reply of the policy with the tokens that were given before it.
Turns are only added: ids never change, and nothing is tokenized again. A turn behind a reply that
already has a successor begins a branch, and a second conversation is another root. Each leaf of the
tree becomes one row of the rollout; a reply that several rows share is learnt in the first of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from generation.engine import Completion, EngineError
from megatron_rl.protocol.chat_template import Tool
from megatron_rl.protocol.chat_template import Turn as Message
from megatron_rl.protocol.types import VersionSpan

OUT_OF_TOKENS = "out_of_tokens"
"""Reason of an outcome: the conversation has no room for another reply."""


class OutOfTokens(Exception):
    """The rollout has no room for another reply; the policy caused that."""


class Asked(NamedTuple):
    """What a turn answers, as its environment sees it."""

    follows: "Turn | None"
    """The turn whose reply came before in the chat; it may be of another row."""
    messages: list[Message]
    """Messages since then."""
    tools: list[Tool]
    """Of a chat's first turn."""


@dataclass(eq=False)
class Turn:
    """A reply, or one that the engine still samples."""

    parent: "Turn | None"
    given: list[int]
    """Token ids behind the parent's reply; of a root: the prompt."""
    most_tokens: int
    """Room that is kept for the reply while the engine samples it."""
    is_last: bool
    """Whether that room is all that the rollout has."""
    reply: Completion | None = None
    successors: int = 0
    asked: "Asked | None" = None
    asked_at: float = 0.0
    replied_at: float = 0.0
    """time.monotonic()"""

    @property
    def path(self) -> "list[Turn]":
        """The turns from the root to this one."""
        found, turn = [self], self.parent
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def reply_ids(self) -> list[int]:
        """Token ids of the reply."""
        return [] if self.reply is None else self.reply.token_ids

    @property
    def prompt(self) -> list[int]:
        """Token ids that the engine gets: everything before the reply."""
        return [*(self.parent.ids if self.parent is not None else ()), *self.given]

    @property
    def ids(self) -> list[int]:
        """Everything that the engine saw and sampled, up to the end of the reply."""
        return [token for turn in self.path for token in (*turn.given, *turn.reply_ids)]

    @property
    def size(self) -> int:
        """Tokens of the turn, with the room that is kept for its reply."""
        return len(self.given) + (self.most_tokens if self.reply is None else len(self.reply_ids))

    @property
    def row_size(self) -> int:
        """Tokens from the root to the end of the turn."""
        return sum(turn.size for turn in self.path)

    @property
    def choices_from(self) -> int:
        """First token whose expert choices come with the reply, as in `Sampling`.

        It is the last one of the parent, after which nothing had been computed.
        """
        return 0 if self.parent is None else self.parent.row_size - 1


class Rows(NamedTuple):
    """The rows of a rollout end to end, as in `Rollout`."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    row_starts: list[int]
    finish_reason: str
    replies: list[Turn]
    """The learnt replies, in the order of their tokens."""
    starts: list[int]
    """The first completion token of each."""
    expert_choices: np.ndarray
    """As in `Rollout`, with -1 for the last token of each row but the last; empty if a reply came
    without."""


class ConversationTree:
    """All turns of one rollout."""

    def __init__(self, *, completion_tokens: int, context_tokens: int) -> None:
        """completion_tokens: limit of all rows together, without the first prompt.

        context_tokens: limit of each row, and of all rows together with the first prompt, as of any
            rollout.
        """
        self._completion_tokens, self._context_tokens = completion_tokens, context_tokens
        self.turns: list[Turn] = []
        self.is_cut = False
        """Whether a limit on tokens ended a reply, or left no room for one."""

    def open(self, parent: Turn | None, given: list[int], max_tokens: int | None) -> Turn:
        """A turn for the engine, with room for at most max_tokens. Raises OutOfTokens.

        given: behind the parent's reply. max_tokens: None: as many as there is room for.
        """
        room = self.room_for(parent, given)
        if max_tokens == 0:
            raise OutOfTokens("a reply was asked for with max_tokens below 1")
        if room < 1:
            raise OutOfTokens(self._describe_limit(parent, given, room))
        is_last = max_tokens is None or room <= max_tokens
        turn = Turn(parent, given, room if max_tokens is None else min(room, max_tokens), is_last)
        if parent is not None:
            parent.successors += 1
        self.turns.append(turn)
        return turn

    def room_for(self, parent: Turn | None, given: list[int]) -> int:
        """Tokens that a reply to these tokens may have."""
        room = self.room_behind(parent) - len(given)
        return room if self.turns else min(self._completion_tokens, room)

    def _describe_limit(self, parent: Turn | None, given: list[int], room: int) -> str:
        """The tokens and the limit that leave this room."""
        begun = (0 if parent is None else parent.row_size) + len(given)
        if self._context_tokens - begun == room:
            return (
                f"a reply has no room behind {begun} tokens: generator.context_tokens is "
                f"{self._context_tokens}; shorten the messages, or raise it"
            )
        first, limit = len(self.turns[0].given), self._completion_tokens
        if self._most_tokens < first + limit:
            return (
                f"all rows of the conversation have {self._most_tokens - room} tokens together: "
                f"generator.context_tokens is {self._context_tokens}; shorten the messages, or "
                "raise it"
            )
        return (
            f"the conversation has {limit - room} tokens behind its first prompt: "
            f"sampling.max_new_tokens is {limit}; shorten the messages, or raise it"
        )

    def room_behind(self, parent: Turn | None) -> int:
        """Tokens that may follow a reply, or begin another row; the first prompt is not counted."""
        begun = 0 if parent is None else parent.row_size
        copied = begun if parent is not None and parent.successors else 0
        room = self._context_tokens - begun
        return min(room, self._most_tokens - self._used - copied) if self.turns else room

    @property
    def _most_tokens(self) -> int:
        """Tokens that all rows may have together, with the first prompt."""
        return min(self._context_tokens, len(self.turns[0].given) + self._completion_tokens)

    @property
    def _used(self) -> int:
        """Tokens of all rows, with the room that is kept for open turns."""
        return sum(leaf.row_size for leaf in self._leaves)

    @property
    def _leaves(self) -> list[Turn]:
        """The last turns of all rows; the first row is one that begins with the first turn."""
        order = {id(turn): number for number, turn in enumerate(self.turns)}
        leaves = [turn for turn in self.turns if not turn.successors]
        return sorted(leaves, key=lambda leaf: [order[id(turn)] for turn in leaf.path])

    def close(self, turn: Turn, reply: Completion) -> None:
        """Note the engine's reply of a turn."""
        turn.reply = reply
        # A reply that the environment kept short is no sign of a model that cannot end.
        self.is_cut |= turn.is_last and reply.finish_reason == "length"

    def discard(self, turn: Turn) -> None:
        """Forget an open turn, as if it had not been asked for."""
        if turn not in self.turns:
            return  # the rollout has ended without it
        self.turns.remove(turn)
        if turn.parent is not None:
            turn.parent.successors -= 1

    def discard_open(self) -> None:
        """Forget all open turns: an engine may take longer to end them than anybody waits."""
        for turn in [one for one in self.turns if one.reply is None]:
            self.discard(turn)

    def rows(self) -> Rows:
        """The rollout's rows; call when every turn is closed, and there is one at least."""
        first = self.turns[0]
        end = "length" if self.is_cut else "stop"
        rows = Rows(first.given, [], [], [], [], end, [], [], self._expert_choices())
        learnt: set[int] = set()
        for leaf in self._leaves:
            if rows.token_ids:
                rows.row_starts.append(len(first.given) + len(rows.token_ids))
            for turn in leaf.path:
                given = [] if turn is first and not rows.token_ids else turn.given
                _add_given(rows, given)
                reply = turn.reply
                assert reply is not None, "a turn is still open"
                if id(turn) in learnt:
                    _add_given(rows, reply.token_ids)
                else:
                    rows.replies.append(turn)
                    rows.starts.append(len(rows.token_ids))
                    _add_reply(rows, reply)
                    learnt.add(id(turn))
        return rows

    def _expert_choices(self) -> np.ndarray:
        parts: list[np.ndarray] = []
        if not all(turn.reply and turn.reply.expert_choices for turn in self.turns):
            return np.zeros(0, np.int32)
        for leaf in self._leaves:
            choices = [_choices_of(turn) for turn in leaf.path]
            if parts:
                parts.append(np.full_like(choices[0][:1], -1))
            parts += choices
        return np.concatenate(parts).ravel()


def _choices_of(turn: Turn) -> np.ndarray:
    """[tokens from `choices_from` on, but the last; experts of a token in all layers] int32."""
    assert turn.reply is not None, "a turn is still open"
    choices = np.frombuffer(turn.reply.expert_choices, np.int32)
    tokens = turn.row_size - 1 - turn.choices_from
    if len(choices) % tokens:
        raise EngineError(f"the engine returned {len(choices)} expert choices of {tokens} tokens")
    return choices.reshape(tokens, -1)


def _add_given(rows: Rows, token_ids: list[int]) -> None:
    rows.token_ids.extend(token_ids)
    rows.logprobs.extend([0.0] * len(token_ids))


def _add_reply(rows: Rows, reply: Completion) -> None:
    start = len(rows.token_ids)
    rows.token_ids.extend(reply.token_ids)
    rows.logprobs.extend(reply.logprobs)
    rows.spans.extend(
        VersionSpan(span.version, start + span.start, start + span.end) for span in reply.spans
    )
