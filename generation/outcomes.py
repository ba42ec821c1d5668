"""What an environment is given, what its outcome means for the rollout, and what was said. Pure.

Used by `episodes.py`.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from generation.conversation import Rows, Turn
from megatron_rl.protocol.chat_template import Turn as Message
from megatron_rl.protocol.rollout import TOOLS, ConversationTurn, GivenMessage, TurnReturn
from megatron_rl.protocol.types import Score, escaped
from verification.environments.outcome_check import REST
from verification.environments.policy import Outcome
from verification.environments.settings import EnvironmentFailed

_NO_NAME = re.compile(r"[^A-Za-z0-9_.]+")
_REASON_CHARS = 64
_ROUNDING = 1e-9
"""A rest of the reward that is smaller is none: 0.7 + 0.2 + 0.1 is not 1."""

Earned = tuple[Score, list[TurnReturn]]


def read_entry(entry: str) -> Any:
    """The prompt's JSON; another text as it is."""
    try:
        return msgspec.json.decode(entry) if entry else None
    except msgspec.DecodeError:
        return entry


def earned_by(outcome: Outcome, asked: Sequence[Turn], learnt: Sequence[Turn]) -> Earned:
    """The score, and the returns of the replies if they are rewarded.

    asked: all turns in the order of asking; learnt: the same in the order of their tokens. Raises
    EnvironmentFailed for an outcome that the queue would refuse, or of other replies.
    """
    earned = score_of(outcome), _returns(outcome, asked, learnt)
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(earned), type=Earned)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise EnvironmentFailed(f"its outcome cannot be sent: {error}", "bad_outcome") from error


def score_of(outcome: Outcome) -> Score:
    """The outcome's score."""
    rest = outcome.reward - sum(outcome.parts.values())
    has_rest = abs(rest) > _ROUNDING or not outcome.parts
    parts = outcome.parts | ({REST: rest} if has_rest else {})
    # It becomes part of a metric's name.
    reason = _NO_NAME.sub("_", outcome.reason)[:_REASON_CHARS]
    return Score(outcome.reward, parts, reason, is_outcome=True)


def _returns(outcome: Outcome, asked: Sequence[Turn], learnt: Sequence[Turn]) -> list[TurnReturn]:
    values = list(itertools.accumulate(reversed(outcome.turn_rewards)))[::-1]
    values = values or outcome.turn_returns
    if not values:
        return []
    if len(values) != len(asked):
        name = "turn_rewards" if outcome.turn_rewards else "turn_returns"
        raise EnvironmentFailed(f"{len(values)} {name} of {len(asked)} replies", "bad_outcome")
    number_of = {id(turn): number for number, turn in enumerate(asked)}
    return [
        TurnReturn(number, len(turn.reply_ids), values[number])
        for turn in learnt
        for number in [number_of[id(turn)]]
    ]


def turns_of(
    rows: Rows,
    asked: Sequence[Turn],
    *,
    decode: Callable[[Sequence[int]], str],
    began_at: float,
) -> list[ConversationTurn]:
    """The turns of a conversation, for people, in the order of their tokens.

    asked: the same in the order of asking. began_at: time.monotonic() of its begin.
    """
    number_of = {id(turn): number for number, turn in enumerate(rows.replies)}
    asked_before = {id(turn): number for number, turn in enumerate(asked)}
    found = []
    for turn, start in zip(rows.replies, rows.starts, strict=True):
        assert turn.asked is not None and turn.reply is not None
        follows, messages, tools = turn.asked
        offered = [GivenMessage(TOOLS, escaped(json.dumps(tools)))] if tools else []
        found.append(
            ConversationTurn(
                start,
                start + len(turn.reply_ids),
                -1 if follows is None else number_of[id(follows)],
                [*offered, *map(_given, messages)],
                escaped(decode(turn.reply_ids)),
                round(turn.asked_at - began_at, 3),
                round(turn.replied_at - began_at, 3),
                turn.row_size - len(turn.reply_ids),
                turn.reply.cached_tokens,
                asked_before[id(turn)],
            )
        )
    return found


def _given(message: Message) -> GivenMessage:
    calls = message.get("tool_calls")
    texts = [message.get("content"), json.dumps(calls, default=str) if calls else None]
    content = "\n".join(text for text in texts if text)
    return GivenMessage(*map(escaped, (message["role"], content, message.get("name") or "")))
