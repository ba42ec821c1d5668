"""Episodes of a real OpenEnv server, under an interpreter that has the package."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.launcher.ports import find_free
from verification.environments.fork_client import check_target
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

class Pair(Guess):
    unit: str

class Told(Observation):
    hint: str

REWARDS = {91: None, 92: float("nan"), 93: float("inf"), 94: True}

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
        if action.number > 90:
            return Told(hint="over", done=True, reward=REWARDS[action.number])
        if action.number == self.secret:
            return Told(hint="right", done=True, reward=1.0)
        return Told(hint=f"not {action.number}", done=False, reward=-0.25)
    @property
    def state(self):
        return self.state_

app = create_app(Game, Guess, Told, env_name="guess", max_concurrent_envs=3)
# A server whose schema of observations has no fields of its own.
app.mount("/pair", create_app(Game, Pair, Observation, env_name="pair"))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
MODULE = """
from verification.environments import open_env_episode

def act(text):
    return {{}} if text == "nothing" else {{"number": int(text)}}

guess = open_env_episode("{url}", action=act, observation="hint")
named = open_env_episode("{url}/", action="number", observation="hint")
told = open_env_episode("{url}", action="number", observation="hnt")
acted = open_env_episode("{url}", action="nmber", observation="hint")
paired = open_env_episode("{url}/pair", action="number", observation="hint")
made = open_env_episode("{url}/pair", action=act, observation="hint")

async def late(prompt, policy):
    # The server was down at the load, so its fields were not checked.
    return await acted(prompt, policy)
"""


Host = tuple[asyncio.Runner, EnvironmentHost, EnvironmentSettings]


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
            yield runner, opened, settings
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


def play(host: Host, replies: list[str], name: str = "guess") -> tuple[Outcome, list[str]]:
    """The outcome, and what the policy was told."""
    runner, environments, _ = host
    told: list[str] = []
    waiting = iter(replies)

    async def answer(say: Say) -> Reply:
        told.append(say.messages[-1]["content"])
        text = next(waiting)
        return Reply(text, text)

    messages = [{"role": "user", "content": "A game."}]
    prompt = EpisodeInput("id", "t", messages, entry={"secret": 4}, seed=3)
    ended = runner.run(environments.run(f"open_of_tests:{name}", prompt, answer))
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


@pytest.mark.parametrize("reply", ["91", "92", "93"])
def test_an_end_without_a_reward_is_no_reward_of_0(host: Host, reply: str) -> None:
    with pytest.raises(EnvironmentFailed, match="reward was null in every step") as failed:
        play(host, [reply])
    assert failed.value.kind == "bad_outcome"


def test_a_step_without_a_reward_adds_nothing(host: Host) -> None:
    assert play(host, ["4", "91"])[0] == Outcome(-0.25, "game_over")
    assert play(host, ["4", "94"])[0] == Outcome(0.75, "game_over")


def test_fields_that_the_server_lacks_are_refused_at_the_start(host: Host) -> None:
    _, _, settings = host
    for fits in ("named", "made"):
        assert check_target(f"open_of_tests:{fits}", settings) == "function"
    for name, says in {
        "acted": r"action .* no field 'nmber'; it has .*'number'\]: name",
        "paired": r"needs the fields \['unit'\] too: give action= a function",
        "told": r"observation .* no field 'hnt'; it has \['hint', 'metadata'\]",
    }.items():
        with pytest.raises(InputError, match=says):
            check_target(f"open_of_tests:{name}", settings)


def test_a_wrong_field_is_not_the_policy_s_fault(host: Host) -> None:
    with pytest.raises(EnvironmentFailed, match="no field 'nmber'"):
        play(host, ["4"], "late")
    assert play(host, ["five"], "named")[0] == Outcome(0.0, "invalid_action")
