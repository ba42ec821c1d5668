"""Think tags and format checks of kinds of models, by their tokenizers' files."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.thinking import CHANNEL_TAGS, HOUSE_TAGS, ThinkTags
from megatron_rl.config.tree import Config
from megatron_rl.launcher.prompt_record import pin_revisions
from megatron_rl.launcher.thinking import decide_thinking, describe_thinking, end_of_prompt
from megatron_rl.protocol.render import open_renderer
from megatron_rl.protocol.types import ChatMessage, ScoreRequest
from tests.launcher.test_dry_run import write_byte_tokenizer
from tests.protocol.real_templates import TEMPLATES
from verification.rules import RewardRules
from verification.score import score

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")

SQUARE = ThinkTags(open="[THINK]", close="[/THINK]")
NONE = ThinkTags(open="", close="")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]") + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
R1 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}{% else %}"
    "<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] != 'system' %}[SYSTEM_PROMPT]Draft between [THINK] and [/THINK]."
    "[/SYSTEM_PROMPT]{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "[INST]{{ m['content'] }}[/INST]{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
FORBID = "{% set enable_thinking = false %}"
"""What chat_template_kwargs = {enable_thinking = false} comes to."""


def make(folder: Path, template: str, *tokens: str, special: bool = False) -> Path:
    """A model folder with a tokenizer that has these added tokens."""
    folder.mkdir()
    write_byte_tokenizer(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def load(model: Path, *given: str) -> Config:
    return load_config(None, [f'model.path="{model}"', 'render.system_prompt=""', *given])


MODELS = {
    # name: (template, added tokens, tags, end of a prompt, math's format check)
    "SmolLM2": (CHATML, (), NONE, "assistant\n", "box"),
    "Qwen2.5": (CHATML, ("<|im_start|>", "<tool_call>"), NONE, "assistant\n", "box"),
    "Llama 3": (LLAMA, (), NONE, "header_id|>\n\n", "box"),
    "Qwen3": (QWEN3, ("<think>", "</think>"), HOUSE_TAGS, "assistant\n", "think_box"),
    "Qwen3 without": (FORBID + QWEN3, ("<think>", "</think>"), HOUSE_TAGS,
                      "<think>\n\n</think>\n\n", "box"),
    "Mistral": (MISTRAL, ("[THINK]", "[/THINK]"), SQUARE, "[/INST]", "think_box"),
    "R1": (R1, (), HOUSE_TAGS, "<think>\n", "think_box"),
    "gpt-oss": ((TEMPLATES / "gpt_oss.jinja").read_text(), ("<|start|>", "<|channel|>"),
                CHANNEL_TAGS, "<|start|>assistant", "think_box"),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_models_files_decide_about_its_thoughts(name: str, tmp_path: Path) -> None:
    template, tokens, tags, tail, format_check = MODELS[name]
    config = load(make(tmp_path / "model", template, *tokens, special=True))
    assert end_of_prompt(config).endswith(tail)
    decided = decide_thinking(config)
    assert decided.render.thinking == tags
    code = "code" if format_check == "box" else "think_code"
    checks = decided.reward.format_checks
    assert (checks["math"], checks["exact"], checks["code"]) == (format_check, format_check, code)
    said = describe_thinking(decided, ["math", "code"])
    assert f"math {format_check}" in said and f"code {code}" in said
    if format_check == "think_box":
        assert f"between {tags.open} and {tags.close}" in said
    # Every process reads the decision from the saved file, and a second look changes nothing.
    (tmp_path / "config.toml").write_text(dump_toml(decided))
    saved = load_config(tmp_path / "config.toml")
    assert saved == decided and decide_thinking(saved) is saved
    assert RewardRules.of(saved).tags == (HOUSE_TAGS if tags.is_none else tags)


@pytest.mark.parametrize(
    ("given", "tags", "format_check"),
    [
        ('reward.tasks.code.format_check="think_code"', HOUSE_TAGS, "think_box"),
        ('render.system_prompt="Think in {open} and {close}."', HOUSE_TAGS, "think_box"),
        ('render.system_prompt="Think in <thinking></thinking>."', None, "think_box"),
        ('render.thinking={open="((", close="))"}', ThinkTags(open="((", close="))"), "think_box"),
        ("render.thinking=none", NONE, "box"),
        ('reward.tasks.math.format_check="none"', NONE, "none"),
    ],
)
def test_a_model_without_tags_thinks_where_the_user_asks_for_it(
    given: str, tags: ThinkTags | None, format_check: str, tmp_path: Path
) -> None:
    decided = decide_thinking(load(make(tmp_path / "model", CHATML), given))
    tags = tags or ThinkTags(open="<thinking>", close="</thinking>")
    assert decided.render.thinking == tags
    assert decided.reward.format_checks["math"] == format_check


def test_a_format_check_with_thoughts_and_no_thoughts_exclude_each_other(tmp_path: Path) -> None:
    model, check = make(tmp_path / "model", CHATML), "reward.tasks.code.format_check=think_code"
    with pytest.raises(InputError, match=r"think_code in \[reward.tasks\] exclude each other"):
        decide_thinking(load(model, "render.thinking=none", check))
    # A task of ours needs no comparison beside its format check.
    assert load(model, check).reward.all_tasks["code"].compare == "code"


@pytest.mark.parametrize(
    ("responses", "thinks"),
    [
        (["<think>a</think>b", "[THINK]a[/THINK]b", "b"], True),
        (["a</think>b", "b", "b"], False),
        (["b", "b", "b"], False),
    ],
)
def test_a_cold_start_that_has_thoughts_teaches_them(
    responses: list[str], thinks: bool, tmp_path: Path
) -> None:
    examples = tmp_path / "sft.jsonl"
    question = [{"role": "user", "content": "1"}]
    lines = [json.dumps({"messages": question, "response": text}) for text in responses]
    examples.write_text("\n".join(lines))
    model = make(tmp_path / "model", CHATML)
    taught = [f'sft.dataset="{examples}"', "sft.steps=3"]
    config = decide_thinking(load(model, *taught))
    assert config.render.thinking == (HOUSE_TAGS if thinks else NONE)
    assert decide_thinking(load(model, taught[0])).render.thinking == NONE


def test_a_start_records_the_decision_and_keeps_that_of_runs_from_before(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = load(make(tmp_path / "model", CHATML), f'run.dir="{run_dir}"')
    assert pin_revisions(config).reward.format_checks["math"] == "box"
    # The record of a run from before this key: its model was asked for <think>.
    (run_dir / "config.toml").write_text(dump_toml(config))
    resumed = pin_revisions(config)
    assert resumed.reward.format_checks["math"] == "think_box"
    assert resumed.render.thinking == HOUSE_TAGS


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_are_tokens_survive_decoding_and_are_graded(
    special: bool, tmp_path: Path
) -> None:
    model = make(tmp_path / "model", MISTRAL, "[THINK]", "[/THINK]", special=special)
    config = load(model, 'render.thinking={open = "[THINK]", close = "[/THINK]"}')
    renderer, rules = open_renderer(config), RewardRules.of(config)

    def reason_of(text: str) -> str:
        ids = renderer.render_response(text)
        assert len(ids) < len(text.encode())
        assert renderer.decode(ids) == text
        return score(ScoreRequest(0, "math", "7", "", renderer.decode(ids), 9, True), rules).reason

    assert reason_of("[THINK]5+2[/THINK]It is \\boxed{7}.") == "correct"
    assert reason_of("[THINK]5+2[/THINK]It is \\boxed{8}.") == "wrong_answer"
    assert reason_of("[THINK]5[THINK]+2[/THINK]\\boxed{7}") == "several_think_tags"
    assert reason_of("[THINK]5[/THINK][THINK]2[/THINK]\\boxed{7}") == "several_think_tags"
    assert reason_of("[THINK]5+2 \\boxed{7}") == "no_think_end"
    assert reason_of("<think>5+2</think>\\boxed{7}[THINK][/THINK]") == "no_think_start"
    # An example of a model with other tags is taught in this one's.
    question = [ChatMessage("user", "5+2?")]
    given = "<think>5+2</think>It is \\boxed{7}."
    example = renderer.render_example(question, given, task="math")
    assert example.response == "[THINK]5+2[/THINK]It is \\boxed{7}."
    assert renderer.decode(example.response_ids) == example.response


def test_an_example_after_a_prompt_that_opens_the_thoughts_has_one_opening(tmp_path: Path) -> None:
    renderer = open_renderer(load(make(tmp_path / "model", R1)))
    question = [ChatMessage("user", "5+2?")]
    for given in ("<think>\n5+2\n</think>7", "[THINK]5+2\n[/THINK]7", "5+2\n</think>7"):
        prompt, response, _ = renderer.render_example(question, given, task="math")
        text = renderer.decode([*prompt, *response])
        assert text == "<｜User｜>5+2?<｜Assistant｜><think>\n5+2\n</think>7"
