"""The three forms of an environment, chats, forks, limits; real processes."""

import ast
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import verification.environments
from tests.verification.environments.running import Running, replies, run
from verification.environments.policy import Call, Outcome, PolicyLimit, Reply, Say
from verification.environments.settings import EnvironmentFailed


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("games")) as running:
        yield running


LATE = {"mcp_server": "mcp", "open_env": "openenv", "verifiers_tasks": "verifiers"}
GO = {"role": "user", "content": "go"}


def _added(said: list[Say]) -> list[list[tuple[str, str]]]:
    return [[(part["role"], part["content"]) for part in say.messages] for say in said]


def test_a_function_talks_until_it_returns_an_outcome(games: Running) -> None:
    said: list[Say] = []
    outcome = games.play("games:guess", replies("4", "8", "6", said=said), answer="6")
    assert outcome == Outcome(1 - 0.1 * 2, "correct", {"turns": 3.0})
    assert said == [
        Say(0, None, 0, [GO], [], 64),
        Say(0, None, 0, [{"role": "user", "content": "higher"}], [], 64),
        Say(0, None, 0, [{"role": "user", "content": "lower"}], [], 64),
    ]


@pytest.mark.parametrize(
    ("target", "texts", "outcome", "seen"),
    [
        ("Countdown", "43", Outcome(0.5, "game_over"), ["go\n\n7 left", "3 left"]),
        ("Countdown", "1114", Outcome(1.0, "correct"),
         ["go\n\n7 left", "6 left", "5 left", "4 left"]),
        ("Gymnasium", "43", Outcome(0.5, "won"), ["go\n\n7 left", "3 left"]),
        ("Gymnasium", "111", Outcome(0.75, "truncated"), ["go\n\n7 left", "6 left", "5 left"]),
        ("TextArena", "43", Outcome(-1.0, "game_over"), ["go\n\n7 left", "3 left"]),
        ("TextArena", "9", Outcome(-1.0, "invalid_move"), ["go\n\n7 left"]),
        ("short_countdown", "11", Outcome(0.5, "out_of_turns"), ["go\n\n7 left", "6 left"]),
    ],
)  # fmt: skip
def test_a_game_is_played_and_its_rewards_summed(
    games: Running, target: str, texts: str, outcome: Outcome, seen: list[str]
) -> None:
    said: list[Say] = []
    answer = replies(*texts, said=said)
    assert games.play(f"games:{target}", answer, seed=7) == outcome
    assert _added(said) == [[("user", text)] for text in seen]
    assert {say.max_tokens for say in said} == {5 if target == "short_countdown" else None}


@pytest.mark.parametrize(
    ("step", "reward"),
    [("('', 1, True)", 1.0), ("('', 'x' == 'x', True)", None), ("('', '0.5', True)", None),
     ("('', None, True)", None)],
)  # fmt: skip
def test_a_game_rewards_by_a_number(games: Running, step: str, reward: float | None) -> None:
    if reward is not None:
        assert games.play("games:Told", replies("x"), entry=step).reward == reward
        return
    with pytest.raises(EnvironmentFailed, match="returned the reward .*: expected a number") as bad:
        games.play("games:Told", replies("x"), entry=step)
    assert bad.value.kind == "exception"


