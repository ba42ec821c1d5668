"""Tasksets of the real package verifiers, under an interpreter that has it, by the proxy."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.data.jsonl_source import read_lines
from megatron_rl.protocol.types import Rollout, RolloutFailed
from tests.generation.proxy_site import TASK, TWO_CALLS, Site, rows_of, texts_of
from tests.protocol.real_templates import open_model
from verification.environments.fork_client import check_target
from verification.environments.settings import EnvironmentSettings

PYTHON = os.environ.get("MEGATRON_RL_VERIFIERS_PYTHON", "")
PATIENCE_S = 240.0
OF_UV = ("SSL_CERT_FILE", "HTTPS_PROXY", "UV_INDEX_URL", "UV_CACHE_DIR")
"""Variables by which uv finds packages, where they are set."""
# verifiers runs the module of a toolset as a program.
TOOLS = """
import verifiers.v1 as vf

class Book(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def look_up(self, word: str) -> str:
        '''Looks up a word.'''
        return f"{word} is a fruit"

if __name__ == "__main__":
    Book.run()
"""
TASKSET = """
import verifiers.v1 as vf
from book_v1 import Book

class WordData(vf.TaskData):
    words: list[str]

class Word(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Book(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def found(self, trace) -> float:
        print(f"task {self.hash}", flush=True)
        if "broken" in self.data.words:
            raise KeyError("of the taskset")
        told = [message.content for message in trace.tool_messages]
        return float(sum(f"{word} is a fruit" in told for word in self.data.words))

    @vf.metric
    async def calls(self, trace) -> float:
        return float(len(trace.tool_messages))

class Words(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self):
        rows = [
            {"words": ["fig", "plum"], "system_prompt": "be brief"},
            {"words": ["fig"]},
            {"words": ["plum"], "prompt": [vf.UserMessage(content="call look_up")]},
            {"words": ["broken"]},
        ]
        for row in rows:
            yield Word(WordData(**{"prompt": "call look_up", **row}), self.config.task)

__all__ = ["Words"]
"""
CONVERSATION = """
import verifiers.v1 as vf
from words_v1 import Words

class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Talk(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and interaction.trace.num_turns < 4:
                segment = await interaction.turn(f"you said {segment.last_reply}")

__all__ = ["Words", "Talk"]
"""
MODULE = """
from verification.environments import VerifiersEpisode

local = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
words = VerifiersEpisode({"taskset": {"id": "words-v1"}, "agent": local})
talk = VerifiersEpisode({"taskset": {"id": "talk-v1"}, "player": local}, correct_from=2.0)
user = VerifiersEpisode({"id": "user-sim", "taskset": {"id": "words-v1"}, "assistant": local})
nobody = VerifiersEpisode({"taskset": {"id": "nobody-v1"}, "agent": local})
"""
WRITE = """
import sys
from vf_of_tests import words
words.write_prompts(sys.argv[1], task="sums")
print(*(task.hash for task in words.environment.taskset))
"""


class Words:
    """The taskset, its prompts as lines of ours, and a generator's part that plays it."""

    def __init__(self, folder: Path) -> None:
        texts = {"book_v1": TOOLS, "words_v1": TASKSET, "talk_v1": CONVERSATION}
        for name, text in {**texts, "vf_of_tests": MODULE}.items():
            (folder / f"{name}.py").write_text(text)
        lines = folder / "prompts.jsonl"
        root = str(Path(__file__).parents[3])
        written = subprocess.run(
            [PYTHON, "-c", WRITE, str(lines)], cwd=folder, timeout=PATIENCE_S, text=True,
            check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root},
        )  # fmt: skip
        self.hashes = written.stdout.split()
        self.log = folder / "log"
        self.prompts = [line.prompt for line in read_lines(lines, task="")]
        self.settings = EnvironmentSettings(
            python=PYTHON, paths=(str(folder),), log_path=str(folder / "log"),
            start_timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S, variables=OF_UV,
        )  # fmt: skip
        self.renderer = open_model(folder, "qwen2.5")
        self.site = Site(self.renderer, self.settings, patience_s=PATIENCE_S)

    def play(self, number: int, name: str = "words", **sampling: Any) -> Any:
        """Rollout or RolloutFailed of one of the prompts."""
        self.site.target = f"vf_of_tests:{name}"
        self.site.take(self.renderer)
        return self.site.wait(self.site.hold(self.prompts[number], sampling))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Words]:
    if not PYTHON:
        pytest.skip("no verifiers: set MEGATRON_RL_VERIFIERS_PYTHON to an interpreter that has it")
    words = Words(tmp_path_factory.mktemp("verifiers"))
    yield words
    words.site.close()


def test_the_prompts_are_lines_of_ours(words: Words) -> None:
    assert [prompt.id for prompt in words.prompts] == [f"{TASK}-{n}" for n in range(4)]
    assert {prompt.task for prompt in words.prompts} == {TASK}
    assert {prompt.messages[-1].content for prompt in words.prompts} == {"call look_up"}


@pytest.mark.parametrize(
    ("number", "reward", "reason"),
    # Half a point for each word that was looked up.
    [(0, 1.0, "correct"), (1, 0.5, "agent_completed"), (2, 0.5, "agent_completed")],
)
def test_a_conversation_with_tools_is_one_row_of_the_engines_tokens(
    words: Words, number: int, reward: float, reason: str
) -> None:
    rollout = words.play(number)
    assert isinstance(rollout, Rollout), rollout
    assert rollout.score is not None
    assert (rollout.score.reward, rollout.score.reason) == (reward, reason)
    assert rollout.score.parts == {"found": reward}
    assert f"task {words.hashes[number]}" in words.log.read_text()
    first, second = words.site.engine.rows
    assert rows_of(rollout) == [second] and second[: len(first)] == first
    [text] = texts_of(rollout, words.renderer)
    assert ("be brief" in text) == (number == 0)
    # The tool is offered, called twice, and answers.
    assert '"name": "look_up"' in text[: text.index("call look_up")]
    results = text.partition(TWO_CALLS)[2]
    assert results.index("fig is a fruit") < results.index("plum is a fruit")


def test_an_environment_that_speaks_between_turns_makes_one_row(words: Words) -> None:
    rollout = words.play(0, "talk")
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert rollout.score.reward == 1.0 and rollout.score.reason != "correct"
    rows, texts = words.site.engine.rows, words.site.engine.texts
    assert len(rows) == len(rollout.spans) == 4 and rows_of(rollout) == [rows[-1]]
    [text] = texts_of(rollout, words.renderer)
    assert [f"you said {said}" in text for said in texts] == [False, True, True, False]


def test_a_failure_of_the_taskset_is_no_reward(words: Words) -> None:
    failed = words.play(3)
    assert isinstance(failed, RolloutFailed) and failed.fault == "exception"
    assert "TaskError" in failed.reason and "of the taskset" in failed.reason


def test_a_conversation_without_room_is_an_outcome(words: Words) -> None:
    # Room for the calls, and not for their results and another reply.
    rollout = words.play(0, max_new_tokens=180)
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert (rollout.score.reward, rollout.score.reason) == (0.0, "out_of_tokens")
    assert len(rollout.spans) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", "nobody"),
        ("user", r"agents without a client: \['assistant', 'user'\]; expected one"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(words: Words, name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_target(f"vf_of_tests:{name}", words.settings)
