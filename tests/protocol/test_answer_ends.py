"""What ends an answer: in rollouts and in what SFT teaches, for templates of many families."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import CHANNEL_TAGS
from megatron_rl.protocol.render import Conversation, stop_ids
from megatron_rl.protocol.render_probe import TaughtAnswer, probe_renderer
from megatron_rl.protocol.types import ChatMessage
from tests.protocol.real_templates import open_model
from tests.protocol.template_families import (
    ASK,
    CHATML,
    FAMILIES,
    USER,
    make,
    own_ids,
    prompt_ids,
    write_family,
)  # fmt: skip
from verification.format import think_box

THOUGHT = "<think>\n1 + 11\n</think>\n\nIt is 12"


@pytest.mark.parametrize(
    ("name", "variables", "response"),
    [
        ("smollm2", {}, THOUGHT),
        ("qwen2.5", {}, THOUGHT),
        ("qwen2.5-base", {}, THOUGHT),
        ("qwen3", {}, THOUGHT),
        ("qwen3", {"enable_thinking": False}, "It is 12"),
        ("mistral", {}, "[THINK]1 + 11[/THINK]It is 12"),
        ("llama3", {"date_string": "1 May 2026"}, "It is 12"),
    ],
)
def test_sft_teaches_the_ids_of_the_whole_conversation_up_to_its_end(
    folders: Path, name: str, variables: dict[str, Any], response: str
) -> None:
    renderer = make(folders / name, chat_template_kwargs=variables)
    prompt = prompt_ids(renderer)
    taught = prompt + renderer.render_response(response)
    answer = {"role": "assistant", "content": response}
    whole = own_ids(folders / name, [USER, answer], False, **variables)
    # Behind the end some templates begin a line.
    assert taught == whole[: len(taught)]
    assert renderer.decode(whole[len(taught) :]).strip() == ""
    assert taught[-1] in renderer.stop_ids
    assert renderer.decode(taught[len(prompt) :]) == response
    shown = TaughtAnswer(Conversation("sums", [ChatMessage("user", ASK)]), response)
    assert not [
        note for note in probe_renderer(renderer, taught=[shown]) if "SFT responses" in note
    ]


def test_a_response_that_the_template_would_write_otherwise_is_said(folders: Path) -> None:
    asked = Conversation("sums", [ChatMessage("user", ASK)])
    examples = [TaughtAnswer(asked, THOUGHT), TaughtAnswer(asked, "It is 12")]
    (note,) = [n for n in probe_renderer(make(folders / "qwen3"), taught=examples) if "SFT" in n]
    assert "would write 1 of the first 2 SFT responses otherwise" in note
    assert "'It is 12<|im_end|>' is taught" in note and "'<think>\\n\\n</think>" in note
    # DeepSeek's template opens thoughts in the prompt and leaves them out of the history.
    (note,) = [n for n in probe_renderer(make(folders / "r1"), taught=examples) if "SFT" in n]
    assert "would write 2 of the first 2" in note


def test_responses_that_no_completion_can_be_as_long_as_are_said(folders: Path) -> None:
    renderer = make(folders / "smollm2")
    asked = Conversation("sums", [ChatMessage("user", ASK)])
    # The end counts: a completion that is cut before it is not finished.
    short, long = (len(renderer.render_response(text)) for text in ("It is 12", THOUGHT))
    examples = [TaughtAnswer(asked, "It is 12"), *[TaughtAnswer(asked, THOUGHT)] * 2]

    def said(count: int, limit: int) -> list[str]:
        notes = probe_renderer(renderer, taught=examples[:count], max_new_tokens=limit)
        return [note for note in notes if "sampling.max_new_tokens" in note]

    (note,) = said(3, long - 1)
    assert "2 of the first 3 SFT responses have more tokens than" in note
    assert f"sampling.max_new_tokens = {long - 1} (the longest has {long})" in note
    assert said(3, long) == [] and said(2, long - 1) == [] and said(1, short) == []
    assert len(said(1, short - 1)) == 1


def test_spaces_that_a_template_puts_around_an_answer_are_taught(tmp_path: Path) -> None:
    ids = write_family(tmp_path, "mistral")
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    )
    renderer = make(tmp_path, chat_template=template)
    taught = prompt_ids(renderer) + renderer.render_response("12")
    assert renderer.tokenizer.decode(taught) == f"<s>[INST] {ASK} [/INST] 12 </s>"
    assert taught[-1] == ids["</s>"] and taught.count(ids["</s>"]) == 1


def test_every_end_of_a_model_ends_a_completion_and_is_left_out_once(folders: Path) -> None:
    for name, family in FAMILIES.items():
        renderer = make(folders / name)
        expected = {*family.ends, family.eos}
        if name == "qwen2.5-base":
            expected |= {"<|im_end|>"}
        tokens = {renderer.tokenizer.convert_ids_to_tokens(one) for one in renderer.stop_ids}
        assert tokens == expected
        for one in renderer.stop_ids:
            assert renderer.decode([*renderer.encode("12"), one]) == "12"
            last = renderer.tokenizer.convert_ids_to_tokens(one)
            assert renderer.decode([*renderer.encode("12"), one, one]) == f"12{last}"


def test_the_end_of_turn_of_a_base_model_ends_completions_and_is_said(folders: Path) -> None:
    renderer = make(folders / "qwen2.5-base")
    end, eos = (
        renderer.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")
    )
    assert (renderer.end_id, renderer.stop_ids) == (end, tuple(sorted((end, eos))))
    assert renderer.render_response("12") == [*renderer.encode("12"), end]
    (note,) = [note for note in probe_renderer(renderer) if "ends an answer" in note]
    assert "'<|im_end|>', and the model's folder names only '<|endoftext|>' as its end" in note
    for name in ("qwen2.5", "llama3", "mistral", "r1"):
        assert not [n for n in probe_renderer(make(folders / name)) if "ends an answer" in n]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        # An answer is opened whether asked for or not, with and without an end of turns.
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "<|im_start|>assistant\n", "<|im_end|>"),
        ("{% for m in messages %}{{ '<think>' if m.role == 'user' else '</think>' }}"
         "{{ m.content }}{% endfor %}</think>", "<|endoftext|>"),
        # Phi's ends a conversation with a second token; others end turns but the last.
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
         "{{ 'assistant: ' if add_generation_prompt else eos_token }}", "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}{{ '' if loop.last else '<|im_end|>' }}"
         "{% endfor %}", "<|endoftext|>"),
    ],
)  # fmt: skip
def test_the_end_of_a_turn_is_what_follows_every_answer(
    folders: Path, tmp_path: Path, template: str, end: str
) -> None:
    ids = write_family(tmp_path, "qwen3")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}))
    renderer = make(tmp_path, chat_template=template)
    assert renderer.end_id == ids[end]
    assert not [note for note in probe_renderer(renderer) if "after an answer" in note]


def test_a_tokenizer_without_an_end_takes_that_of_the_template_or_of_the_folder(
    tmp_path: Path,
) -> None:
    ids = write_family(tmp_path, "qwen3")
    path, generation = tmp_path / "tokenizer_config.json", tmp_path / "generation_config.json"
    values = json.loads(path.read_text())
    del values["eos_token"]
    path.write_text(json.dumps(values))
    assert make(tmp_path).end_id == ids["<|im_end|>"]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    generation.write_text(json.dumps({"eos_token_id": [ids["<|endoftext|>"]]}))
    assert make(tmp_path, chat_template=plain).end_id == ids["<|endoftext|>"]
    generation.unlink()
    assert make(tmp_path).stop_ids == (ids["<|im_end|>"],)
    with pytest.raises(InputError, match="names an end token, so no completion would end"):
        make(tmp_path, chat_template=plain)
    # A model with other parts names its ends in the configuration of its language model.
    config = {"text_config": {"eos_token_id": [ids["<think>"], ids["<|endoftext|>"]]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = {ids["<think>"], ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert set(make(tmp_path).stop_ids) == expected


def test_an_end_that_is_no_token_is_said(folders: Path) -> None:
    """Mistral's tokenizer has no <|im_end|>, so that text is many tokens."""
    renderer = make(folders / "mistral", chat_template=CHATML)
    (note,) = [note for note in probe_renderer(renderer) if "after an answer" in note]
    assert "writes '<|im_end|>' after an answer" in note and "end only with '</s>'" in note
    assert renderer.stop_ids == (renderer.tokenizer.eos_token_id,) == (renderer.end_id,)


