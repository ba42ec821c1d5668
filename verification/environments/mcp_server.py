"""Tools of an MCP server, as an episode.

Runs in the environment's process, whose interpreter needs the package `mcp` (2.3.0 or later):
`expert.environments.python`. Imports it only when an episode begins.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from verification.environments.policy import EpisodeInput, Outcome, Policy, ToGrade
from verification.environments.tools import MAX_RESULT_CHARS, Limits, converse


class ServerTool:
    """A tool of the server, with the methods of `tool_schemas.Tool`."""

    def __init__(self, session: Any, told: Any) -> None:
        self._session = session
        self.name: str = told.name
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": told.name,
                "description": told.description or told.name,
                "parameters": told.input_schema,
            },
        }

    def find_fault(self, arguments: Any) -> str:
        """Arguments are the server's to check."""
        return "" if isinstance(arguments, dict) else f"the arguments of {self.name} are no object"

    async def function(self, **arguments: Any) -> str:
        """The text of the result; the server's own errors are texts too."""
        result = await self._session.call_tool(self.name, arguments)
        texts = [part.text for part in result.content if hasattr(part, "text")]
        return ("Error: " if result.is_error else "") + "\n".join(texts)


def mcp_episode(
    command: Sequence[str], *, reward: Callable[..., Any] | None = None, max_turns: int = 8,
    max_tokens: int | None = None, max_result_chars: int = MAX_RESULT_CHARS,
) -> Callable[[EpisodeInput, Policy], Coroutine[Any, Any, Outcome | ToGrade]]:  # fmt: skip
    """Episode with the tools of an MCP server over stdio, which each episode starts for itself.

    command: program and arguments. The rest is as for `tools_episode`; `run.state` is the session.
    """
    limits = Limits(max_turns, max_tokens, max_result_chars)

    async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome | ToGrade:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        server = StdioServerParameters(command=command[0], args=list(command[1:]))
        async with stdio_client(server) as (reads, writes):
            async with ClientSession(reads, writes) as session:
                await session.initialize()
                listed = await session.list_tools()
                tools = [ServerTool(session, told) for told in listed.tools]
                return await converse(
                    prompt, policy, tools, state=session, reward=reward, limits=limits
                )

    episode.__dict__["form"] = "tools"  # For `load`.
    return episode
