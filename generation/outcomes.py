"""What an environment is given with its prompt, and what its outcome means for the rollout. Pure.

Used by `episodes.py`.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from generation.conversation import Turn
from megatron_rl.protocol.rollout import TurnReturn
from megatron_rl.protocol.types import Score
from verification.environments.policy import Outcome
from verification.environments.settings import EnvironmentFailed

_NO_NAME = re.compile(r"[^A-Za-z0-9_.]+")
_REASON_CHARS = 64
_REST = "environment"
"""The part of a score that the other parts leave of the reward."""

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
    others = {name: part for name, part in outcome.parts.items() if name != _REST}
    rest = outcome.reward - sum(others.values())
    parts = others | ({_REST: rest} if rest or not others else {})
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