def test_tools_answer_calls_and_say_what_is_wrong_with_them(games: Running) -> None:
    said: list[Say] = []
    turns = [
        Reply("", "", calls=[Call("add", {"a": 2, "b": 3}), Call("divide", {"a": 1})]),
        Reply("", "", calls=[Call("add", {"a": "2", "b": 3}), Call("sub", {})], faults=["no JSON"]),
        Reply(
            "", "",
            calls=[
                Call("divide", {"a": 1, "b": 0}),
                Call("divide", {"a": 1, "b": 3}),
                Call("add", {"a": 10**70, "b": 0}),
            ],
        ),
        Reply("it is 5", "5"),
    ]  # fmt: skip

    async def answer(say: Say) -> Reply:
        said.append(say)
        return turns[len(said) - 1]

    outcome = games.play("games:calculator", answer, answer="5")
    assert outcome == Outcome(1.0, "correct")
    assert [tool["function"]["name"] for tool in said[0].tools] == ["add", "divide"]
    assert [say.tools for say in said[1:]] == [[], [], []]
    # max_result_chars is 60; the sum has 71 digits.
    assert _added(said)[1:] == [
        [("tool", "5"), ("tool", "0.5")],
        [
            ("tool", "Error: add: a is '2', expected integer"),
            ("tool", "Error: there is no tool 'sub'. Tools: add, divide"),
            ("tool", "Error: no JSON"),
        ],
        [
            ("tool", "Error: ZeroDivisionError: division by zero"),
            ("tool", "0.3333333333333333"),
            ("tool", "1" + 59 * "0" + "\n[11 more characters]"),
        ],
    ]
    assert [part.get("name") for part in said[2].messages] == ["add", "sub", None]


def test_tools_that_never_end_are_out_of_turns(games: Running) -> None:
    async def answer(say: Say) -> Reply:
        return Reply("", "", calls=[Call("add", {"a": 2, "b": 3})])

    assert games.play("games:calculator", answer) == Outcome(0.0, "out_of_turns")


def test_a_class_of_tools_keeps_state_within_an_episode(games: Running) -> None:
    async def buy(say: Say) -> Reply:
        if say.messages[-1]["role"] == "tool":
            assert say.messages[-1]["content"] == '["bag", "egg"]'
            return Reply("done", "done")
        return Reply("", "", calls=[Call("buy", {"item": "egg"})])

    for _ in range(2):
        closed = Outcome(2.0, "closed", {"calls": 1.0})
        assert games.play("games:shop", buy, answer="bag") == closed


@pytest.mark.parametrize(
    ("target", "bought", "opened"),
    [("moved", 2, "go\n\nYou have a bag."), ("named", 9, "go"), ("odd", 1, "go\n\n")],
)
def test_a_class_of_tools_takes_columns_and_opens_with_its_observation(
    games: Running, target: str, bought: int, opened: str
) -> None:
    said: list[Say] = []
    entry = {"item": "egg", "count": 2, "prompt": "not this one"}
    outcome = games.play(
        f"games:{target}", replies("done", said=said), answer="a bag", entry=entry, seed=7
    )
    assert outcome == Outcome(float(bought), "closed", {"calls": 0.0})
    assert _added(said) == [[("user", opened)]]


def test_a_tool_that_exits_is_told_to_the_policy(games: Running) -> None:
    async def leave(say: Say) -> Reply:
        if say.messages[-1]["role"] == "tool":
            assert say.messages[-1]["content"] == "Error: SystemExit: left \\ud83d"
            return Reply("done", "done")
        return Reply("", "", calls=[Call("leave", {})])

    assert games.play("games:shop", leave) == Outcome(1.0, "closed", {"calls": 1.0})


def test_chats_run_at_once_and_a_fork_shares_what_was_said_before(games: Running) -> None:
    said: list[Say] = []
    both = asyncio.Event()

    async def answer(say: Say) -> Reply:
        said.append(say)
        number = len(said)
        if number == 2:
            both.set()
        # The first two requests are answered only when both have arrived.
        await asyncio.wait_for(both.wait(), 60)
        return Reply(f"r{number}", "")

    outcome = games.play("games:debate", answer)
    assert outcome == Outcome(0.5, "r1 r2 r4 r5 r6")
    shared = {"role": "user", "content": "r2"}
    assert said == [
        Say(0, None, 0, [{"role": "system", "content": "a"}], [], None),
        Say(1, None, 0, [{"role": "system", "content": "b"}], [], None),
        Say(0, None, 0, [shared], [], None),
        Say(2, 0, 1, [shared, {"role": "user", "content": "only in the fork"}], [], 3),
        Say(
            3, 0, 1,
            [shared, {"role": "tool", "content": "only in the other", "name": "look"}], [], None,
        ),
        Say(3, None, 0, [], [], None),
    ]  # fmt: skip


