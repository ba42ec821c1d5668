"""Prompts that cannot be rendered: found before a run, listed, and left out by the queue."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.dropped_prompts import (
    DroppedPrompt,
    read_dropped,
    try_rendering,
    write_dropped,
)
from megatron_rl.data.tiny_model import write_tokenizer
from megatron_rl.protocol.types import ChatMessage, Prompt
from tests.rollout_queue.makers import make_prompt

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")


def make_config(folder: Path) -> Config:
    """Room for 20 prompt tokens; the tiny tokenizer has one a character, and one <bos>."""
    (folder / "model").mkdir()
    write_tokenizer(folder / "model")
    return Config.model_validate(
        {
            "model": {"path": folder / "model"},
            "render": {"system_prompt": ""},
            "sampling": {"max_new_tokens": 12},
            "generator": {"context_tokens": 32},
        }
    )


def test_prompts_without_room_are_found_with_their_place(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    texts = ["1" * 19, "1" * 20, "short", "2" * 500]
    prompts = [
        Prompt(f"p{n}", "math", [ChatMessage("user", text)], "1", place=f"f:{n}" if n < 3 else "")
        for n, text in enumerate(texts)
    ]
    dropped = try_rendering(prompts, config).dropped
    assert [(d.id, d.where) for d in dropped] == [("p1", "f:1"), ("p3", "prompt 'p3'")]
    assert dropped[0].reason.startswith("the prompt has 21 tokens; allowed are 1 to 20 = ")
    assert dropped[1].reason.startswith("the prompt has 501 tokens")


def test_room_is_what_the_completions_of_a_prompt_need(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    prompts = [Prompt(name, "math", [ChatMessage("user", "1" * 19)], "1") for name in "abc"]
    # 20 tokens each, of 32: there is room for 12.
    dropped = try_rendering(prompts, config, {"a": 13, "b": 4}).dropped
    assert [prompt.id for prompt in dropped] == ["a"]
    assert "allowed are 1 to 19 = " in dropped[0].reason


def test_bad_tokenizer_is_bad_input_also_from_the_child(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="cannot load its tokenizer"):
        try_rendering([make_prompt()], config)


def test_the_list_is_read_back_and_vanishes_with_its_reason(tmp_path: Path) -> None:
    assert read_dropped(tmp_path) == frozenset()
    write_dropped(tmp_path, [DroppedPrompt("a", "f:1", "long"), DroppedPrompt("b", "", "long")])
    assert read_dropped(tmp_path) == {"a", "b"}
    lines = (tmp_path / "prompts_dropped.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"id": "a", "place": "f:1", "reason": "long"}
    write_dropped(tmp_path, [])
    assert read_dropped(tmp_path) == frozenset()


def test_damaged_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts_dropped.jsonl").write_text("{")
    with pytest.raises(InputError, match="prompts_dropped.jsonl"):
        read_dropped(tmp_path)
