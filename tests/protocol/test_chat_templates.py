"""Templates as families have them: ids as transformers has them, options, ends, and losses."""

from pathlib import Path
from typing import Any

import pytest

from generation.worker import GeneratorWorker
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.dropped_prompts import try_rendering
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.render import Conversation, Renderer
from megatron_rl.protocol.render_probe import probe_renderer
from megatron_rl.protocol.types import ChatMessage, Lease, Prompt, Sampling
from megatron_rl.trainer.sft_dataset import SftExample
from megatron_rl.trainer.sft_messages import SftMessage
from megatron_rl.trainer.sft_rendering import tokenize
from tests.protocol.template_families import (
    ASK,
    CHATML,
    FAMILIES,
    SYSTEM,
    USER,
    make,
    own_ids,
    prompt_ids,
    write_family,
)  # fmt: skip

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("smollm2", {}, f"<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\n{ASK}"
     "<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen2.5", {}, f"<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n{ASK}"
     "<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", {}, f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", {"enable_thinking": True},
     f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", {"enable_thinking": False},
     f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ("mistral", {}, "<s>[SYSTEM_PROMPT]Think first.[THINK]Draft here.[/THINK]Then answer."
     f"[/SYSTEM_PROMPT][INST]{ASK}[/INST]"),
    ("llama3", {"date_string": "1 May 2026"},
     "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
     "Cutting Knowledge Date: December 2023\nToday Date: 1 May 2026\n\n"
     f"<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{ASK}<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ("r1", {}, f"<｜begin▁of▁sentence｜><｜User｜>{ASK}<｜Assistant｜><think>\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "variables", "text"), CASES)
def test_prompts_have_the_ids_that_transformers_gives_the_family(
    folders: Path, name: str, variables: dict[str, Any], text: str
) -> None:
    renderer = make(folders / name, chat_template_kwargs=variables)
    ids = prompt_ids(renderer)
    assert ids == own_ids(folders / name, [USER], True, **variables)
    # Special tags survive decoding, and each is one token.
    assert renderer.decode(ids) == text
    assert set(renderer.encode("".join(FAMILIES[name].tokens))) == {
        renderer.tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name].tokens
    }
    with_system = make(folders / name, chat_template_kwargs=variables, system_prompt="be brief")
    assert prompt_ids(with_system) == own_ids(folders / name, [SYSTEM, USER], True, **variables)


def test_one_setting_reaches_rollouts_sft_limits_and_what_is_shown(folders: Path) -> None:
    """enable_thinking = false, by every way on which a run renders."""
    from megatron_rl.cli.data_tools.prompts import render_shown
    from megatron_rl.data.dropped_prompts import render_in_child
    from megatron_rl.launcher.dry_run import render_all

    config = Config.model_validate(
        {
            "model": {"path": folders / "qwen3"},
            "render": {"system_prompt": "", "chat_template_kwargs": {"enable_thinking": False}},
            "sampling": {"max_new_tokens": 8},
            "generator": {"context_tokens": 4096},
        }
    )
    expected = own_ids(folders / "qwen3", [USER], True, enable_thinking=False)
    thinking = own_ids(folders / "qwen3", [USER], True)
    assert len(expected) > len(thinking)
    prompt = Prompt("p", "math", [ChatMessage("user", ASK)], "12")
    renderer = Renderer(
        config.render, folders / "qwen3", 4096, format_checks=config.reward.format_checks
    )
    worker = GeneratorWorker(OneToken(), renderer, [], capacity=1)
    # Evaluation has leases of the same kind.
    assert worker._completions._render(Lease(0, prompt, [0], Sampling(8, 1.0))) == expected
    example = SftExample([SftMessage("user", ASK)], "12")
    (sequence,) = tokenize([example], renderer)
    assert sequence.token_ids[: sequence.prompt_length].tolist() == expected
    (shown,), findings = render_shown(config, [prompt])
    assert findings == []
    assert shown.tokens == len(expected) and shown.text.endswith("<think>\n\n</think>\n\n")
    (tried,) = render_all(config, [prompt])
    assert tried.text == shown.text
    conversation = [Conversation("math", prompt.messages)]
    room = 4096 - len(expected)
    assert render_in_child(config, conversation, [room], [])[0] == {}
    assert list(render_in_child(config, conversation, [room + 1], [])[0]) == [0]


