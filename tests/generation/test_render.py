"""Prompts and completions through the tiny tokenizer, one character a token."""

from pathlib import Path

import pytest

from megatron_rl.protocol.config import RenderConfig
from megatron_rl.protocol.process import InputError
from megatron_rl.protocol.render import Renderer, RenderError
from megatron_rl.protocol.types import Message
from tests.generation.tiny_model import CHARACTERS, EOS_ID, TEMPLATE

FIRST = 3  # id of the first character, after the special tokens


def ids(text: str) -> list[int]:
    return [FIRST + CHARACTERS.index(character) for character in text]


def make(models_dir: Path, context_tokens: int = 64, **render: str) -> Renderer:
    return Renderer(RenderConfig(**render), models_dir / "old", context_tokens)


def test_messages_go_through_the_folders_template(models_dir: Path) -> None:
    assert make(models_dir).render([Message("user", "1+1")], 8) == ids("user:1+1=>")


def test_the_system_prompt_comes_first(models_dir: Path) -> None:
    renderer = make(models_dir, system_prompt="be brief")
    expected = ids("system:be brief=>user:1=>")
    assert renderer.render([Message("user", "1")], 8) == expected


def test_the_configured_template_replaces_the_folders(models_dir: Path) -> None:
    renderer = make(models_dir, chat_template="{{ messages[0].content }}?")
    assert renderer.render([Message("user", "7")], 8) == ids("7?")


def test_a_prompt_that_leaves_no_room_names_the_numbers(models_dir: Path) -> None:
    renderer = make(models_dir, context_tokens=20)
    assert len(renderer.render([Message("user", "12345")], 8)) == 12
    with pytest.raises(RenderError, match=r"13 tokens; allowed are 1 to 12 = .*20 - .* 8"):
        renderer.render([Message("user", "123456")], 8)


def test_a_template_that_fails_says_so(models_dir: Path) -> None:
    template = "{{ raise_exception('no ' + messages[0].role + ' allowed') }}"
    renderer = make(models_dir, chat_template=template)
    with pytest.raises(RenderError, match=r"no critic allowed.*roles \['critic'\]"):
        renderer.render([Message("critic", "x")], 8)


def test_the_tail_holds_what_the_template_writes_last(models_dir: Path) -> None:
    renderer = make(models_dir, chat_template=TEMPLATE + "A:<think>\n")
    prompt = renderer.render([Message("user", "what is 3+4?")], 8)
    assert renderer.tail(prompt).rstrip("\n").endswith("=>A:<think>")
    assert len(renderer.tail(prompt)) < 20 < len(prompt)


def test_text_leaves_out_only_the_last_end_of_sequence(models_dir: Path) -> None:
    renderer = make(models_dir)
    assert renderer.stop_ids == (EOS_ID,)
    assert renderer.decode([*ids("a b"), EOS_ID]) == "a b"
    assert renderer.decode(ids("a b")) == "a b"
    assert renderer.decode([2, *ids("ab")]) == "<pad>ab"


def test_a_folder_without_a_tokenizer_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot load its tokenizer"):
        Renderer(RenderConfig(), tmp_path, 64)
