"""SFT examples: reading, tokens with loss, weights, order."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import RenderConfig
from megatron_rl.data.tiny_model import make_folder
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.prompt import ChatMessage
from megatron_rl.protocol.render import Conversation, Renderer
from megatron_rl.trainer.sft_dataset import minibatches, read_sft_dataset
from megatron_rl.trainer.sft_rendering import tokenize
from tests.protocol.real_templates import open_model

LINE = '{"messages": [{"role": "user", "content": "sort 21="}], "response": "<think></think>12"}\n'


def make_renderer(folder: Path) -> Renderer:
    return Renderer(RenderConfig(system_prompt=""), folder, 64, format_checks={"math": "think_box"})


def test_bad_line_is_named_with_its_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(LINE + '{"messages": [], "reply": "x"}\n')
    with pytest.raises(InputError, match=r"sft\.jsonl:2: .*response"):
        read_sft_dataset(path)


def test_only_the_response_and_its_end_carry_loss(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", seed=0)
    path = tmp_path / "sft.jsonl"
    path.write_text(LINE)
    renderer = make_renderer(tmp_path / "model")
    (sequence,) = tokenize(read_sft_dataset(path), renderer)
    completion = sequence.token_ids[sequence.prompt_length :].tolist()
    assert renderer.decode(sequence.token_ids[: sequence.prompt_length].tolist()).endswith("21=")
    assert completion[-1] in renderer.stop_ids
    assert renderer.decode(completion) == "<think></think>12"
    # <think>, </think>, 1, 2 and the end are one token each.
    assert len(completion) == 5 == len(sequence.generator_logprobs)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "llama3.2", "phi3.5"])
def test_all_replies_of_a_conversation_carry_loss_where_the_response_is_a_message(
    tmp_path: Path, name: str
) -> None:
    renderer = open_model(tmp_path / name, name)
    spoken = [("user", "a?"), ("assistant", "one"), ("user", "b?"), ("assistant", "two 🙂")]
    messages = [{"role": role, "content": text} for role, text in spoken]
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"task": "sums", "messages": messages}) + "\n")
    (sequence,) = tokenize(read_sft_dataset(path), renderer)
    assert sequence.find_fault() == ""
    learnt = sequence.token_ids[sequence.targets].tolist()
    assert learnt == [*renderer.render_response("one"), *renderer.render_response("two 🙂")]
    opened = renderer.turns(Conversation("sums", [ChatMessage(*turn) for turn in spoken]))
    whole = renderer.encode(renderer.template.render(opened, opens_answer=False))
    assert whole[: len(sequence.token_ids)] == sequence.token_ids.tolist()
    messages.insert(1, messages[1])
    path.write_text(json.dumps({"task": "sums", "messages": messages}) + "\n")
    with pytest.raises(RenderError, match="two messages of the assistant in a row"):
        list(tokenize(read_sft_dataset(path), renderer))


def test_weights_of_a_minibatch_sum_to_one_and_every_example_comes_once_an_epoch(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path / "model", seed=0)
    path = tmp_path / "sft.jsonl"
    digits = ["1", "12", "123", "1234", "12345", "123456"]
    path.write_text("".join(LINE.replace("12", d) for d in digits))
    sequences = list(tokenize(read_sft_dataset(path), make_renderer(tmp_path / "model")))
    batches = list(minibatches(sequences, batch_size=3, steps=4, seed=1))
    for batch in batches:
        assert sum(s.weight * len(s.generator_logprobs) for s in batch) == pytest.approx(1.0)
    for epoch in (batches[:2], batches[2:]):
        lengths = sorted(len(s.token_ids) for batch in epoch for s in batch)
        assert lengths == sorted(len(s.token_ids) for s in sequences)
    again = list(minibatches(sequences, batch_size=3, steps=4, seed=1))
    for one, other in zip(batches, again, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)


CANNOT_CONTINUE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""No token closes a reply."""


def test_one_reply_needs_no_template_that_continues_conversations(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "smollm2", template=CANNOT_CONTINUE)
    asked, answered = {"role": "user", "content": "21="}, {"role": "assistant", "content": "12"}
    path = tmp_path / "sft.jsonl"
    rows = [
        {"messages": [asked, answered], "task": "sums"},
        {"messages": [asked], "response": "12", "task": "sums"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = tokenize(read_sft_dataset(path), renderer)
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert (one.prompt_length, one.given) == (other.prompt_length, other.given)

    path.write_text(json.dumps({"messages": [asked, answered] * 2, "task": "sums"}) + "\n")
    # What the rollouts do with earlier replies would not help an example.
    with pytest.raises(RenderError, match='with the roles user .* write the last .*"response"'):
        list(tokenize(read_sft_dataset(path), renderer))
