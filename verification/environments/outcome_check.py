"""Whether an episode ended with a valid outcome. Pure.

Runs in the environment's process, under any Python from 3.9, and again in the host's.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from verification.environments.policy import Outcome, ToGrade

MAX_REASON_CHARS = 200
LARGEST_PART = 1e24
"""As in `megatron_rl/protocol/limits.py`, which the environment's Python may lack."""
REST = "environment"
"""The part of a score that the outcome's parts leave of the reward."""


class BadOutcome(ValueError):
    """An episode returned no valid outcome."""


def check_end(value: Any) -> Outcome | ToGrade:
    """What an episode returned, with plain numbers. Raises BadOutcome."""
    if isinstance(value, ToGrade):
        if not isinstance(value.text, str):
            raise BadOutcome(f"the episode returned {value!r:.200}, expected a text to grade")
        return value
    if not isinstance(value, Outcome):
        raise BadOutcome(f"the episode returned a {type(value).__name__}, expected an Outcome")
    if not isinstance(value.reason, str) or not 0 < len(value.reason) <= MAX_REASON_CHARS:
        text = repr(value.reason)[:MAX_REASON_CHARS]
        raise BadOutcome(f"the outcome's reason is {text}, expected a short name")
    if not isinstance(value.parts, Mapping):
        raise BadOutcome(f"the outcome's parts are {value.parts!r}, expected numbers by name")
    for name in value.parts:
        if not isinstance(name, str):
            raise BadOutcome(f"a part of the outcome is called {name!r}, expected text")
        if name == REST:
            raise BadOutcome(
                f"a part of the outcome is called {REST!r}, as is what all parts leave of the "
                "reward: rename it"
            )
    parts = {name: _number(name, part) for name, part in value.parts.items()}
    reward = _number("reward", value.reward)
    turns = _numbers("turn_rewards", value.turn_rewards)
    returns = _numbers("turn_returns", value.turn_returns)
    if turns and returns:
        raise BadOutcome("the outcome has turn_rewards and turn_returns, expected one of them")
    if turns and not math.isclose(sum(turns), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise BadOutcome(f"turn_rewards sum to {sum(turns)}, and the reward is {reward}")
    return Outcome(reward, value.reason, parts, turns, returns)


def _numbers(name: str, values: Any) -> list[float]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise BadOutcome(f"the outcome's {name} are {values!r:.200}, expected a list of numbers")
    return [_number(name, value) for value in values]


def _number(name: str, value: Any) -> float:
    # numpy's numbers count as Real too. NaN is not below anything.
    if not isinstance(value, numbers.Real) or not abs(value) <= LARGEST_PART:
        raise BadOutcome(
            f"the outcome's {name} is {value!r:.200}, expected a number from "
            f"-{LARGEST_PART:g} to {LARGEST_PART:g}"
        )
    return float(value)
