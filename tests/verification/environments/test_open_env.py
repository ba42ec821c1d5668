"""Episodes of a real OpenEnv server, under an interpreter that has the package."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from megatron_rl.launcher.ports import find_free
from verification.environments.host import EnvironmentHost
from verification.environments.policy import EpisodeInput, Outcome, Reply, Say
from verification.environments.settings import EnvironmentFailed, EnvironmentSettings

PYTHON = os.environ.get("MEGATRON_RL_OPENENV_PYTHON", "")
SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Told(Observation):
    hint: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.state_, self.secret = State(step_count=0), -1
    def reset(self, seed=None, episode_id=None, secret=0, **others):
        self.secret = secret + seed % 2
        return Told(hint="guess", done=False, reward=None)
    def step(self, action, **others):
        if action.number < 0:
            raise KeyError("broken")
        self.state_.step_count += 1
        if action.number == self.secret:
            return Told(hint="right", done=True, reward=1.0)
        return Told(hint=f"not {action.number}", done=False, reward=-0.25)
    @property
    def state(self):
        return self.state_

app = create_app(Game, Guess, Told, env_name="guess", max_concurrent_envs=3)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
MODULE = """
from verification.environments import open_env_episode

def act(text):
    return {{}} if text == "nothing" else {{"number": int(text)}}

guess = open_env_episode("{url}", action=act, observation="hint")
"""


Host = tuple[asyncio.Runner, EnvironmentHost]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if not PYTHON:
        pytest.skip("no openenv: set MEGATRON_RL_OPENENV_PYTHON to an interpreter that has it")
    folder, port = tmp_path_factory.mktemp("openenv"), find_free("127.0.0.1")
    (folder / "server.py").write_text(SERVER)
    (folder / "open_of_tests.py").write_text(MODULE.format(url=f"http://127.0.0.1:{port}"))
    settings = EnvironmentSettings(
        python=PYTHON, paths=(str(folder),), log_path=str(folder / "log"), start_timeout_s=120
    )
    with (
        subprocess.Popen([PYTHON, folder / "server.py", str(port)]) as server,
        asyncio.Runner() as runner,
    ):
        try:
            _await_port(port, limit_s=120)
            opened = EnvironmentHost(settings)
            yield runner, opened
            runner.run(opened.close())
        finally:
            server.kill()


def _await_port(port: int, *, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.1)


def play(host: Host, replies: list[str]) -> tuple[Outcome, list[str]]:
    """The outcome, and what the policy was told."""
    runner, environments = host
    told: list[str] = []
    waiting = iter(replies)

    async def answer(say: Say) -> Reply:
        told.append(say.messages[-1]["content"])
        text = next(waiting)
        return Reply(text, text)

    messages = [{"role": "user", "content": "A game."}]
    prompt = EpisodeInput("id", "t", messages, entry={"secret": 4}, seed=3)
    ended = runner.run(environments.run("open_of_tests:guess", prompt, answer))
    assert isinstance(ended, Outcome)
    return ended, told


@pytest.mark.parametrize(
    ("replies", "reward", "reason"),
    [
        (["4", "6", "5"], 0.5, "game_over"),  # the secret is 4 + 3 % 2
        (["4", "five"], -0.25, "invalid_action"),
        (["4", "nothing"], -0.25, "invalid_action"),
    ],
)
def test_an_episode_plays_a_session_of_its_own(
    host: Host, replies: list[str], reward: float, reason: str
) -> None:
    outcome, told = play(host, replies)
    assert (outcome.reward, outcome.reason) == (reward, reason)
    assert told == ["A game.\n\nguess", *(f"not {text}" for text in replies[:-1])]


def test_a_fault_of_the_server_is_no_reward(host: Host) -> None:
    with pytest.raises(EnvironmentFailed, match="broken"):
        play(host, ["4", "-1"])