class OneToken:
    """What a worker reads of an engine that it never asks."""

    name, engine_version, version = "one", "1", 0


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("qwen3", {"enable_thinking": False}, ""),
        ("qwen3", {"enable_thinkin": False}, "reads no variable 'enable_thinkin', so it changes "
         "nothing; it reads enable_thinking."),
        ("llama3", {"date_string": "x", "enable_thinking": True},
         "reads no variable 'enable_thinking', so it changes nothing; it reads custom_tools, "
         "date_string."),
        ("smollm2", {"thinking": True, "effort": "low"},
         "'effort', 'thinking', so it changes nothing; it reads none but messages and tools."),
    ],
)  # fmt: skip
def test_a_variable_that_the_template_never_reads_is_said(
    folders: Path, name: str, given: dict[str, Any], expected: str
) -> None:
    notes = probe_renderer(make(folders / name, chat_template_kwargs=given))
    found = [note for note in notes if "render.chat_template_kwargs: " in note]
    assert len(found) == bool(expected) and expected in "".join(found)


def test_blocks_of_generation_and_loop_controls_are_read(folders: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{% continue %}{% endif %}"
        "{{ bos_token }}{% generation %}{{ m.content if deep else '' }}{% endgeneration %}"
        "{{ eos_token }}{% endfor %}"
    )
    renderer = make(folders / "mistral", chat_template=template)
    assert renderer.template.reads == {"messages", "bos_token", "deep", "eos_token"}


THOUGHT = ("assistant", "{open}\n12\n{close}\nIt is 12.")
KINDS = {
    "single": ["user"],
    "system": ["system", "user"],
    "answers": ["user", ("assistant", "It is 12."), "user"],
    "thoughts": ["user", THOUGHT, "user"],
    "tool": ["user", ("assistant", "I look it up."), ("tool", "12"), "user"],
}


def conversation(kind: str, opening: str = "<think>", closing: str = "</think>") -> Conversation:
    turns = [(turn, ASK) if isinstance(turn, str) else turn for turn in KINDS[kind]]
    return Conversation(
        "sums",
        [
            ChatMessage(role, text.replace("{open}", opening).replace("{close}", closing))
            for role, text in turns
        ],
    )


def left_out(renderer: Renderer, conversations: list[Conversation]) -> list[str]:
    return [note for note in probe_renderer(renderer, conversations) if "leaves out" in note]


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "mistral", "llama3", "r1"])
def test_a_run_of_single_turns_is_told_of_no_loss(folders: Path, name: str) -> None:
    renderer = make(folders / name, system_prompt="be brief")
    assert left_out(renderer, [conversation("single")] * 3 + [conversation("system")]) == []


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("smollm2", ""),
        ("qwen2.5", ""),
        ("qwen3", "thoughts of earlier answers (2 prompts)"),
        # It refuses messages of tools, so each such prompt is left out of the run.
        ("mistral", ""),
        ("llama3", ""),
        ("r1", "thoughts of earlier answers (2 prompts)"),
    ],
)
def test_what_a_template_leaves_out_of_the_runs_prompts_is_said_with_their_number(
    folders: Path, name: str, losses: str
) -> None:
    tags = ("[THINK]", "[/THINK]") if name == "mistral" else ("<think>", "</think>")
    prompts = [conversation(kind, *tags) for kind in KINDS]
    notes = left_out(make(folders / name), [*prompts, conversation("thoughts", *tags)])
    expected = f"note: the chat template leaves out or changes: {losses}"
    assert notes == ([expected] if losses else [])


