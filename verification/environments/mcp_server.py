"""Tools of an MCP server, as an episode.

Runs in the environment's process, whose interpreter needs the package `mcp` (from 1.30 on, 2.3 is
the latest tried): `expert.environments.python`. The fork server imports it before it forks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verification.environments.opening import import_client
from verification.environments.policy import EpisodeInput, Outcome, Policy, ToGrade, Unavailable
from verification.environments.tools import MAX_RESULT_CHARS, Limits, check_reward, converse

MOST_PAGES = 100
"""Pages of a server's list of tools."""
_SHARE_OF_TURN = 0.9
"""Of the time between two requests of an environment, which ends the episode."""
_OF_THE_CLIENT = (-32000, -32001, 408)
"""Codes of errors that the client makes itself: connection closed; timeout of mcp 2, and 1."""


@dataclass
class Server:
    """A server with its session."""

    session: Any
    timeout_s: float | None
    """Of a call. A server of mcp that fails to write an answer writes no more, and never ends."""
    silence: str = ""
    """The error of the call that it did not answer, and of later ones."""


class ServerTool:
    """A tool of the server, with the methods of `tool_schemas.Tool`."""

    def __init__(self, server: Server, told: Any) -> None:
        self._server = server
        self.name: str = told.name
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": told.name,
                "description": told.description or told.name,
                "parameters": _of_either(told, "input_schema", "inputSchema"),
            },
        }

    def find_fault(self, arguments: Any) -> str:
        """Arguments are the server's to check, but for text that no message can carry."""
        if not isinstance(arguments, dict):
            return f"the arguments of {self.name} are no object"
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"the arguments of {self.name} are no text: {error}"
        return ""

    async def function(self, **arguments: Any) -> str:
        """The text of the server's answer, an error too; an error if there is none in time.

        Raises Unavailable if the connection is lost.
        """
        server = self._server
        if server.silence:
            return server.silence
        try:
            calling = server.session.call_tool(self.name, arguments)
            result = await asyncio.wait_for(calling, server.timeout_s)
        except asyncio.TimeoutError:  # noqa: UP041  Another class before Python 3.11.
            server.silence = (
                f"Error: the server gave no answer to a call of {self.name} in "
                f"{server.timeout_s:g} s, and is called no more"
            )
            sys.stderr.write(f"{server.silence} (expert.environments.turn_timeout_s)\n")
            return server.silence
        # A lost connection has many types: anyio's, the system's, and codes of mcp's own error.
        except Exception as error:  # noqa: BLE001
            answer = getattr(error, "error", None)
            if not isinstance(code := getattr(answer, "code", None), int) or code in _OF_THE_CLIENT:
                raise Unavailable(
                    f"the MCP server gave no valid answer to a call of {self.name}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            return f"Error: {getattr(answer, 'message', '')}"
        is_error = _of_either(result, "is_error", "isError")
        return ("Error: " if is_error else "") + "\n".join(map(_text_of, result.content))


def _text_of(part: Any) -> str:
    """A part of a result as text; what is no text, such as an image, by its kind."""
    held = getattr(part, "resource", part)  # The texts of a file are one deeper.
    if hasattr(held, "text"):
        return str(held.text)
    if part.type == "resource_link":
        return str(part.uri)
    return f"[{part.type} omitted]"


async def _listed(session: Any) -> list[Any]:
    """The tools of all pages of the server's list. Raises Unavailable if the list does not end."""
    from mcp.types import PaginatedRequestParams

    found: list[Any] = []
    params = None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=params)
        found += page.tools
        if not (cursor := _of_either(page, "next_cursor", "nextCursor")):
            return found
        params = PaginatedRequestParams(cursor=cursor)
    raise Unavailable(f"the MCP server's list of tools has more than {MOST_PAGES} pages")


def _of_either(told: Any, name: str, old_name: str) -> Any:
    """A field of mcp 2, or as mcp 1 names it."""
    return getattr(told, name) if hasattr(told, name) else getattr(told, old_name)


def mcp_episode(
    command: Sequence[str], *, reward: Callable[..., Any] | None = None, max_turns: int = 8,
    max_tokens: int | None = None, max_result_chars: int = MAX_RESULT_CHARS,
) -> Callable[[EpisodeInput, Policy], Coroutine[Any, Any, Outcome | ToGrade]]:  # fmt: skip
    """Episode with the tools of an MCP server over stdio, which each episode starts for itself.

    command: program and arguments. The rest is as for `tools_episode`; `run.state` is the session.
    A call without an answer in 0.9 of `expert.environments.turn_timeout_s` is an error that the
    policy reads, as is each later one of the episode.
    """
    check_reward(reward)
    limits = Limits(max_turns, max_tokens, max_result_chars)

    async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome | ToGrade:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        started = StdioServerParameters(command=command[0], args=list(command[1:]))
        async with stdio_client(started) as (reads, writes):
            async with ClientSession(reads, writes) as session:
                await session.initialize()
                limit_s = _SHARE_OF_TURN * prompt.turn_timeout_s or None
                server = Server(session, limit_s)
                tools = [ServerTool(server, told) for told in await _listed(session)]
                return await converse(
                    prompt, policy, tools, state=session, reward=reward, limits=limits
                )

    # For the fork server.
    prepare = partial(import_client, "mcp.client.stdio", "mcp, 1.30 or later,")
    episode.__dict__.update(form="tools", prepare=prepare)
    return episode
