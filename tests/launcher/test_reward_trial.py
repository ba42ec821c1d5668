"""A user's comparison or extra reward with a mistake in it is refused before a run starts."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.reward_trial import try_rewards
from megatron_rl.protocol.types import ChatMessage, Prompt

FUNCTIONS = """
import json
import numpy as np

def right(answer, request):
    with open(CALLS, "a") as file:
        file.write(f"{answer} {request.answer} {request.problem}\\n")
    return answer == request.answer

def brief(answer, request):
    return 1 / (1 + len(request.text))

def broken(answer, request):
    return json.loads("{" + answer)["value"] > 0

def array(answer, request):
    return np.ones(3)

def numpy_bool(answer, request):
    return np.bool_(True)

def hanging(answer, request):
    while True:
        pass
"""
UNIT_TESTS = json.dumps({"unit_tests": "assert add(1, 2) == 3", "entry_point": "add"})


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial_rewards.py").write_text(
        FUNCTIONS + f"\nCALLS = {str(tmp_path / 'calls')!r}\n"
    )
    (tmp_path / "trial_broken_module.py").write_text("import json\nWEIGHTS = json.loads('[')\n")
    monkeypatch.syspath_prepend(tmp_path)


def config_of(compare: str, extra: str = "", *more: str) -> Config:
    overrides = [f"reward.tasks.own.compare=trial_rewards:{compare}", *more]
    if extra:
        overrides.append(f'reward.extra=[{{name="mine", function="trial_rewards:{extra}"}}]')
    return load_config(None, overrides)


def prompts(task: str = "own", entry: str = "") -> list[Prompt]:
    question = [ChatMessage("user", "How high?")]
    return [Prompt(id=f"p{n}", task=task, messages=question, answer="330", entry=entry)
            for n in range(3)]  # fmt: skip


@pytest.mark.parametrize("format_check", ["think_box", "box", "none"])
def test_right_functions_are_called_once_and_named(tmp_path: Path, format_check: str) -> None:
    config = config_of("right", "brief", f"reward.tasks.own.format_check={format_check}")
    found = try_rewards(prompts(), config)
    assert [line.partition(" ")[0] for line in found] == ["trial_rewards:right",
                                                          "trial_rewards:brief"]  # fmt: skip
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith(" 330 How high?") and "330" in call.removesuffix(" 330 How high?")


def test_tasks_without_a_function_of_the_users_are_not_graded() -> None:
    assert try_rewards(prompts("math"), config_of("broken")) == []


@pytest.mark.parametrize(
    ("compare", "extra", "words"),
    [
        # json raises, and the user's line is named.
        ("broken", "", r"JSONDecodeError: .*trial_rewards\.py, line 14, in broken\)"),
        ("array", "", r"returned array.* numpy\.ndarray, expected a bool: .*return bool\("),
        ("numpy_bool", "", r"of the type numpy\.bool, expected a bool: "),
        ("right", "array", r"of the type numpy\.ndarray, expected one finite number"),
        ("right", "broken", r"trial_rewards\.py, line 14, in broken\)"),
    ],
)
def test_a_wrong_function_is_refused(compare: str, extra: str, words: str) -> None:
    with pytest.raises(InputError, match=rf"^the functions of the task 'own' .*'p0': .*{words}"):
        try_rewards(prompts(), config_of(compare, extra))


def test_a_function_that_hangs_is_killed_and_refused() -> None:
    config = config_of("right", "hanging", "expert.verifier.custom.timeout_s=2")
    with pytest.raises(InputError, match=r"grading_timeout: they exceed .*timeout_s=2 "):
        try_rewards(prompts(), config)


def test_an_extra_reward_of_programs_with_unit_tests_is_called() -> None:
    with pytest.raises(InputError, match=r"line 14, in broken"):
        try_rewards(prompts("code", UNIT_TESTS), config_of("right", "broken"))


def test_a_module_that_raises_is_refused_with_its_line() -> None:
    from verification.settings import check_functions

    reward = load_config(None, ["reward.tasks.own.compare=trial_broken_module:f"]).reward
    with pytest.raises(InputError, match=r"JSONDecodeError: .*broken_module\.py, line 2, in "):
        check_functions(reward)