ANSWER, LOOKED_UP = ("assistant", "It is 12."), ("tool", '12 "a"')
Q = ("user", "1?")
QWEN = {"user": "<|im_start|>user\n1?<|im_end|>\n", "open": "<|im_start|>assistant\n"}
TOOL = '<|im_start|>user\n<tool_response>\n12 "a"\n</tool_response><|im_end|>\n'
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}"


@pytest.mark.parametrize(
    ("name", "turns", "text"),
    [
        # Answers since the question keep their thoughts, and only the last gets empty ones.
        ("qwen3", [Q, ANSWER, LOOKED_UP],
         f"{QWEN['user']}{QWEN['open']}It is 12.<|im_end|>\n{TOOL}{QWEN['open']}"),
        ("qwen3", [Q, ("assistant", "<think>\n6+6\n</think>\n\nIt is 12."), LOOKED_UP],
         f"{QWEN['user']}{QWEN['open']}<think>\n6+6\n</think>\n\nIt is 12.<|im_end|>\n{TOOL}"
         f"{QWEN['open']}"),
        ("qwen3", [Q, ("assistant", "<think>\n6+6\n</think>\n\nIt is 12."), Q],
         f"{QWEN['user']}{QWEN['open']}It is 12.<|im_end|>\n{QWEN['user']}{QWEN['open']}"),
        ("qwen2.5", [("system", "s"), Q, ANSWER, LOOKED_UP],
         f"<|im_start|>system\ns<|im_end|>\n{QWEN['user']}{QWEN['open']}It is 12.<|im_end|>\n"
         f"{TOOL}{QWEN['open']}"),
        ("llama3", [("system", " s "), Q, ANSWER, LOOKED_UP],
         "<|begin_of_text|>"
         + LLAMA.format("system", "Cutting Knowledge Date: December 2023\nToday Date: d\n\ns")
         + f"<|eot_id|>{LLAMA.format('user', '1?')}<|eot_id|>"
         + f"{LLAMA.format('assistant', 'It is 12.')}<|eot_id|>"
         + LLAMA.format("ipython", '"12 \\"a\\""<|eot_id|>') + LLAMA.format("assistant", "")),
        # R1's template opens no answer behind the output of a tool.
        ("r1", [Q, ANSWER, LOOKED_UP],
         "<｜begin▁of▁sentence｜><｜User｜>1?<｜Assistant｜>It is 12.<｜end▁of▁sentence｜>"
         '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>12 "a"<｜tool▁output▁end｜>'
         "<｜tool▁outputs▁end｜>"),
        ("r1", [("system", "s"), Q, ("assistant", "6+6\n</think>\nIt is 12."), Q],
         "<｜begin▁of▁sentence｜>s<｜User｜>1?<｜Assistant｜>\nIt is 12.<｜end▁of▁sentence｜>"
         "<｜User｜>1?<｜Assistant｜><think>\n"),
    ],
)  # fmt: skip
def test_longer_conversations_have_the_text_of_the_published_templates(
    folders: Path, name: str, turns: list[tuple[str, str]], text: str
) -> None:
    given = {"date_string": "d"} if name == "llama3" else {}
    renderer = make(folders / name, chat_template_kwargs=given)
    ids = renderer.render([ChatMessage(*turn) for turn in turns], 8, task="sums")
    # A stop token at the end is part of the prompt, and `decode` would leave it out.
    assert renderer.tokenizer.decode(ids, skip_special_tokens=False) == text
    plain = [{"role": role, "content": content} for role, content in turns]
    assert ids == own_ids(folders / name, plain, True, **given)


def test_mistral_refuses_messages_of_tools_without_ids(folders: Path) -> None:
    with pytest.raises(RenderError, match="only user, assistant and tools with ids"):
        make(folders / "mistral").render(
            [ChatMessage(*turn) for turn in (Q, ANSWER, LOOKED_UP)], 8, task="sums"
        )


