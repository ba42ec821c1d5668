import json
import re
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import ExtraReward, RewardConfig, TaskConfig
from megatron_rl.config.tree import Config, PromptSource, SamplingConfig
from megatron_rl.protocol.types import ChatMessage, Prompt
from verification.rules import RewardRules
from verification.settings import check_functions, check_prompts, check_sources

ANSWER = {"compare": "tests.verification.pool.hostile_tasks:obey"}


def _prompt(task: str, entry: str = "") -> Prompt:
    return Prompt("p/1", task, [ChatMessage("user", "?")], "7", entry=entry)


def test_rules_come_from_the_configuration() -> None:
    config = Config(
        reward=RewardConfig(length_margin_tokens=8, correct=2.0, format=0.5),
        sampling=SamplingConfig(max_new_tokens=64),
    )
    rules = RewardRules.of(config)
    assert (rules.reward.correct, rules.reward.format) == (2.0, 0.5)
    assert (rules.max_tokens, rules.reward.length_margin_tokens) == (64, 8)
    assert RewardRules.model_validate(json.loads(rules.model_dump_json())) == rules


def test_untrustworthy_dataset_is_refused_at_start() -> None:
    check_sources([PromptSource(kind="reasoning_gym", name="chain_sum"), PromptSource()])
    with pytest.raises(InputError, match="'n_queens' is refused: its scorer evaluates"):
        check_sources([PromptSource(kind="reasoning_gym", name="n_queens")])


def test_unknown_task_is_refused_at_start_with_the_nearest_name() -> None:
    check_prompts([_prompt("math"), _prompt("exact")], RewardConfig())
    with pytest.raises(InputError, match="'p/1' has the unknown task 'maths'.*mean 'math'"):
        check_prompts([_prompt("maths")], RewardConfig())
    check_prompts([_prompt("maths")], RewardConfig(tasks={"maths": TaskConfig(compare="math")}))


def test_code_prompt_needs_usable_tests() -> None:
    tests = json.dumps({"cases": [{"stdin": "1", "stdout": "2"}]})
    check_prompts([_prompt("code", tests)], RewardConfig())
    for entry in ("", "{}", '{"cases": [1]}'):
        with pytest.raises(InputError, match="prompt 'p/1': .* code prompt"):
            check_prompts([_prompt("code", entry)], RewardConfig())


def test_function_that_cannot_be_loaded_is_refused_at_start() -> None:
    check_functions(RewardConfig(tasks={"mine": TaskConfig(**ANSWER)}))
    with pytest.raises(InputError, match="reward.tasks.mine.compare='no.module:f'"):
        check_functions(RewardConfig(tasks={"mine": TaskConfig(compare="no.module:f")}))
    extra = ExtraReward(name="bonus", function="tests.verification.pool.hostile_tasks:nothing")
    with pytest.raises(InputError, match="reward.extra 'bonus'"):
        check_functions(RewardConfig(extra=[extra]))


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        # As verl and TRL have them.
        ("rewards_of_others:verl", r"(data_source, solution_str, ground_truth, extra_info=None)"),
        ("rewards_of_others:named", "(*, completions, **given)"),
        ("rewards_of_others:alone", "(answer)"),
    ],
)
def test_a_function_of_other_arguments_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, taken: str
) -> None:
    (tmp_path / "rewards_of_others.py").write_text(
        "def verl(data_source, solution_str, ground_truth, extra_info=None): pass\n"
        "def named(*, completions, **given): pass\n"
        "def alone(answer): pass\n"
        "def any_two(*arguments, **more): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = re.escape(f"{name!r} takes {taken}; expected (answer, request): ")
    with pytest.raises(InputError, match=rf"^reward\.tasks\.mine\.compare = {expected}"):
        check_functions(RewardConfig(tasks={"mine": TaskConfig(compare=name)}))
    with pytest.raises(InputError, match=rf"^reward\.extra 'bonus': function = {expected}"):
        check_functions(RewardConfig(extra=[ExtraReward(name="bonus", function=name)]))
    # A builtin function is called without its signature being known.
    for fine in ("rewards_of_others:any_two", "builtins:max"):
        check_functions(RewardConfig(tasks={"mine": TaskConfig(compare=fine)}))


def test_extra_rewards_have_names_of_their_own_and_known_tasks() -> None:
    with pytest.raises(ValueError, match="the name 'length' is taken"):
        RewardConfig(extra=[ExtraReward(name="length", function="a:b")])
    with pytest.raises(ValueError, match="names unknown tasks \\['maths'\\]"):
        RewardConfig(extra=[ExtraReward(name="bonus", function="a:b", tasks=["maths"])])


def test_an_environment_that_decides_leaves_no_room_for_an_extra_reward() -> None:
    judged = TaskConfig(environment="m:e", compare="math")
    tasks = {"game": TaskConfig(environment="m:e"), "judged": judged}
    extra = ExtraReward(name="bonus", function="a:b", tasks=["game"])
    with pytest.raises(ValueError, match="'game', whose environment decides the whole reward"):
        RewardConfig(tasks=tasks, extra=[extra])
    for names in (["judged"], []):
        bonus = extra.model_copy(update={"tasks": names})
        steps = RewardConfig(tasks=tasks, extra=[bonus]).steps_of("judged")
        assert [step.kind for step in steps] == ["judge", "extras"]
