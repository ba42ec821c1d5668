"""The tools of a real MCP server, where an interpreter has the packages."""

import asyncio
import sys
from pathlib import Path

import pytest

from verification.environments.host import EnvironmentHost
from verification.environments.policy import Call, EpisodeInput, Reply, Say
from verification.environments.settings import EnvironmentSettings

MODULE = """
import sys
from verification.environments import mcp_episode

def is_told(prompt, run):
    return float(any(prompt.answer in result for _, result in run.calls))

clock = mcp_episode([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"],
                    reward=is_told)
"""


def test_tools_of_a_server_are_offered_called_and_their_errors_told(tmp_path: Path) -> None:
    pytest.importorskip("mcp_server_time")
    (tmp_path / "clock_of_tests.py").write_text(MODULE)
    said: list[Say] = []

    async def answer(say: Say) -> Reply:
        said.append(say)
        if len(said) > 1:
            return Reply("done", "done")
        wanted = [{"timezone": "UTC"}, {"timezone": "Nowhere"}]
        return Reply("", "", calls=[Call("get_current_time", one) for one in wanted])

    async def play() -> float:
        settings = EnvironmentSettings(
            python=sys.executable, paths=(str(tmp_path),), log_path=str(tmp_path / "log")
        )
        task = EpisodeInput("id", "t", [{"role": "user", "content": "time?"}], answer='"UTC"')
        async with EnvironmentHost(settings) as host:
            return (await host.run("clock_of_tests:clock", task, answer)).reward

    assert asyncio.run(play()) == 1.0
    assert [tool["function"]["name"] for tool in said[0].tools] == [
        "get_current_time", "convert_time"
    ]  # fmt: skip
    good, bad = (message["content"] for message in said[1].messages)
    assert '"timezone": "UTC"' in good and bad.startswith("Error: ") and "Nowhere" in bad
