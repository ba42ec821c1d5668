"""Think tags in the configuration, and examples whose thoughts are in other tags."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.thinking import (
    CHANNEL_TAGS,
    HOUSE_TAGS,
    ThinkTags,
    continued,
    in_tags,
    without_thoughts,
)

SQUARE = ThinkTags(open="[THINK]", close="[/THINK]")
OWN = ThinkTags(open="((", close="))")


@pytest.mark.parametrize(
    ("given", "thinking", "used"),
    [
        ([], ThinkTags(), HOUSE_TAGS),
        (["render.thinking=auto"], ThinkTags(), HOUSE_TAGS),
        (["render.thinking=none"], ThinkTags(open="", close=""), HOUSE_TAGS),
        (["render.thinking.open=[THINK]", "render.thinking.close=[/THINK]"], SQUARE, SQUARE),
        (['render.thinking={open = "((", close = "))"}'], OWN, OWN),
    ],
)
def test_tags_are_given_as_a_word_or_as_two_texts_and_saved(
    given: list[str], thinking: ThinkTags, used: ThinkTags, tmp_path: Path
) -> None:
    config = load_config(None, given)
    assert (config.render.thinking, config.render.tags) == (thinking, used)
    (tmp_path / "c.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "c.toml") == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("render.thinking=never", "render.thinking"),
        ("render.thinking.open=[THINK]", "names one tag of two"),
        ('render.thinking={open = "<think>", close = ""}', "names one tag of two"),
        ('render.thinking={open = "<t>", close = "<t>"}', "one tag holds the other"),
        ('render.thinking={open = "think", close = "/think"}', "one tag holds the other"),
        ('render.thinking={open = "<think>\\n", close = "</think>"}', "begins or ends with blanks"),
    ],
)
def test_tags_that_could_not_be_told_apart_are_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [given])


def test_open_format_checks_follow_the_comparison() -> None:
    mine = ["reward.tasks.mine.compare=code", "reward.tasks.sums.compare=a.b:c"]
    fixed = ["reward.tasks.exact.format_check=none"]
    reward = load_config(None, mine + fixed).reward
    thinks = {"math": "think_box", "reasoning_gym": "think_box", "code": "think_code",
              "exact": "none", "mine": "think_code", "sums": "think_box"}  # fmt: skip
    # Undecided sections grade like those of a model that thinks.
    assert reward.format_checks == reward.decided(thinks=True).format_checks == thinks
    plain = {name: check.removeprefix("think_") for name, check in thinks.items()}
    assert reward.decided(thinks=False).format_checks == plain


def test_an_environment_decides_the_reward_unless_the_task_has_a_comparison() -> None:
    given = [
        f"reward.tasks.{name}.environment=games:play" for name in ("math", "code", "game", "mine")
    ]
    reward = load_config(None, [*given, "reward.tasks.mine.compare=exact"]).reward
    checks = {"math": "think_box", "code": "think_code", "game": "none", "mine": "think_box"}
    assert {name: reward.format_checks[name] for name in checks} == checks
    pools = {name: [step.pool for step in reward.steps_of(name)] for name in checks}
    assert pools == {"math": ["answers"], "code": ["code"], "game": [], "mine": ["answers"]}
    with pytest.raises(ConfigError, match="give compare, by which the verifier"):
        load_config(None, [*given, "reward.tasks.game.format_check=box"])


@pytest.mark.parametrize(
    "tags", [HOUSE_TAGS, SQUARE, OWN, CHANNEL_TAGS], ids=lambda tags: tags.open
)
@pytest.mark.parametrize(
    "given",
    [
        "<think>\na\n</think>\nb", "[THINK]\na\n[/THINK]\nb", "\n<thinking>\na\n</thinking>\nb",
        "◁think▷\na\n◁/think▷\nb", "<reasoning>\na\n</reasoning>\nb", "\na\n</think>\nb",
        "\na\n[/THINK]\nb",
    ],
)  # fmt: skip
def test_other_peoples_thoughts_get_the_models_tags(given: str, tags: ThinkTags) -> None:
    assert in_tags(given, tags) == f"{tags.open}\na\n{tags.close}\nb"


@pytest.mark.parametrize(
    "text",
    ["b", "", "The tag <think> opens thoughts, </think> closes them.", "<think>a", "<b>a</b>"],
)
def test_a_response_without_thoughts_is_left_as_it_is(text: str) -> None:
    assert in_tags(text, SQUARE) == text
    assert continued(text, SQUARE, "[THINK]\n") == text


@pytest.mark.parametrize(
    ("tail", "response"),
    [
        ("assistant\n", "<think>\na\n</think>\nb"),
        ("assistant\n<think>\n", "a\n</think>\nb"),
        ("<think>", "\na\n</think>\nb"),
        ("<think>\n\n</think>\n\n", "b"),
        ("</think>", "\nb"),
    ],
)
def test_an_example_continues_the_tags_that_its_prompt_ends_with(tail: str, response: str) -> None:
    for given in ("<think>\na\n</think>\nb", "[THINK]\na\n[/THINK]\nb", "\na\n</think>\nb"):
        assert continued(given, HOUSE_TAGS, tail) == response


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think>b", "b"), ("a</think>b", "b"), ("[THINK]a[/THINK]b", "b"),
        ("a[/THINK]b", "b"), ("b", "b"), ("<think>a", "<think>a"),
        ("<think>a</think>b <think>", "b <think>"), ("x <think>a</think> b", "x b"),
    ],
)  # fmt: skip
def test_a_served_models_thoughts_are_left_out(text: str, answer: str) -> None:
    assert without_thoughts(text) == answer


def test_thoughts_in_a_channel_are_not_described_to_the_model() -> None:
    """gpt-oss writes its channels by itself, and a message cannot show their tokens."""
    given = [f"render.thinking.{end}={getattr(CHANNEL_TAGS, end)}" for end in ("open", "close")]
    render = load_config(None, [*given, "render.demonstrate=true"]).render
    assert render.system_prompt_of("think_box") == render.system_prompts.box
    assert render.system_prompt_of("think_code") == render.system_prompts.code
    assert render.demonstration_of("think_box") is None