def test_losses_of_every_role_are_said(folders: Path) -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    renderer = make(folders / "qwen3", chat_template=users)
    assert left_out(renderer, [conversation("single")]) == []
    assert left_out(renderer, [conversation(kind) for kind in KINDS]) == [
        "note: the chat template leaves out or changes: earlier answers (3 prompts), messages of "
        "the role 'tool' (1 prompts), system messages (1 prompts)"
    ]
    last = "{{ messages[-1].content }}"
    notes = left_out(make(folders / "qwen3", chat_template=last), [conversation("answers")])
    assert notes[0].startswith("warning: the chat template leaves out or changes: earlier answers")
    assert notes[0].endswith("questions (1 prompts)")
    shouts = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    notes = left_out(make(folders / "qwen3", chat_template=shouts), [conversation("single")])
    assert notes == ["warning: the chat template leaves out or changes: questions (1 prompts)"]


def test_lost_words_of_the_run_are_warned_of(folders: Path) -> None:
    """A template without system messages, one that refuses them, and one that drops thoughts."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    renderer = make(folders / "mistral", chat_template=template, system_prompt="be brief")
    (note,) = left_out(renderer, [conversation("single")])
    assert "leaves out or changes the run's system prompt. Put its words into" in note
    # Prompts with a system message of their own get none of ours.
    (note,) = left_out(renderer, [conversation("system")])
    assert note == "note: the chat template leaves out or changes: system messages (1 prompts)"
    # Example exchanges of the format check hold thoughts, which Qwen3's template drops.
    for name, is_lost in (("qwen3", True), ("smollm2", False)):
        renderer = make(folders / name, system_prompt=None, demonstrate=True)
        found = probe_renderer(renderer, [conversation("single")])
        assert len([n for n in found if "changes the example exchange" in n]) == is_lost


def test_a_template_that_is_no_jinja_or_writes_unknown_tokens_is_refused(
    folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"cannot be read: .*line 2\. .*render.chat_template"):
        make(folders / "mistral", chat_template="{{ messages }}\n{% if %}")
    ids = write_family(tmp_path, "qwen3", vocab_size=250)
    with pytest.raises(InputError, match=f"with id {ids['<|im_end|>']}, but the model has 250"):
        probe_renderer(make(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{{ 'a'.index('b') }}", "{% include 'x' %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ messages.x.y }}",
        "{{ ''.__class__.__mro__ }}", "{{ messages + 1 }}", "{{ {}['x'].y }}",
    ],
)  # fmt: skip
def test_a_template_that_fails_refuses_prompts_with_the_reason(
    folders: Path, template: str
) -> None:
    renderer = make(folders / "qwen3", chat_template=template)
    with pytest.raises(RenderError, match=r"the chat template failed \(\w+: .*roles \['user'\]"):
        prompt_ids(renderer)
    assert renderer.stop_ids == renderer.model_stop_ids
    assert left_out(renderer, [conversation("single")]) == []


def test_an_exported_template_wins_over_the_tokenizers(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    renderer = make(tmp_path)
    assert renderer.tokenizer.get_chat_template() == CHATML
    assert renderer.decode(prompt_ids(renderer)).endswith("<|im_start|>assistant\n")


def test_notes_of_a_run_come_with_its_dropped_prompts(folders: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": folders / "qwen2.5-base"},
            "render": {"chat_template_kwargs": {"enable_thinking": False}},
            "sampling": {"max_new_tokens": 8},
        }
    )
    prompt = Prompt("p", "math", [ChatMessage("user", ASK)], "12")
    found = try_rendering([prompt], config)
    assert found.dropped == []
    assert [note.split(":")[0] for note in found.notes] == ["warning", "note"]
    assert "reads no variable 'enable_thinking'" in found.notes[0]
    assert "ends an answer with '<|im_end|>'" in found.notes[1]
