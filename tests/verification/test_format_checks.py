"""Format checks of responses to prompts that open the thoughts; what our system prompts ask for."""

import msgspec
import pytest

from megatron_rl.config.prompts import Demonstrations, SystemPrompts
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.types import ScoreRequest
from tests.verification.requests import RULES, boxed, make_request
from verification.format import FORMAT_CHECKS
from verification.score import score

# How DeepSeek-R1's and QwQ's chat templates end.
OPENED = ["<｜User｜>2+5?<｜Assistant｜><think>\n", "<|im_start|>assistant\n<think>\n", "<think>"]
# Qwen3's with enable_thinking=false, GLM-4.5's, and DeepSeek-V3.1's without thinking.
CLOSED = ["assistant\n<think>\n\n</think>\n\n", "<|assistant|>\n<think></think>", "</think>"]
# A plain template, and a question about the tag.
NOT_OPENED = ["<|im_start|>assistant\n", "", "what is <think>?\n"]
SQUARE = ThinkTags(open="[THINK]", close="[/THINK]")
REST = "I add.\n</think>\n\nIt is \\boxed{7}."
PROGRAM = "I add.\n</think>\n```python\nprint(7)\n```"


def ask(text: str, prompt_tail: str, **more: object) -> ScoreRequest:
    return msgspec.structs.replace(make_request(text, **more), prompt_tail=prompt_tail)


@pytest.mark.parametrize("tail", OPENED)
def test_thoughts_that_the_prompt_opened_need_no_second_opening(tail: str) -> None:
    assert score(ask(REST, tail), RULES).reason == "correct"
    checked = FORMAT_CHECKS["think_box"](REST, tail)
    assert (checked.thoughts, checked.answer) == ("I add.\n", "7")
    checked = FORMAT_CHECKS["think_code"](PROGRAM, tail)
    assert (checked.refusal, checked.answer, checked.thoughts) == ("", "print(7)\n", "I add.\n")
    assert score(ask(boxed("7"), tail), RULES).reason == "several_think_tags"
    assert score(ask("\\boxed{7}", tail), RULES).reason == "no_think_end"
    assert score(ask("I add", tail, is_finished=False), RULES).reason == "unfinished"


@pytest.mark.parametrize("tail", NOT_OPENED)
def test_a_prompt_that_opens_nothing_leaves_the_opening_to_the_model(tail: str) -> None:
    assert score(ask(REST, tail), RULES).reason == "no_think_start"
    assert FORMAT_CHECKS["think_code"](PROGRAM, tail).refusal == "no_think_start"
    assert score(ask(boxed("7"), tail), RULES).reason == "correct"


@pytest.mark.parametrize("tags", [HOUSE_TAGS, SQUARE], ids=lambda tags: tags.open)
@pytest.mark.parametrize("tail", CLOSED)
def test_an_answer_needs_no_tags_after_thoughts_that_the_prompt_closed(
    tail: str, tags: ThinkTags
) -> None:
    rules = RULES.model_copy(update={"tags": tags})

    def reason_of(text: str) -> str:
        return score(ask(in_tags(text, tags), in_tags(tail, tags)), rules).reason

    def in_tags(text: str, tags: ThinkTags) -> str:
        return text.replace("<think>", tags.open).replace("</think>", tags.close)

    assert reason_of("It is \\boxed{7}.") == "correct"
    assert reason_of("It is 7.") == "no_boxed"
    checked = FORMAT_CHECKS["think_code"]("```python\n7\n```", in_tags(tail, tags), tags)
    assert (checked.refusal, checked.answer, checked.thoughts) == ("", "7\n", "")
    # A model that thinks all the same keeps the form; one that only closes its thoughts does not.
    assert reason_of("<think>5+2</think>\\boxed{7}") == "correct"
    assert reason_of("<think>5</think><think>2</think>\\boxed{7}") == "several_think_tags"
    assert reason_of("5+2</think>\\boxed{7}") == "several_think_tags"


def test_format_checks_without_thoughts_take_the_text_as_it_is() -> None:
    assert FORMAT_CHECKS["none"]("7", OPENED[0]).answer == "7"
    assert FORMAT_CHECKS["box"]("\\boxed{7}", OPENED[0]).final == "\\boxed{7}"


@pytest.mark.parametrize("tags", [ThinkTags(), SQUARE], ids=lambda tags: tags.open)
@pytest.mark.parametrize("format_check", ["think_box", "think_code"])
def test_the_form_that_a_system_prompt_shows_passes_its_format_check(
    format_check: str, tags: ThinkTags
) -> None:
    config = RenderConfig(thinking=tags)
    text = config.system_prompt_of(format_check)
    assert text.count(config.tags.open) == text.count(config.tags.close) == 2
    assert ("<think>" in text) is tags.is_auto and "{open}" not in text
    _, form = text.split("must look like this:\n")
    assert FORMAT_CHECKS[format_check](form, "", config.tags).refusal == ""


@pytest.mark.parametrize("tags", [ThinkTags(), SQUARE], ids=lambda tags: tags.open)
@pytest.mark.parametrize("is_program", [False, True])
@pytest.mark.parametrize("format_check", ["think_box", "think_code"])
def test_the_demonstration_of_a_format_check_passes_it(
    format_check: str, is_program: bool, tags: ThinkTags
) -> None:
    shows = RenderConfig(demonstrate=True, thinking=tags)
    exchange = shows.demonstration_of(format_check, is_program=is_program)
    assert exchange is not None
    assert FORMAT_CHECKS[format_check](exchange.reply, "", shows.tags).refusal == ""
    assert RenderConfig(demonstrate=False).demonstration_of(format_check) is None
    assert (
        RenderConfig(system_prompt="mine", demonstrate=True).demonstration_of(format_check) is None
    )


def test_every_format_check_has_a_system_prompt_and_one_may_replace_them_all() -> None:
    assert set(SystemPrompts.model_fields) == set(FORMAT_CHECKS)
    assert set(Demonstrations.model_fields) == {*FORMAT_CHECKS, "think_code_program"}
    for format_check in FORMAT_CHECKS:
        assert RenderConfig(system_prompt="").system_prompt_of(format_check) == ""
        mine = RenderConfig(system_prompt="mine {open}", thinking=SQUARE)
        assert mine.system_prompt_of(format_check) == "mine [THINK]"
        asked = RenderConfig().system_prompt_of(format_check)
        assert ("\\boxed{}" in asked) == (format_check in ("box", "think_box"))
        assert ("<think>" in asked) == format_check.startswith("think")
    changed = RenderConfig(system_prompts={"box": "a box"})
    assert changed.system_prompt_of("box") == "a box"
    assert changed.system_prompt_of("code") == RenderConfig().system_prompt_of("code") != ""
