"""Own system messages of prompts are told only where they disagree with the format check."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.own_systems import describe_own_systems
from megatron_rl.protocol.types import ChatMessage, Prompt

BOX = "Please reason step by step, and put your final answer within \\boxed{}."
THINK_BOX = f"Think between <think> and </think>. {BOX}"
REASONING = "Respond so: <reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
THINKS = "{{ messages }}{% if x %}<think>\n\n</think>{% endif %}"


def told(
    system: str,
    check: str,
    *,
    user: str = "1 + 2?",
    task: str = "math",
    thinking: object = "auto",
    compare: str = "math",
    **more: object,
) -> str:
    """The warning about one such prompt, after its count."""
    rule = {"format_check": check, "compare": compare}
    config = Config.model_validate(
        {
            "reward": {"tasks": {task: rule}},
            "render": {"thinking": thinking, **more},
            "model": {"path": "/nowhere"},
        }
    )
    turns = [ChatMessage("system", system), ChatMessage("user", user)]
    return describe_own_systems([Prompt("a", task, turns, "3")], config)


@pytest.mark.parametrize(
    ("system", "check", "asked"),
    [
        (THINK_BOX, "think_box", ""),
        (BOX, "box", ""),
        # Thoughts before a box pass the check box.
        (THINK_BOX, "box", ""),
        (BOX, "think_box",
         "no thoughts, but think_box demands thoughts between <think> and </think>"),
        ("Be brief.", "box", "no form of the answer, but box demands the answer in \\boxed{}"),
        (REASONING, "think_box", "thoughts between <reasoning> and </reasoning>, but think_box"),
        (REASONING, "box", "the answer between <answer> and </answer>, but box demands"),
        ("End with #### and the number.", "box", "the answer behind ####, but box demands"),
        ("Be brief.", "none", ""),
        (BOX, "none", "the answer in \\boxed{}, but none demands the answer alone"),
        (THINK_BOX, "none", "thoughts between <think> and </think> and the answer in \\boxed{}, "
         "but none demands the answer alone"),
        (BOX, "code", "the answer in \\boxed{}, but code demands a fenced code block"),
        ("Write ```python blocks.", "code", ""),
    ],
)  # fmt: skip
def test_a_message_that_asks_for_another_form_is_told(system: str, check: str, asked: str) -> None:
    said = told(system, check)
    assert (f"1 asks for {asked}" in said) if asked else said == ""


def test_both_conflicts_of_one_prompt_are_told_and_count_once() -> None:
    said = told(REASONING, "think_box")
    assert said.startswith("warning: all 1 prompts have") and said.count("1 asks for") == 2
    assert 'Set prompts.system="replace"' in said and "render.thinking" in said


def test_the_users_message_may_ask_for_the_form() -> None:
    assert told("Be brief.", "box", user=f"1 + 2? {BOX}") == ""
    # Headings of a question ask for nothing.
    assert told("Write a ``` block.", "code", user="#### Input\n<answer>") == ""
    assert "asks for no form" in told("Be brief.", "box", user="#### Input")


def test_tags_of_the_run_decide() -> None:
    tags = {"open": "<reasoning>", "close": "</reasoning>"}
    assert "<reasoning>" not in told(REASONING, "think_box", thinking=tags)
    mistral = {"open": "[THINK]", "close": "[/THINK]"}
    said = told(THINK_BOX, "think_box", thinking=mistral)
    assert "between <think> and </think>, but think_box demands thoughts between [THINK]" in said


def test_a_model_that_thinks_by_itself_needs_no_words_for_it_only_none_against_it() -> None:
    assert told(BOX, "think_box", chat_template=THINKS) == ""
    said = told(REASONING, "think_box", chat_template=THINKS)
    assert "1 asks for thoughts between <reasoning>" in said
    assert told("Be brief.", "think_box", form_known=True) == ""
    assert "<answer>" in told(REASONING, "think_box", form_known=True)


def test_a_comparison_of_the_users_own_reads_any_form() -> None:
    own = {"task": "mine", "compare": "package.module:function"}
    assert told(REASONING, "none", **own) == ""
    assert "but box demands" in told(REASONING, "box", **own)


def test_prompts_without_a_system_message_and_unknown_tasks_are_passed_over(tmp_path: Path) -> None:
    user = [ChatMessage("user", "1 + 2?")]
    silent = [ChatMessage("system", "Be brief."), *user]
    prompts = [
        Prompt("a", "math", user, "3"),
        Prompt("b", "unheard", silent, "3"),
        Prompt("c", "math", silent, "3", place="f.jsonl:3"),
    ]
    said = describe_own_systems(prompts, Config.model_validate({"model": {"path": tmp_path}}))
    # Without a model the check may become box: thoughts are not yet demanded.
    assert said.startswith("warning: 1 of 3 prompts") and said.count(" asks for ") == 1
    assert "1 asks for no form of the answer, but box or think_box demands" in said
    assert "first f.jsonl:3" in said


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    prompt = Prompt("a", "math", [ChatMessage("system", "s"), ChatMessage("user", "q")], "3")
    with pytest.raises(InputError, match="cannot read .*chat_template.jinja: .*copy the model"):
        describe_own_systems([prompt], Config.model_validate({"model": {"path": tmp_path}}))
