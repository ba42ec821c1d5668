"""The tools of an MCP server; with a real server where an interpreter has the package `mcp`."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verification.environments.running import run
from verification.environments.mcp_server import Server, ServerTool
from verification.environments.policy import Call, EpisodeInput, Outcome, Reply, Say, Unavailable
from verification.environments.settings import EnvironmentFailed

PYTHON = os.environ.get("MEGATRON_RL_MCP_PYTHON", "")
SERVER = """
import os
try:
    from mcp.server import MCPServer as Server
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as Server

server = Server("words")

@server.tool()
def look(word: str) -> str:
    '''Looks up a word.'''
    if word == "unknown":
        raise ValueError("no such word")
    if word == "fatal":
        os._exit(3)
    if word == "half":
        return "\\udcff"
    return f"{word} is a fruit"

server.run()
"""
PAGED = """
import json, sys

PAGES = {None: (["seek", "find"], "b"), "b": (["look"], None)}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}

def answer(method, params):
    if method == "initialize":
        server = {"name": "paged", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": server}
    if method == "tools/list":
        names, cursor = PAGES[(params or {}).get("cursor")]
        page = {"tools": [{"name": name, "inputSchema": SCHEMA} for name in names]}
        return page | ({"nextCursor": cursor} if cursor else {})
    if method == "tools/call":
        return {"content": [{"type": "text", "text": params["arguments"]["word"] + " is a fruit"}]}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked.get("params"))
        told = {"error": {"code": -32601, "message": "no method"}} if result is None else {
            "result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
"""
MODULE = """
import os, sys
from verification.environments import mcp_episode

def is_told(prompt, run):
    return float(sum(prompt.answer in result for _, result in run.calls))

words = mcp_episode([sys.executable, os.path.join(os.path.dirname(__file__), "server.py")],
                    reward=is_told)
"""


def play(
    folder: Path, *looked_up: str, said: list[Say], server: str = SERVER, **changes: Any
) -> Any:
    """The end of an episode in which the policy looks up words at once, then replies."""
    if not PYTHON:
        pytest.skip("no mcp: set MEGATRON_RL_MCP_PYTHON to an interpreter that has it")
    (folder / "server.py").write_text(server)
    (folder / "words_of_tests.py").write_text(MODULE)

    async def answer(say: Say) -> Reply:
        said.append(say)
        if len(said) > 1:
            return Reply("done", "done")
        return Reply("", "", calls=[Call("look", {"word": word}) for word in looked_up])

    task = EpisodeInput("id", "t", [{"role": "user", "content": "look"}], answer="fruit")
    return run(
        folder, "words_of_tests:words", answer,
        task=task, python=PYTHON, paths=(str(folder),), **changes,
    )  # fmt: skip


def test_tools_of_a_server_are_offered_called_and_their_errors_told(tmp_path: Path) -> None:
    said: list[Say] = []
    assert play(tmp_path, "fig", "unknown", "plum", said=said) == Outcome(2.0, "correct")
    (tool,) = said[0].tools
    assert tool["function"]["name"] == "look"
    assert tool["function"]["parameters"]["required"] == ["word"]
    first, second, third = (message["content"] for message in said[1].messages)
    assert (first, third) == ("fig is a fruit", "plum is a fruit")
    assert second.startswith("Error") and "look" in second  # mcp 2.3 hides "no such word".


def test_a_result_that_the_server_cannot_write_is_an_error_of_the_call(tmp_path: Path) -> None:
    said: list[Say] = []
    calls = ("fig", "half", "plum", "\udcff")
    # Only the first is answered.
    end = play(tmp_path, *calls, said=said, turn_timeout_s=12.0)
    assert end == Outcome(1.0, "correct")
    first, second, third, fourth = (message["content"] for message in said[1].messages)
    assert first == "fig is a fruit" and "are no text" in fourth
    assert second == third
    assert second.startswith("Error: the server gave no answer to a call of look in 10.8 s")


def test_all_pages_of_the_list_of_tools_are_offered(tmp_path: Path) -> None:
    said: list[Say] = []
    assert play(tmp_path, "fig", said=said, server=PAGED) == Outcome(1.0, "correct")
    assert [tool["function"]["name"] for tool in said[0].tools] == ["seek", "find", "look"]


def test_a_server_that_dies_in_a_call_is_no_reward(tmp_path: Path) -> None:
    said: list[Say] = []
    with pytest.raises(EnvironmentFailed, match="no valid answer to a call of look") as failed:
        play(tmp_path, "fig", "fatal", said=said)
    assert failed.value.kind == "exception" and len(said) == 1


class ServerError(Exception):
    """In the form of mcp's own error, which comes from the server or from the client."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.error = SimpleNamespace(code=code, message=message)


def call(error: Exception) -> str:
    """What the policy reads if the client raises `error`."""

    async def call_tool(name: str, arguments: dict[str, Any]) -> None:
        raise error

    tool = tool_of(SimpleNamespace(call_tool=call_tool), 60.0)
    return asyncio.run(tool.function(word="fig"))


def tool_of(session: Any, timeout_s: float) -> ServerTool:
    told = SimpleNamespace(name="look", description="", input_schema={})
    return ServerTool(Server(session, timeout_s), told)


def test_a_server_that_falls_silent_is_an_error_of_the_call_and_is_called_no_more() -> None:
    called: list[str] = []

    async def call_tool(name: str, arguments: dict[str, Any]) -> None:
        called.append(arguments["word"])
        await asyncio.Event().wait()

    tool = tool_of(SimpleNamespace(call_tool=call_tool), 0.05)
    first, second = (asyncio.run(tool.function(word=word)) for word in ("fig", "plum"))
    assert first == second and called == ["fig"]
    assert first.startswith("Error: the server gave no answer to a call of look in 0.05 s")


def test_arguments_that_no_message_can_carry_are_told_to_the_policy() -> None:
    tool = tool_of(SimpleNamespace(), 60.0)
    assert tool.find_fault({"word": ["fig", "🙂"]}) == ""
    # Half of a surrogate pair, as a policy escapes it in the JSON of a call.
    halves = json.loads('{"word": ["\\udcff"]}')
    assert "are no text: 'utf-8' codec can't encode" in tool.find_fault(halves)
    assert tool.find_fault(["fig"]) == "the arguments of look are no object"


def test_an_error_that_the_server_answers_is_told_to_the_policy() -> None:
    # JSON-RPC 2.0: -32602 is "invalid params".
    assert call(ServerError(-32602, "word is no fruit")) == "Error: word is no fruit"


@pytest.mark.parametrize(
    "error",
    [
        ServerError(-32000, "Connection closed"),
        ServerError(-32001, "Request timed out"),
        ServerError(408, "Timed out while waiting"),
        BrokenPipeError("the pipe is broken"),
        RuntimeError("Tool look has an output schema but did not return structured content"),
    ],
)
def test_a_call_without_an_answer_is_a_failure_of_the_environment(error: Exception) -> None:
    with pytest.raises(Unavailable, match=str(error)):
        call(error)


def test_content_that_is_no_text_is_named_in_its_place() -> None:
    file, blob = SimpleNamespace(text="the file"), SimpleNamespace(blob="aGk=")
    parts = [
        SimpleNamespace(type="text", text="see"),
        SimpleNamespace(type="image", data="aGk="),
        SimpleNamespace(type="audio", data="aGk="),
        SimpleNamespace(type="resource", resource=file),
        SimpleNamespace(type="resource", resource=blob),
        SimpleNamespace(type="resource_link", uri="file:///a"),
    ]

    async def call_tool(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(content=parts, is_error=False)

    told = SimpleNamespace(name="look", description="", input_schema={})
    server = Server(SimpleNamespace(call_tool=call_tool), None)
    text = asyncio.run(ServerTool(server, told).function())
    expected = ["see", "[image omitted]", "[audio omitted]", "the file", "[resource omitted]"]
    assert text.split("\n") == [*expected, "file:///a"]