def test_more_chats_than_may_talk_at_once_take_turns(games: Running) -> None:
    now = most = 0
    is_full = asyncio.Event()

    async def answer(say: Say) -> Reply:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 64:
            is_full.set()
        await asyncio.wait_for(is_full.wait(), 60)
        now -= 1
        return Reply(str(say.chat), "")

    assert games.play("games:crowd", answer) == Outcome(100.0, "talked")
    assert most == 64


def test_a_limit_of_the_policy_is_an_outcome_and_may_be_caught(games: Running) -> None:
    said: list[Say] = []

    async def answer(say: Say) -> Reply:
        said.append(say)
        if len(said) == 1:
            raise PolicyLimit("out_of_tokens")
        return Reply("more", "more")

    outcome = games.play("games:limited", answer)
    assert outcome == Outcome(0.25, "caught out_of_tokens", {"later": 4.0})
    assert _added(said) == [[("user", "go")]] * 2

    async def refuse(say: Say) -> Reply:
        raise PolicyLimit("out_of_turns")

    for target in ("guess", "two_limits", "calculator", "Countdown"):
        outcome = games.play(f"games:{target}", refuse, answer="1")
        assert outcome == Outcome(0.0, "out_of_turns")


def test_errors_of_the_policys_side_reach_the_caller(games: Running) -> None:
    async def answer(say: Say) -> Reply:
        raise ZeroDivisionError("the engine is gone")

    with pytest.raises(ZeroDivisionError, match="the engine is gone"):
        games.play("games:guess", answer, answer="1")


def test_randomness_follows_the_seed_and_secrets_stay_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")

    with Running(tmp_path) as running:
        found = [running.play("games:look", seed=seed) for seed in (1, 2, 1)]
    # random.Random(seed).random(), from the Python documentation's guarantee of reproducibility.
    assert [round(outcome.reward, 6) for outcome in found] == [0.134364, 0.956034, 0.134364]
    assert [outcome.parts for outcome in found] == [{"has": 0.0}] * 3
    assert run(tmp_path, "games:look", variables=("SECRET",)).parts == {"has": 1.0}


def _interpreters() -> list[str]:
    others = Path.home().glob(".pyenv/versions/3.*/bin/python")
    return [str(path) for path in others if int(path.parts[-3].split(".")[1]) in (9, 13)]


def test_environments_run_under_an_interpreter_without_our_packages(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    # The base interpreter: a venv of a venv would be made of the same one.
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=200)
    for python in (str(folder / "bin" / "python"), *_interpreters()):
        with Running(tmp_path, python=python) as games:
            assert games.play("games:guess", replies("4", "6"), answer="6").reason == "correct"
            assert games.play("games:Gymnasium", replies("4", "3"), seed=7).reason == "won"
            look = games.play("games:look", url="http://localhost:1/v1", key="k")
            assert str(Path(python).parent.parent) in look.reason
            assert look.reason.endswith(" http://localhost:1/v1 k")


def test_the_childs_files_need_the_standard_library_of_python_3_9_only() -> None:
    folder = Path(verification.environments.__file__).parent
    left, seen = ["child", "__init__"], set()
    while left:
        name = left.pop()
        seen.add(name)
        tree = ast.parse((folder / f"{name}.py").read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= sys.stdlib_module_names
            if isinstance(node, ast.ImportFrom):
                ours = node.module.removeprefix("verification.environments.")
                if ours == node.module:
                    # Imported when an episode begins, where the interpreter has it.
                    late = LATE.get(name)
                    assert node.module.split(".")[0] in {*sys.stdlib_module_names, late}
                elif ours not in seen:
                    left.append(ours)
    assert {"keeper", "fork_server", "policy", "text_game", "tools", "tool_schemas"} < seen
