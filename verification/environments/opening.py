"""How an episode begins: imports of its form, checks and calls of what the user wrote.

Runs in the environment's process; standard library only.
"""

from __future__ import annotations

import importlib
import inspect
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verification.environments.policy import EpisodeInput


async def finished(value: Any) -> Any:
    """The value, or what it yields when it is awaited."""
    return await value if inspect.isawaitable(value) else value


def end_reason(reward: Any, other: str) -> str:
    """The reason of an outcome that has none: "correct" from a reward of 1 on, else the other one.

    Accuracies count the reason "correct".
    """
    # Sums of rewards such as 0.1 are rounded. What is no number is refused later.
    return "correct" if isinstance(reward, numbers.Real) and reward >= 1 - 1e-6 else other


def import_client(module: str, package: str) -> None:
    """Import what each episode needs. package: its name and versions, for the ImportError."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{error}; expected the package {package} for {sys.executable}: install it there, or "
            "set expert.environments.python"
        ) from error


def check_call(function: Callable[..., Any], name: str, *expected: str) -> None:
    """Raise TypeError unless a function of the user's takes these arguments, by position."""
    try:
        # A decorator that calls the function with more is called without.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:
        return  # Functions in C may have none.
    try:
        signature.bind(*expected)
    except TypeError as error:
        raise TypeError(
            f"{name} takes {signature}, and must take ({', '.join(expected)}): {error}; give other "
            "parameters defaults, or remove them"
        ) from error


def call_reset(
    reset: Callable[..., Any], prompt: EpisodeInput, columns: Mapping[str, Any] | None = None
) -> Any:
    """Call the user's `reset` with what its parameters name.

    It may take `seed`, `prompt` and names of `columns`, or the prompt as its only argument without
    a default. columns: of a class with tools, whose `**kwargs` get all of them, as in TRL's
    environment_factory; if it names none, it gets the prompt. None: a game of Gymnasium's form.
    """
    known = {**(columns or {}), "seed": prompt.seed, "prompt": prompt}
    parameters = inspect.signature(reset).parameters.values()
    if columns is not None and any(each.kind is each.VAR_KEYWORD for each in parameters):
        return reset(**known)
    named = {each.name: known[each.name] for each in parameters if each.name in known}
    places = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    required = [each.name for each in places if _is_required(each)]
    is_unnamed = len(required) == 1 and required[0] not in known
    if is_unnamed or (columns is not None and places and not named):
        return reset(prompt)
    return reset(**named)


def _is_required(parameter: inspect.Parameter) -> bool:
    is_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return is_place and parameter.default is parameter.empty


def columns_of(prompt: EpisodeInput) -> dict[str, Any]:
    """What a class that was written for TRL takes as columns of its row."""
    entry = prompt.entry if isinstance(prompt.entry, dict) else {}
    own = {"messages": prompt.messages, "answer": prompt.answer, "entry": prompt.entry}
    return {str(name): value for name, value in entry.items()} | own


def opening(prompt: EpisodeInput, observation: str) -> list[dict[str, Any]]:
    """The prompt's messages and the first observation, in one message of the user."""
    messages = [dict(message) for message in prompt.messages]
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{observation}"
        return messages
    return [*messages, {"role": "user", "content": observation}]
