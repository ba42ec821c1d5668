"""Every file of docs/agents.md does what the page says."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.data.prompts import read_prompts
from tests.verification.environments.running import Running, prompt, replies
from verification.environments.policy import Call, JudgeInput, Outcome, Reply, Say, Verdict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
_FILE = re.compile(r"^\*\*`([\w.]+)`\*\*[^\n]*\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("agents")
    for name, text in _FILE.findall(PAGE.read_text()):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with Running(folder, paths=(str(folder),)) as running:
        yield running


def test_every_prompt_of_the_page_has_an_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_config(Path("my_run.toml"), [])
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert {line["task"] for line in lines} == config.reward.environments.keys()
    assert set(config.reward.environments.values()) == {
        "my_agents:guess", "my_agents:Countdown", "my_agents:calculator",
    }  # fmt: skip
    assert len(read_prompts(config.prompts, 0).divide().all) == len(lines)


def test_game_as_a_function_rewards_early_guesses(running: Running) -> None:
    said: list[Say] = []
    policy = replies("It is 5.", "8", "7", said=said)
    outcome = running.play("my_agents:guess", policy, answer="7")
    assert (outcome.reward, outcome.reason) == (pytest.approx(0.8), "correct")
    assert [say.messages[-1]["content"] for say in said[1:]] == ["higher", "lower"]
    lost = running.play("my_agents:guess", replies("no"), answer="7")
    assert (lost.reward, lost.reason) == (0.0, "no_number")


def test_game_as_a_class_is_won_by_its_known_strategy(running: Running) -> None:
    # Whoever leaves a multiple of four wins: 9 - 1 = 8, the game takes 1, 7 - 3 = 4, and so on.
    won = running.play("my_agents:Countdown", replies("1", "3", "3"), answer="9")
    assert won.reward == 1.0
    lost = running.play("my_agents:Countdown", replies("2", "3", "3"), answer="9")
    assert lost.reward == 0.0


def test_tools_of_the_page_earn_a_reward_by_a_call_alone(running: Running) -> None:
    told: list[Say] = []

    async def calls(say: Say) -> Reply:
        told.append(say)
        if len(told) == 1:
            return replace(Reply("", ""), calls=[Call("add", {"a": 1234, "b": 8765})])
        return Reply("It is 9999.", "It is 9999.")

    assert running.play("my_agents:calculator", calls, answer="9999").reward == 1.0
    assert told[1].messages == [{"role": "tool", "content": "9999", "name": "add"}]
    assert running.play("my_agents:calculator", replies("9999"), answer="9999").reward == 0.0


async def prefers_short_answers(given: JudgeInput) -> Verdict:
    """A judge by whom answer A wins by a nat for each character that B is longer."""
    found = re.findall(r"^\[answer (.) \w+\]\n(.*)$", given.messages[0]["content"], re.MULTILINE)
    length = {name: len(text) for name, text in found}
    return Verdict([float(length["B"] - length["A"]), 0.0], "")


def compare(running: Running, name: str, *texts: str) -> Outcome:
    given = prompt(answer="four")
    host = running.host
    return running.wait(
        host.run(f"my_pairs:{name}", given, replies(*texts), judge=prefers_short_answers)
    )


def test_a_reply_is_compared_with_the_answer(running: Running) -> None:
    # "four" has one character less than "fives": the odds are 1 to e.
    outcome = compare(running, "against_reference", "fives")
    assert (outcome.reward, outcome.reason) == (pytest.approx(1 / (1 + math.e)), "worse")
    assert compare(running, "against_reference", "one").reason == "correct"


def test_replies_of_a_completion_are_compared_with_each_other(running: Running) -> None:
    outcome = compare(running, "against_itself", "a", "bb", "cc", "ddd")
    # "ddd" loses by one nat twice and by two once, "a" wins as much, the others win and lose one.
    last = (2 / (1 + math.e) + 1 / (1 + math.e**2)) / 3
    assert outcome.turn_returns == pytest.approx([1 - last, 0.5, 0.5, last])
    assert outcome.reward == pytest.approx(1 - last)
