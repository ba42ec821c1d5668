"""Tool calls, results and weights of SFT messages, against transformers' own rendering."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.curation.rows import encode_lines
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.sft_dataset import minibatches, read_sft_dataset
from megatron_rl.trainer.sft_rendering import tokenize, tokenize_lines, trial_of
from tests.protocol.real_templates import open_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def call(a: int, b: int, *, is_text: bool = True) -> dict[str, Any]:
    arguments = {"a": a, "b": b}
    function = {"name": "add", "arguments": json.dumps(arguments) if is_text else arguments}
    return {"id": f"call0000{a}", "type": "function", "function": function}


def conversation(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls]
    return [
        {"role": "user", "content": "What is 1+2?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *results,
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You are welcome."},
    ]


def write(path: Path, *messages: list[dict[str, Any]], **keys: Any) -> Path:
    rows = [{"task": "sums", "messages": one, "tools": TOOLS, **keys} for one in messages]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(tmp_path: Path, renderer: Renderer, *messages: list[dict[str, Any]]) -> list[Any]:
    return list(tokenize(read_sft_dataset(write(tmp_path / "sft.jsonl", *messages)), renderer))


def by_prefixes(renderer: Renderer, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """(ids of the whole conversation, which ones an assistant writes), by transformers alone."""
    turns = json.loads(json.dumps(messages))
    for one in turns:
        one["content"] = one["content"] or ""
        for made in one.get("tool_calls") or []:
            if isinstance(made["function"]["arguments"], str):
                made["function"]["arguments"] = json.loads(made["function"]["arguments"])

    def text(count: int, *, opens: bool = False) -> str:
        found = renderer.tokenizer.apply_chat_template(
            turns[:count], tools=TOOLS, tokenize=False, add_generation_prompt=opens
        )
        assert isinstance(found, str)
        return found

    found = renderer.tokenizer(
        text(len(turns)), add_special_tokens=False, return_offsets_mapping=True
    )
    taught = [
        (len(text(n, opens=True)), len(text(n + 1).rstrip("\n")))
        for n, one in enumerate(turns)
        if one["role"] == "assistant"
    ]
    mask = [any(a <= s and e <= b for a, b in taught) for s, e in found["offset_mapping"]]
    return found["input_ids"], mask


CONVERSATIONS = {
    "null": conversation(call(1, 2)),
    "object": conversation(call(1, 2, is_text=False), content=""),
    "content": conversation(call(1, 2), content="Let me add <b>."),
    "two calls": conversation(call(1, 2), call(2, 1), content="Twice."),
    "no text": conversation(call(1, 2), call(2, 1)),
    "named": conversation(call(1, 2), call(2, 1), content="I add, then add."),
    "ends in a call": conversation(call(1, 2))[:2],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_calls_are_taught_with_the_tokens_that_transformers_gives(
    tmp_path: Path, name: str
) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    (sequence,) = read(tmp_path, renderer, CONVERSATIONS[name])
    ids, mask = by_prefixes(renderer, CONVERSATIONS[name])
    assert sequence.find_fault() == ""
    # The template's line break behind the last reply is not learnt, so it is not there.
    assert sequence.token_ids.tolist() == ids[: len(sequence.token_ids)]
    assert not any(mask[len(sequence.token_ids) :])
    assert sequence.targets.tolist() == np.flatnonzero(mask).tolist()
    assert renderer.decode(sequence.token_ids[sequence.targets].tolist()).count("<tool_call>") == (
        len(CONVERSATIONS[name][1]["tool_calls"])
    )


def test_each_taught_token_of_calls_weighs_the_same(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    rows = [CONVERSATIONS["null"], CONVERSATIONS["two calls"]]
    (batch,) = minibatches(read(tmp_path, renderer, *rows), batch_size=2, steps=1, seed=0)
    count = sum(sum(by_prefixes(renderer, row)[1]) for row in rows)
    assert [one.weight for one in batch] == pytest.approx([1 / count] * 2)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("llama3.2", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>'),
        ("ministral3", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>'),
        (
            "gpt_oss",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
        ),
        (
            "glm4.5",
            "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>",
        ),
    ],
)
def test_a_call_is_written_and_ends_as_the_template_has_it(
    tmp_path: Path, name: str, written: str
) -> None:
    renderer = open_model(tmp_path / "m", name)
    (sequence,) = read(tmp_path, renderer, CONVERSATIONS["null"][:4])
    learnt = renderer.tokenizer.decode(sequence.token_ids[sequence.targets])
    assert learnt.startswith(written) and "It is 3." in learnt
    whole = renderer.tokenizer.decode(sequence.token_ids)
    assert whole.count(written) == 1 and "probe" not in whole


def weighted(*weights: float) -> list[dict[str, Any]]:
    messages = json.loads(json.dumps(CONVERSATIONS["null"]))
    replies = [one for one in messages if one["role"] == "assistant"]
    for reply, weight in zip(replies, weights, strict=True):
        reply["weight"] = weight
    return messages


@pytest.mark.parametrize("weights", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1), (1, 0, 0)])
def test_a_message_of_weight_0_is_seen_and_not_taught(
    tmp_path: Path, weights: tuple[int, ...]
) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    (sequence,) = read(tmp_path, renderer, weighted(*weights))
    assert sequence.find_fault() == ""
    ids, mask = by_prefixes(renderer, CONVERSATIONS["null"])
    assert sequence.token_ids.tolist() == ids[: len(sequence.token_ids)]
    places = np.flatnonzero(mask)
    # Replies are the runs of places.
    replies = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    kept = [run for run, weight in zip(replies, weights, strict=True) if weight]
    assert sequence.targets.tolist() == np.concatenate(kept).tolist()


def changed(place: int, **keys: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(json.dumps(CONVERSATIONS["null"]))
    messages[place].update(keys)
    return messages


BROKEN = call(1, 2)
BROKEN["function"]["arguments"] = "{broken"
FAULTS = {
    "key": (changed(0, mood="good"), "unknown field `mood`.*Keys of a message: role, content"),
    "weight": (changed(1, weight=0.5), "`weight` is 0.5; allowed are 0"),
    "weight of a user": (changed(0, weight=0), "`weight` is allowed only where the role is 'assis"),
    "nothing taught": (weighted(0, 0, 0), "every message of the assistant has `weight` 0"),
    "no content": (changed(3, content=None), "`content` is missing"),
    "arguments": (changed(1, tool_calls=[BROKEN]), "'{broken' of 'add' are no JSON object"),
    "older form": (changed(1, function_call={"name": "add"}), r"`null`.*function_call"),
    "empty": (
        changed(3, content=" \n"),
        "message 3 is empty: remove the line, or give the message",
    ),
    "no parts": (changed(3, content=[]), "the reply of message 3 is empty"),
    "image": (
        changed(0, content=[{"type": "image_url", "image_url": {"url": "a.png"}}]),
        "part of the type 'image_url'.*only parts of text are read - at `.*0",
    ),
    "thoughts twice": (
        changed(3, content="<think>a</think>b", reasoning_content="a"),
        "thoughts are given twice",
    ),
    "half of a pair": (changed(0, content="\ud83d"), r"half of a surrogate pair \(\\ud83d\)"),
    "key of a call": (changed(1, tool_calls=[call(1, 2) | {"mode": 1}]), "unknown field `mode`"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_taught_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    messages, text = FAULTS[name]
    path = write(tmp_path / "sft.jsonl", CONVERSATIONS["null"], messages)
    with pytest.raises(InputError, match=rf"sft\.jsonl:2: .*{text}"):
        read_sft_dataset(path)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"messages": CONVERSATIONS["null"][:1], "response": ""},
            "there is no reply: `response` is",
        ),
        ({"messages": CONVERSATIONS["null"][:1]}, "there is no reply: `response` is missing or em"),
        (
            {"messages": CONVERSATIONS["null"][:1], "response": " \n"},
            "the `response` is empty: rem",
        ),
        ({"messages": CONVERSATIONS["null"][3:4]}, "there is no message before the reply"),
        (
            {"messages": weighted(1, 1, 1)[:3], "response": " ", "learns_all": True},
            "the `response` is empty",
        ),
    ],
)
def test_a_row_without_a_reply_is_refused_with_its_line(
    tmp_path: Path, row: dict[str, Any], text: str
) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS["null"][3:6], "response": "a"}) + "\n\n")
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=rf"sft\.jsonl:3: .*{text}"):
        read_sft_dataset(path)


def test_an_empty_reply_of_weight_0_and_one_of_calls_or_thoughts_alone_are_examples(
    tmp_path: Path,
) -> None:
    renderer = open_model(tmp_path / "m", "qwen3")
    rows = (
        changed(3, content="", weight=0),
        changed(3, content="", reasoning_content="So."),
        CONVERSATIONS["ends in a call"],
    )
    taught = [
        renderer.tokenizer.decode(one.token_ids[one.targets])
        for one in read(tmp_path, renderer, *rows)
    ]
    made = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    first = f"<think>\n\n</think>\n\n{made}"
    # Two ends are taught, and not that of the empty reply.
    assert taught[0] == f"{first}You are welcome.<|im_end|>"
    assert taught[1] == f"{first}<think>\nSo.\n</think>\n\n<|im_end|>You are welcome.<|im_end|>"
    assert taught[2] == first


def test_parts_of_text_are_the_text_that_they_make(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    parts = changed(0, content=[{"type": "text", "text": one} for one in ("What is", " 1+2?")])
    parts[3]["content"] = [{"type": "text", "text": "It is 3."}]
    (sequence,) = read(tmp_path, renderer, parts)
    ids, mask = by_prefixes(renderer, CONVERSATIONS["null"])
    assert sequence.token_ids.tolist() == ids[: len(sequence.token_ids)]
    assert sequence.targets.tolist() == np.flatnonzero(mask).tolist()
    path = tmp_path / "sft.jsonl"
    examples = read_sft_dataset(path)
    path.write_text(encode_lines(examples))
    assert read_sft_dataset(path) == examples


def test_a_row_that_begins_with_a_reply_needs_a_system_prompt(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "smollm2")
    renderer._config = renderer._config.model_copy(update={"system_prompt": ""})
    path = write(tmp_path / "sft.jsonl", CONVERSATIONS["null"][3:], tools=[])
    with pytest.raises(InputError, match=r"sft\.jsonl:1: the first message is the assistant's"):
        trial_of(path)(renderer)


def test_an_example_with_calls_is_read_again_as_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "sft.jsonl", CONVERSATIONS["ends in a call"], weighted(0, 1, 1))
    examples = read_sft_dataset(path)
    path.write_text(encode_lines(examples))
    assert read_sft_dataset(path) == examples
    assert [call.arguments for call in examples[0].messages[1].calls] == [{"a": 1, "b": 2}]


def test_tools_may_be_json_text_or_null(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    path = tmp_path / "sft.jsonl"
    ids = [
        [one.token_ids.tolist() for one in tokenize(read_sft_dataset(path), renderer)]
        for tools in (TOOLS, json.dumps(TOOLS), None, "", [])
        if write(path, CONVERSATIONS["null"], tools=tools)
    ]
    assert ids[0] == ids[1] != ids[2] == ids[3] == ids[4]
    assert '"description": "Adds."' in renderer.decode(ids[1][0])
    for text in ("[{", '{"type": "function"}'):
        with pytest.raises(InputError, match=r"sft\.jsonl:1: .*are no JSON list of objects"):
            read_sft_dataset(write(path, CONVERSATIONS["null"], tools=text))


def test_calls_beside_a_response_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "sft.jsonl", CONVERSATIONS["null"][:3], tools=[], response="3")
    with pytest.raises(InputError, match="`tool_calls`, which needs an example whose last message"):
        read_sft_dataset(path)


@pytest.mark.parametrize(
    ("model", "name", "text"),
    [
        ("smollm2", "null", "its text with and without tool_calls is the same"),
        ("llama3.2", "content", "leaves 'Let me add <b>.' out of a message with tool_calls"),
        # gpt-oss' template writes the first call, and the tool's name before each result.
        ("gpt_oss", "no text", r"leaves call 2 of 2 \('add'\) out of a message with tool_calls"),
        ("gpt_oss", "named", r"leaves call 2 of 2 \('add'\) out of a message with tool_calls"),
    ],
)
def test_a_template_that_leaves_out_a_part_of_a_call_is_refused_with_the_line(
    tmp_path: Path, model: str, name: str, text: str
) -> None:
    renderer = open_model(tmp_path / "m", model)
    path = tmp_path / "sft.jsonl"
    spoken = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [{"task": "sums", "messages": one} for one in (spoken, CONVERSATIONS[name][:-2])]
    # A blank line counts as a line.
    path.write_text(f"{json.dumps(lines[0])}\n\n{json.dumps(lines[1])}\n")
    examples = dict(enumerate(read_sft_dataset(path)))
    with pytest.raises(InputError, match=rf"sft\.jsonl:3: .*{text}"):
        tokenize_lines(path, examples, renderer)
    with pytest.raises(InputError, match=rf"sft\.jsonl:3: .*{text}"):
        trial_of(path)(renderer)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("place", [1, 3])
def test_thoughts_apart_from_the_content_are_taught(tmp_path: Path, key: str, place: int) -> None:
    """As they are within the content, where Qwen's template writes them."""
    renderer = open_model(tmp_path / "m", "qwen3")
    apart = changed(1, content="Let me add.")
    within = json.loads(json.dumps(apart))
    within[place]["content"] = "<think>\nSo so.\n</think>\n\n" + apart[place]["content"]
    apart[place][key] = "So so."
    found: list[TrainSequence] = read(tmp_path, renderer, apart, within)
    assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
    assert found[0].targets.tolist() == found[1].targets.tolist()
    assert "So so." in renderer.decode(found[0].token_ids[found[0].targets].tolist())


def test_thoughts_of_a_model_that_does_not_think_are_refused(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    renderer.tags = None
    with pytest.raises(RenderError, match="the model has no think tags"):
        read(tmp_path, renderer, changed(3, reasoning_content="So."))


def test_a_line_that_is_too_long_is_named_with_its_tokens_and_the_key(tmp_path: Path) -> None:
    renderer = open_model(tmp_path / "m", "qwen2.5")
    renderer.context_tokens = 400
    long = changed(0, content="x " * 3000)
    path = write(tmp_path / "sft.jsonl", CONVERSATIONS["null"], long)
    ids, _ = by_prefixes(renderer, long)
    text = rf"sft\.jsonl:2: prompt and response have {len(ids) - 1} tokens; allowed are at most 400"
    with pytest.raises(InputError, match=text + r" \(generator.context_tokens\): raise it"):
        trial_of(path)(renderer)
