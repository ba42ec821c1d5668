"""Documented functions as tools of an episode.

Runs in the environment's process; standard library only. `tool_schemas.py` makes the schemas.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from verification.environments.opening import (
    call_reset,
    check_call,
    columns_of,
    end_reason,
    finished,
    opening,
)
from verification.environments.policy import (
    Call,
    Chat,
    EpisodeInput,
    Outcome,
    Policy,
    ToGrade,
    Unavailable,
)
from verification.environments.tool_schemas import Tool

MAX_RESULT_CHARS = 20_000


@dataclass(frozen=True)
class ToolRun:
    """A finished conversation with tools, for the reward function."""

    text: str
    """The policy's last turn, without reasoning."""
    calls: list[tuple[Call, str]]
    """Calls with their results, in order; faulty ones too."""
    state: Any
    """The object whose methods the tools are; None for plain functions."""


@dataclass(frozen=True)
class Limits:
    """Of a conversation with tools; as the arguments of `tools_episode`."""

    max_turns: int = 8
    max_tokens: int | None = None
    max_result_chars: int = MAX_RESULT_CHARS


def check_reward(reward: Callable[..., Any] | None) -> None:
    """Raise TypeError for a reward function that takes other arguments."""
    if reward is not None:
        check_call(reward, f"reward={getattr(reward, '__name__', reward)}", "prompt", "run")


async def converse(
    prompt: EpisodeInput, policy: Policy, tools: list[Any], *, state: Any,
    reward: Callable[..., Any] | None, limits: Limits,
) -> Outcome | ToGrade:  # fmt: skip
    """Let the policy call tools until a turn without a call. tools: with the methods of `Tool`."""
    by_name = {tool.name: tool for tool in tools}
    chat = policy.chat(prompt.messages, tools=[tool.schema for tool in tools])
    calls: list[tuple[Call, str]] = []
    for _ in range(limits.max_turns):
        reply = await chat.say(max_tokens=limits.max_tokens)
        if not reply.calls and not reply.faults:
            if reward is None:
                return ToGrade(reply.text)
            value = await finished(reward(prompt, ToolRun(reply.content, calls, state)))
            is_end = isinstance(value, (Outcome, ToGrade))
            return value if is_end else Outcome(value, end_reason(value, "answered"))
        await _answer(chat, reply.calls, by_name, calls, limits.max_result_chars)
        for fault in reply.faults:
            chat.add("tool", f"Error: {fault}")
    return Outcome(0.0, "out_of_turns")


def tools_episode(
    tools: Iterable[Callable[..., Any]] | type, *, reward: Callable[..., Any] | None = None,
    max_turns: int = 8, max_tokens: int | None = None, max_result_chars: int = MAX_RESULT_CHARS,
) -> Callable[[EpisodeInput, Policy], Coroutine[Any, Any, Outcome | ToGrade]]:  # fmt: skip
    """Episode in which the policy calls tools until a turn without a call, then is rewarded.

    tools: functions with a docstring and annotated arguments; or a class, of which each episode has
        its own object: its public methods are the tools, but for `reset`, called first. It takes
        the prompt; or by name `seed`, `prompt`, `messages`, `answer`, `entry` and keys of an entry.
        If it returns an observation, the prompt's last message ends with it. Functions may be
        async. A faulty call, or a tool's exception other than `Unavailable`, is a message to the
        policy.
    reward: `reward(prompt, run: ToolRun)` returns a number, an `Outcome` or `ToGrade`; may be
        async. A number from 1 on has the reason "correct". None: the verifier grades the last
        reply, by the task's `compare`.
    max_turns: ends the episode with reward 0 and reason "out_of_turns".
    max_result_chars: of a longer result the policy sees the start.
    Raises TypeError for a tool without docstring or annotations and for a class or a reward that
    takes other arguments, ValueError for two tools of one name.
    """
    source = tools if isinstance(tools, type) else list(tools)
    if isinstance(source, type):
        check_call(source, source.__name__)
    _tools(source)  # raises for tools that are none
    check_reward(reward)
    limits = Limits(max_turns, max_tokens, max_result_chars)

    async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome | ToGrade:
        state, known = _tools(source)
        if hasattr(state, "reset"):
            columns = columns_of(prompt)
            observation = await finished(call_reset(state.reset, prompt, columns))
            if observation is not None:
                prompt = replace(prompt, messages=opening(prompt, str(observation)))
        return await converse(prompt, policy, known, state=state, reward=reward, limits=limits)

    episode.__dict__["form"] = "tools"  # For `load`.
    return episode


def _tools(source: type | list[Callable[..., Any]]) -> tuple[Any, list[Tool]]:
    """(object, its tools); (None, tools) of plain functions."""
    if not isinstance(source, type):
        tools = [Tool(function) for function in source]
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several tools are called {', '.join(twice)}: rename all but one")
        return None, tools
    state = source()
    methods = inspect.getmembers(state, inspect.ismethod)
    public = [method for name, method in methods if name != "reset" and not name.startswith("_")]
    return state, [Tool(method) for method in public]


async def _answer(
    chat: Chat, calls: list[Call], tools: dict[str, Tool], done: list[tuple[Call, str]],
    max_chars: int,
) -> None:  # fmt: skip
    """Run calls in order; add their results to the chat and to `done`."""
    for call in calls:
        result = await _call(call, tools)
        if len(result) > max_chars:
            result = f"{result[:max_chars]}\n[{len(result) - max_chars} more characters]"
        chat.add("tool", result, name=call.name, call_id=call.id)
        done.append((call, result))


async def _call(call: Call, tools: dict[str, Tool]) -> str:
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no tool {call.name!r}. Tools: {', '.join(tools)}"
    fault = tool.find_fault(call.arguments)
    if fault:
        return f"Error: {fault}"
    try:
        result = await finished(tool.function(**call.arguments))
        # In the try: the policy can cause a result that JSON cannot hold.
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except Unavailable:
        raise
    # The policy sees whatever its call raised: code that it wrote may call exit().
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return f"Error: {type(error).__name__}: {error}"
