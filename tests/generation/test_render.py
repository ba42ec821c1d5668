"""Prompts and completions through the tiny tokenizer, one character a token."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from generation.engine import Completion
from generation.rollouts import RENDERED_PROMPTS
from generation.worker import GeneratorWorker
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.control_tokens import ControlTokens
from megatron_rl.protocol.render import Conversation, Renderer, RenderError
from megatron_rl.protocol.types import ChatMessage, Lease, Prompt, Sampling, VersionSpan
from megatron_rl.trainer.sft_dataset import SftExample
from megatron_rl.trainer.sft_messages import SftMessage
from megatron_rl.trainer.sft_rendering import tokenize
from tests.generation.tiny_model import CHARACTERS, EOS_ID, TEMPLATE, write_tokenizer

FIRST = 3  # id of the first character, after the special tokens


def ids(text: str) -> list[int]:
    return [FIRST + CHARACTERS.index(character) for character in text]


def make(models_dir: Path, context_tokens: int = 64, **render: str) -> Renderer:
    config = RenderConfig(**{"system_prompt": "", **render})
    return Renderer(
        config, models_dir / "old", context_tokens, format_checks={"sums": "box", "any": "none"}
    )


def render(renderer: Renderer, question: str, max_new_tokens: int = 8) -> list[int]:
    return renderer.render([ChatMessage("user", question)], max_new_tokens, task="sums")


def test_messages_go_through_the_folders_template(models_dir: Path) -> None:
    assert render(make(models_dir), "1+1") == ids("user:1+1=>")


def test_the_system_prompt_comes_first(models_dir: Path) -> None:
    renderer = make(models_dir, system_prompt="be brief")
    expected = ids("system:be brief=>user:1=>")
    assert render(renderer, "1") == expected


def test_a_prompt_gets_the_system_prompt_of_its_gate_unless_it_has_its_own(
    models_dir: Path,
) -> None:
    config = RenderConfig(system_prompts={"box": "use a box"}, demonstrations={"box": None})
    format_checks = {"sums": "box", "any": "none"}
    renderer = Renderer(config, models_dir / "old", 64, format_checks=format_checks)
    question = ChatMessage("user", "1")
    assert renderer.render([question], 8, task="sums") == ids("system:use a box=>user:1=>")
    assert renderer.render([question], 8, task="any") == ids("user:1=>")
    own = [ChatMessage("system", "mine"), question]
    assert renderer.render(own, 8, task="sums") == ids("system:mine=>user:1=>")
    with pytest.raises(InputError, match=r"unknown task 'sum': known are \['any', 'sums'\]"):
        renderer.render([question], 8, task="sum")


def test_a_demonstration_stands_between_system_prompt_and_prompt(models_dir: Path) -> None:
    exchange = {"question": "2+3", "reply": "it is 5"}
    config = RenderConfig(system_prompts={"box": "use a box"}, demonstrations={"box": exchange})
    renderer = Renderer(
        config, models_dir / "old", 64, format_checks={"sums": "box", "any": "none"}
    )
    question = ChatMessage("user", "1")
    assert renderer.render([question], 8, task="sums") == ids(
        "system:use a box=>user:2+3=>assistant:it is 5=>user:1=>"
    )
    own = [ChatMessage("system", "mine"), question]
    assert renderer.render(own, 8, task="sums") == ids("system:mine=>user:1=>")


@pytest.mark.parametrize(
    ("entry", "is_program"),
    [
        ({"cases": [{"stdin": "1 2", "stdout": "3"}]}, True),
        ({"cases": [{"stdin": "1\n2", "stdout": "3"}], "entry_point": "add"}, False),
        ({"unit_tests": "assert add(1, 2) == 3", "entry_point": "add"}, False),
        ({"source_dataset": "chain_sum", "cases": 3}, False),
        (None, False),
    ],
)
def test_the_example_exchange_is_of_the_kind_of_the_prompts_tests(
    models_dir: Path, entry: dict[str, Any] | None, is_program: bool
) -> None:
    question = ChatMessage("user", "1")
    prompt = Prompt("p", "code", [question], "", entry=json.dumps(entry) if entry else "")
    shows = {"think_code": {"question": "def", "reply": "a function"},
             "think_code_program": {"question": "read", "reply": "a program"}}  # fmt: skip
    config = RenderConfig(system_prompts={"think_code": ""}, demonstrations=shows)
    renderer = Renderer(
        config, models_dir / "old", 64, format_checks={"code": "think_code", "sums": "box"}
    )
    expected = ids(
        "user:read=>assistant:a program=>user:1=>"
        if is_program
        else "user:def=>assistant:a function=>user:1=>"
    )
    # As a generator, supervised fine-tuning and the search for prompts without room see it.
    worker = GeneratorWorker(OneToken(), renderer, Sent(), capacity=1)
    assert worker._completions._render(Lease(0, prompt, [0], Sampling(8, 1.0))) == expected
    example = SftExample([SftMessage("user", question.content)], "2", "code", prompt.is_program)
    (sequence,) = tokenize([example], renderer)
    assert sequence.token_ids[: sequence.prompt_length].tolist() == expected
    conversation = Conversation(prompt.task, prompt.messages, prompt.is_program)
    assert renderer.find_refusals([conversation], 64 - len(expected)) == {}
    assert list(renderer.find_refusals([conversation], 65 - len(expected))) == [0]


@pytest.mark.parametrize(
    ("text", "task", "is_shown"),
    [
        ("Add. Write the program in C++20.", "code", False),
        ("Solve it as main.cpp", "code", False),
        ("Read abc++", "code", True),
        ("Who made C++?", "sums", True),
    ],
)
def test_a_prompt_in_cpp_is_not_shown_a_python_program(
    models_dir: Path, text: str, task: str, is_shown: bool
) -> None:
    shown = {"question": "2+3", "reply": "5"}
    config = RenderConfig(
        system_prompts={"think_code": "", "box": ""},
        demonstrations={"think_code": shown, "think_code_program": shown, "box": shown},
    )
    renderer = Renderer(
        config, models_dir / "old", 96, format_checks={"code": "think_code", "sums": "box"}
    )
    message = ChatMessage("user", text)
    exchange = "user:2+3=>assistant:5=>" if is_shown else ""
    for is_program in (False, True):
        prompt_ids = renderer.render([message], 8, task=task, is_program=is_program)
        assert prompt_ids == ids(f"{exchange}user:{text}=>")


def test_a_token_that_the_model_lacks_is_refused_by_its_name(
    models_dir: Path, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    # All tokens but the last character, ".".
    values = {"vocab_size": FIRST + len(CHARACTERS) - 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = RenderConfig(system_prompt="")
    renderer = Renderer(config, tmp_path, 64, format_checks={"sums": "box"})
    assert render(renderer, "1+1") == ids("user:1+1=>")
    fault = r"token '\.' has the id 77, and the model has 77 tokens \(vocab_size in config.json\)"
    with pytest.raises(RenderError, match=fault):
        render(renderer, "1+1.")
    with pytest.raises(RenderError, match=fault):
        renderer.render_example([ChatMessage("user", "1+1")], "2.", task="sums")
    with pytest.raises(RenderError, match=fault):
        ControlTokens(renderer).render([{"role": "user", "content": "1+1."}])
    conversations = [Conversation("sums", [ChatMessage("user", t)]) for t in ("1", "2.", "3", "4.")]
    assert list(renderer.find_refusals(conversations, 8)) == [1, 3]
    # Of the same tokenizer, all are the model's own.
    assert render(make(models_dir), "1+1.") == ids("user:1+1.=>")


def test_only_our_own_text_says_that_a_prompt_is_too_long(models_dir: Path) -> None:
    renderer, said = make(models_dir), io.StringIO()
    renderer.tokenizer.model_max_length = 4
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    try:
        assert len(render(renderer, "1+1")) > 4
        conversation = Conversation("sums", [ChatMessage("user", "1" * 70)])
        assert "tokens; allowed" in renderer.find_refusals([conversation], 8)[0]
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert said.getvalue() == ""


def test_refusals_of_many_are_those_of_each(models_dir: Path) -> None:
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    renderer = make(models_dir, 40, chat_template=template + TEMPLATE)
    texts = ["no", *("x" * n for n in range(40)), "é" * 12, "<bos>" * 20, "<bos>" * 24]
    conversations = [
        Conversation(task, messages)
        for text in texts
        for task in ("sums", "any")
        for messages in (
            [ChatMessage("user", text)],
            [ChatMessage("user", "1"), ChatMessage("assistant", text), ChatMessage("user", "2")],
        )
    ]
    expected = {}
    for index, (task, messages, _) in enumerate(conversations):
        try:
            renderer.render(messages, 8, task=task)
        except RenderError as error:
            expected[index] = str(error)
    assert renderer.find_refusals(conversations, 8) == expected
    assert 0 < len(expected) < len(conversations)
    # One token too many is found.
    assert any("33 tokens; allowed are 1 to 32" in reason for reason in expected.values())


def test_the_tail_holds_what_the_template_writes_last(models_dir: Path) -> None:
    renderer = make(models_dir, chat_template=TEMPLATE + "A:<think>\n")
    prompt = render(renderer, "what is 3+4?", 8)
    assert renderer.tail(prompt).rstrip("\n").endswith("=>A:<think>")
    assert len(renderer.tail(prompt)) < 20 < len(prompt)


def test_the_configured_template_replaces_the_folders(models_dir: Path) -> None:
    renderer = make(models_dir, chat_template="{{ messages[0].content }}?")
    assert render(renderer, "7") == ids("7?")


def test_a_prompt_that_leaves_no_room_names_the_numbers(models_dir: Path) -> None:
    renderer = make(models_dir, context_tokens=20)
    assert len(render(renderer, "12345")) == 12
    with pytest.raises(RenderError, match=r"13 tokens; allowed are 1 to 12 = .*20 - .* 8"):
        render(renderer, "123456")


def test_a_template_that_fails_says_so(models_dir: Path) -> None:
    template = "{{ raise_exception('no ' + messages[0].role + ' allowed') }}"
    renderer = make(models_dir, chat_template=template)
    with pytest.raises(RenderError, match=r"no critic allowed.*roles \['critic'\]"):
        renderer.render([ChatMessage("critic", "x")], 8, task="sums")


def test_text_leaves_out_only_the_last_end_of_sequence(models_dir: Path) -> None:
    renderer = make(models_dir)
    assert renderer.stop_ids == (EOS_ID,)
    assert renderer.decode([*ids("a b"), EOS_ID]) == "a b"
    assert renderer.decode(ids("a b")) == "a b"
    assert renderer.decode([2, *ids("ab")]) == "<pad>ab"


def test_a_folder_without_a_tokenizer_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot load its tokenizer"):
        Renderer(RenderConfig(), tmp_path, 64, format_checks={})


class CountingRenderer(Renderer):
    """Counts how often it turns messages into ids."""

    rendered = 0

    def render(self, *arguments: Any, **named: Any) -> list[int]:
        self.rendered += 1
        return super().render(*arguments, **named)


class OneToken:
    """An engine whose completions end at once."""

    name, engine_version, version = "one", "1", 0

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        for index in indices:
            yield Completion(index, [EOS_ID], [-0.5], [VersionSpan(0, 0, 1)], "stop")


class Sent(list[Any]):
    send = list.append


def test_a_prompt_is_rendered_once_for_all_its_leases_and_few_are_kept(models_dir: Path) -> None:
    config, format_checks = RenderConfig(system_prompt=""), {"sums": "box"}
    renderer, sent = (
        CountingRenderer(config, models_dir / "old", 64, format_checks=format_checks),
        Sent(),
    )
    worker = GeneratorWorker(OneToken(), renderer, sent, capacity=4)

    def serve(question: int, index: int = 0, limit: int = 8) -> int:
        """How often that rendered a prompt."""
        before = renderer.rendered
        prompt = Prompt(f"p{question}", "sums", [ChatMessage("user", str(question))], "1")
        asyncio.run(worker._serve(Lease(0, prompt, [index], Sampling(limit, 1.0))))
        return renderer.rendered - before

    assert [serve(7, index) for index in range(16)] == [1] + [0] * 15
    assert [done.rollout.prompt_ids.tolist() for done in sent] == [ids("user:7=>")] * 16
    # The limit decides whether a prompt is too long.
    assert serve(7, limit=9) == 1
    # With 254 others 256 are kept; the next one takes the place of the one used longest ago.
    assert [serve(question) for question in range(1000, 1254)] == [1] * 254
    assert serve(7) == 0 and serve(2000) == 1
    assert serve(7) == 0 and serve(1000) == 0 and serve(7, limit=9) == 1
    assert len(worker._completions._rendered) == RENDERED_PROMPTS == 256
