"""BFCL's tasks as an environment: true and damaged calls, judged as by BFCL's checker alone."""

import ast
import asyncio
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bfcl_eval")
pytest.importorskip("mpmath")

from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from examples.agents import bfcl
from generation.episodes import Environments, Episodes
from generation.health import Activity, EngineHealth
from generation.rollouts import Work
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import ChatMessage, Lease, Prompt, Rollout, Sampling
from tests.generation.test_episodes import ScriptedEngine
from tests.protocol.real_templates import open_model
from verification.environments.host import EnvironmentHost
from verification.environments.settings import EnvironmentSettings

STEP = int(os.environ.get("BFCL_STEP", "40"))
"""Every n-th task is played."""
CATEGORIES = os.environ.get("BFCL_CATEGORIES", "multi_turn_base multi_turn_miss_func").split()
Calls = list[list[tuple[str, dict[str, Any]]]]
"""Of each request, its calls."""


def read_tasks(category: str) -> list[dict[str, Any]]:
    name = f"BFCL_v4_{category}.json"
    pairs = zip(bfcl.read_lines(name), bfcl.read_lines(f"possible_answer/{name}"), strict=True)
    return [{**task, **truth} for task, truth in pairs][::STEP]


def calls_what_is_hidden(task: dict[str, Any]) -> bool:
    """Whether the true calls need a function before it is offered: a fault of the task."""
    return any(
        text.partition("(")[0] in names
        for number, names in task.get("missed_function", {}).items()
        for request in task["ground_truth"][: int(number)]
        for text in request
    )


def true_calls(task: dict[str, Any]) -> Calls:
    order = {
        tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
        for tool in bfcl.tools_of(task)
    }

    def read(text: str) -> tuple[str, dict[str, Any]]:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        given = dict(zip(order[call.func.id], call.args, strict=False))
        given |= {str(word.arg): word.value for word in call.keywords}
        return call.func.id, {name: ast.literal_eval(value) for name, value in given.items()}

    return [[read(text) for text in request] for request in task["ground_truth"]]


def damaged(calls: Calls, number: int) -> Calls:
    """Without the last call, or with another argument in it."""
    calls = copy.deepcopy(calls)
    name, arguments = [request for request in calls if request][-1][-1]
    texts = [key for key, value in arguments.items() if isinstance(value, str)]
    if number % 2 and texts:
        arguments[texts[0]] += "x"
    else:
        [request for request in calls if request][-1].pop()
    return calls


def judged(task: dict[str, Any], calls: Calls, label: str) -> tuple[float, str]:
    """Verdict of BFCL's checker alone, with calls written as its own handlers do."""
    made = [
        [[f"{name}({','.join(f'{k}={repr(v)}' for k, v in args.items())})"] for name, args in one]
        for one in calls
    ]
    category = task["id"].rsplit("_", 1)[0]
    found = multi_turn_checker(made, task["ground_truth"], task, category, label)
    return float(found["valid"]), found.get("error_type", ":correct").partition(":")[2]


class Script(ScriptedEngine):
    """Replies with the calls of each request one by one, then with a word, by lease."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer, lambda _: "")
        self.replies: dict[int, list[str]] = {}

    async def generate(self, prompt_ids, sampling, indices):  # noqa: ANN001, ANN201
        self.answer = lambda _: self.replies[indices[0]].pop(0)
        async for completion in super().generate(prompt_ids, sampling, indices):
            yield completion


def replies_of(calls: Calls) -> list[str]:
    found = []
    for request in calls:
        for name, arguments in request:
            call = json.dumps({"name": name, "arguments": arguments})
            found.append(f"<tool_call>\n{call}\n</tool_call>")
        found.append("done")
    return found


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return open_model(tmp_path_factory.mktemp("qwen"), "qwen2.5")


def play(
    folder: Path, renderer: Renderer, plays: list[tuple[dict[str, Any], list[str]]]
) -> list[tuple[float, str]]:
    """(reward, reason) of each task with its replies."""
    paths = (str(Path(bfcl.__file__).parent), *filter(None, sys.path))
    settings = EnvironmentSettings(paths=paths, log_path=str(folder / "log"), max_episodes=4)
    renderer.context_tokens = 10**6
    engine = Script(renderer)

    async def run() -> list[tuple[float, str]]:
        work = Work(engine, renderer, EngineHealth(60, counts_passes=False), Activity())
        async with EnvironmentHost(settings) as host:
            episodes = Episodes(work, Environments({"sums": "bfcl:bfcl"}, host))

            async def one(number: int) -> tuple[float, str]:
                task, engine.replies[number] = plays[number]
                messages = [ChatMessage(**message) for message in task["question"][0]]
                prompt = Prompt(task["id"], "sums", messages, "", entry=json.dumps(task))
                lease = Lease(number, prompt, [number], Sampling(10**6, 1.0))
                [rollout] = [one async for one in episodes.rollouts(lease)]
                assert isinstance(rollout, Rollout) and rollout.score is not None, rollout
                return rollout.score.reward, rollout.score.reason

            found = []
            for start in range(0, len(plays), 4):
                numbers = range(start, min(start + 4, len(plays)))
                found += await asyncio.gather(*(one(number) for number in numbers))
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("category", CATEGORIES)
def test_reward_is_the_verdict_of_the_checker(
    tmp_path: Path, renderer: Renderer, category: str
) -> None:
    read = read_tasks(category)
    tasks = [task for task in read if not calls_what_is_hidden(task)]
    assert len(tasks) >= len(read) - 1
    whole = [true_calls(task) for task in tasks]
    broken = [damaged(calls, number) for number, calls in enumerate(whole)]
    plays = [
        (task, replies_of(c))
        for made in (whole, broken)
        for task, c in zip(tasks, made, strict=True)
    ]
    found = play(tmp_path, renderer, plays)
    expected = [judged(t, c, "broken") for t, c in zip(tasks, broken, strict=True)]
    assert [one for one in found[: len(tasks)] if one != (1.0, "correct")] == []
    assert found[len(tasks) :] == expected
    assert sum(reward for reward, _ in expected) < len(tasks) / 2
    print(category, len(tasks), "tasks; damaged:", sorted(expected))


def test_calls_that_could_harm_are_errors_or_outcomes(tmp_path: Path, renderer: Renderer) -> None:
    task = next(t for t in read_tasks("multi_turn_base"))
    task = {**task, "involved_classes": ["MathAPI", "GorillaFileSystem"]}
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    hostile = [
        {"name": "exec", "arguments": {"code": code}},
        {"name": f"cd(folder={code})", "arguments": {}},
        {"name": "cd", "arguments": {f"folder={code},x": "a"}},
        {"name": "cd", "arguments": {"folder": f"a'+{code}+'"}},
        {"name": "mean", "arguments": {"numbers": [1, 1e400]}},
    ]
    texts = [f"<tool_call>{json.dumps(c)}</tool_call>" for c in hostile]
    texts = [text.replace("Infinity", "1e400") for text in texts]
    slow = json.dumps({"name": "power", "arguments": {"base": 7, "exponent": 10**9}})
    plays = [
        (task, [*texts, *["done"] * len(task["question"])]),
        (task, [f"<tool_call>{slow}</tool_call>"]),
        (task, ["<tool_call>{</tool_call>"] * 21),
    ]
    found = play(tmp_path, renderer, plays)
    assert found == [
        (0.0, "instance_state_mismatch"),
        (0.0, "slow_calls"),
        (0.0, "force_terminated"),
    ]
    assert not mark.exists()