def test_ends_of_sequence_are_those_of_both_files(tmp_path: Path) -> None:
    assert stop_ids(tmp_path, None) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_ids(tmp_path, None) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert stop_ids(tmp_path, None) == (7, 9)
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert stop_ids(tmp_path, 3) == (3, 7, 9)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    assert stop_ids(tmp_path, None) == (5, 7, 9)


def test_an_answer_in_channels_is_taught_as_the_template_writes_it(tmp_path: Path) -> None:
    renderer = open_model(tmp_path, "gpt_oss")
    renderer.tags = CHANNEL_TAGS
    asked = [{"role": "user", "content": "2 + 3?"}]
    prompt = renderer.template.render(asked)
    for response, more in (("<think>hm</think>5", {"thinking": "hm"}), ("5", {})):
        answer = {"role": "assistant", "content": "5", **more}
        whole = renderer.template.render([*asked, answer], opens_answer=False)
        example = renderer.render_example([ChatMessage("user", "2 + 3?")], response, task="sums")
        assert renderer.tokenizer.decode(example.prompt_ids) == prompt
        assert [*example.prompt_ids, *example.response_ids] == renderer.encode(whole)
        assert whole.endswith("5<|return|>")
        found = think_box(
            renderer.decode(example.response_ids).replace("5", "\\boxed{5}"), "", CHANNEL_TAGS
        )
        assert (found.answer, found.thoughts) == (("5", "hm") if more else ("", ""))
