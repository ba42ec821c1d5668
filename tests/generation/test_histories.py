"""Conversations whose earlier replies are rendered by the chat template, in published templates."""

from pathlib import Path
from typing import Any

import pytest

from generation.conversation import ConversationTree, Rows
from generation.engine import Completion
from generation.histories import Histories
from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import CHANNEL_TAGS, ThinkTags
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import VersionSpan
from tests.protocol.real_templates import MODELS, open_model

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fig"}}\n</tool_call>'
THOUGHT = "<think>\nhm {}\n</think>\n\n"
ROOM = 3000


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class Talk:
    """A conversation whose replies are given."""

    def __init__(self, renderer: Renderer, *, history: str, tools: list[Any] | None = None) -> None:
        renderer.history = history  # type: ignore[assignment]  # one of its two values
        self.renderer, self.tools = renderer, tools or []
        self.histories = Histories(renderer)
        self.tree = ConversationTree(completion_tokens=ROOM, context_tokens=ROOM)
        self.earlier: list[dict[str, Any]] = []

    def say(self, message: dict[str, Any], text: str, *, is_cut: bool = False) -> list[int]:
        """Token ids of the prompt that this reply answered."""
        parent = self.tree.turns[-1] if self.tree.turns else None
        place = self.histories.place(
            parent, self.earlier, [message], self.tools, task="sums", room=ROOM
        )
        turn = self.tree.open(place.parent, place.given, None)
        ids = [*self.renderer.encode(text), *([] if is_cut else [self.renderer.end_id])]
        spans = [VersionSpan(1, 0, len(ids))]
        self.tree.close(turn, Completion(0, ids, [-1.0] * len(ids), spans, "stop"))
        found = self.histories.message(turn, self.histories.read(turn, self.tools))
        self.earlier = [*self.earlier, message, found]
        return turn.prompt

    def learnt(self, rows: Rows) -> list[str]:
        return [self.renderer.decode(rows.token_ids[one.start : one.end]) for one in rows.spans]


def whole(renderer: Renderer, messages: list[Any], tools: list[Any] | None = None) -> list[int]:
    """Tokens of the template's own rendering, by the tokenizer alone."""
    values = {"date_string": "1 May 2026"}
    text = renderer.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **values
    )
    ids: list[int] = renderer.tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("name", MODELS)
def test_a_turn_asks_what_the_template_writes_for_all_messages(tmp_path: Path, name: str) -> None:
    renderer = open_model(tmp_path, name)
    talk, words = Talk(renderer, history="template"), ["one", "two 🙂", "three"]
    opens_thought = whole(renderer, [user("?")])[-2:] == renderer.encode("<think>\n")
    thought = "hm\n</think>\n\n" if opens_thought else ""
    if name == "gpt_oss":
        thought = CHANNEL_TAGS.around("hm")
    messages: list[Any] = []
    for number, word in enumerate(words):
        messages.append(user(f"question {number}"))
        prompt = talk.say(messages[-1], thought + word, is_cut=number == 1)
        assert prompt == whole(renderer, messages)
        if name in ("qwen3.5", "gpt_oss"):
            key = "thinking" if name == "gpt_oss" else "reasoning_content"
            messages.append(reply(word, **{key: "hm"}))
        else:
            messages.append(reply(f"<think>{thought}{word}" if opens_thought else word))
    rows = talk.tree.rows()
    assert talk.learnt(rows) == [thought + word for word in words]
    # These write earlier replies without thoughts; GLM-4.5 with empty ones.
    drops = name in ("qwen3.5", "glm4.5", "deepseek_v3", "gpt_oss")
    assert opens_thought == (name in ("qwen3.5", "deepseek_v3"))
    assert len(rows.row_starts) == (2 if drops else 0)


def test_thoughts_that_the_template_drops_begin_a_row_and_others_do_not(tmp_path: Path) -> None:
    renderer = open_model(tmp_path, "qwen3")
    renderer.tags = ThinkTags(open="<think>", close="</think>")
    talk = Talk(renderer, history="template", tools=[TOOL])
    called = {"id": "", "type": "function"}
    called["function"] = {"name": "look_up", "arguments": {"word": "fig"}}  # type: ignore[assignment]
    messages: list[Any] = [user("what is a fig?")]
    steps = [
        (THOUGHT.format(0) + CALL, reply("", reasoning_content="hm 0", tool_calls=[called])),
        (THOUGHT.format(1) + "a fruit", reply("a fruit", reasoning_content="hm 1")),
        (THOUGHT.format(2) + "yes", reply("yes", reasoning_content="hm 2")),
    ]
    following = [{"role": "tool", "content": "a fruit"}, user("are you sure?"), user("thanks")]
    for (text, written), message in zip(steps, following, strict=True):
        assert talk.say(messages[-1], text) == whole(renderer, messages, [TOOL])
        messages += [written, message]
    rows = talk.tree.rows()
    # The thoughts of the calls stay until the next question.
    assert len(rows.row_starts) == 1
    assert talk.learnt(rows) == [text for text, _ in steps]
    kept = Talk(renderer, history="keep", tools=[TOOL])
    for (text, _), message in zip(steps, messages[::2], strict=False):
        kept.say(message, text)
    assert kept.tree.rows().row_starts == []


def test_a_kept_history_needs_a_template_that_continues(tmp_path: Path) -> None:
    renderer = open_model(tmp_path, "hostile")
    with pytest.raises(InputError, match=r'render\.history="template"'):
        Talk(renderer, history="keep")


def test_calls_that_cannot_be_read_stay_as_they_were_written(tmp_path: Path) -> None:
    renderer = open_model(tmp_path, "qwen2.5")
    talk = Talk(renderer, history="template", tools=[TOOL])
    broken = '<tool_call>\n{"name": "look_up", \n</tool_call>'
    talk.say(user("call it"), broken)
    prompt = renderer.tokenizer.decode(talk.say({"role": "tool", "content": "an error"}, "sorry"))
    assert broken in prompt and prompt.index(broken) < prompt.index("an error")


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize(
    "call",
    [
        '[TOOL_CALLS][{"name": "look_up", "arguments": {"word": "fig"}}]',
        '[TOOL_CALLS][{"name": "look_up", "arguments": {"word": "fig"}, "id": "1"}]',
        '[TOOL_CALLS][{"name": "look_up", "argum',
    ],
)
def test_a_call_without_the_id_that_the_template_wants_has_a_result(
    tmp_path: Path, call: str, history: str
) -> None:
    """Mistral Nemo's template wants ids of nine characters, whatever the model writes."""
    talk = Talk(open_model(tmp_path, "mistral_nemo"), history=history, tools=[TOOL])
    talk.say(user("what is a fig?"), call)
    found = talk.histories.read(talk.tree.turns[0], talk.tools)
    assert len(found.calls) + len(found.faults) == 1 and [one.id for one in found.calls] in (
        [],
        [""],
    )
    [result] = talk.histories.with_ids([{"role": "tool", "content": "a fruit"}])
    prompt = talk.renderer.tokenizer.decode(talk.say(result, "a fruit"))
    assert prompt.endswith(
        '[TOOL_RESULTS]{"content": a fruit, "call_id": "call00000"}[/TOOL_RESULTS]'
    )


def test_an_id_that_the_template_takes_stays(tmp_path: Path) -> None:
    talk = Talk(open_model(tmp_path, "mistral_nemo"), history="keep", tools=[TOOL])
    call = '[TOOL_CALLS][{"name": "look_up", "arguments": {"word": "fig"}, "id": "abc123456"}]'
    talk.say(user("what is a fig?"), call)
    [found] = talk.histories.read(talk.tree.turns[0], talk.tools).calls
    assert found.id == "abc123456"
    other = Histories(open_model(tmp_path / "qwen", "qwen2.5"))
    assert other.with_ids([{"role": "tool", "content": "x"}]) == [{"role": "tool", "content": "x"}]


def test_results_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    talk = Talk(open_model(tmp_path, "phi3.5"), history="template", tools=[TOOL])
    talk.say(user("what is a fig?"), CALL)
    with pytest.raises(RenderError, match="leaves out messages of the role tool"):
        talk.say({"role": "tool", "content": "a fruit"}, "ok")


@pytest.mark.parametrize("history", ["keep", "template"])
def test_results_name_the_call_that_they_answer_in_channels(tmp_path: Path, history: str) -> None:
    """What gpt-oss reads behind a call, a faulty call and an answer."""
    renderer = open_model(tmp_path, "gpt_oss")
    talk = Talk(renderer, history=history, tools=[TOOL])
    # The call ends with its own token, the answer with another one.
    call, end = (renderer.tokenizer.convert_tokens_to_ids(one) for one in ("<|call|>", "<|end|>"))
    begins = (
        f"{CHANNEL_TAGS.open}thought 1<|end|><|start|>assistant<|channel|>commentary to=functions."
    )
    replies = [
        begins + 'look_up <|constrain|>json<|message|>{"word": "fig"}',
        begins + 'look_down <|constrain|>json<|message|>{"word": "fig"}',
        CHANNEL_TAGS.around("thought 2") + "a fruit",
    ]
    given = [
        user("what is a fig?"), {"role": "tool", "content": "a fruit"},
        {"role": "tool", "content": "Error: no such tool"}, user("thanks"),
    ]  # fmt: skip
    asked = []
    for number, message in enumerate(given):
        renderer.end_id = call if number < 2 else renderer.tokenizer.eos_token_id
        asked.append(renderer.tokenizer.decode(talk.say(message, (replies + ["ok"])[number])))
    cut = Talk(renderer, history=history, tools=[TOOL])
    cut.say(user("what is a fig?"), begins, is_cut=True)
    unnamed = renderer.tokenizer.decode(cut.say(given[2], "ok"))
    assert "probe" not in unnamed and "<|call|><|start|>functions.unknown to=assistant" in unnamed
    result = (
        "<|start|>functions.{} to=assistant<|channel|>commentary<|message|>{}<|end|>"
        "<|start|>assistant"
    )
    assert asked[1].endswith("<|call|>" + result.format("look_up", '"a fruit"'))
    assert asked[2].endswith("<|call|>" + result.format("look_down", '"Error: no such tool"'))
    thanks = "<|start|>user<|message|>thanks<|end|><|start|>assistant"
    if history == "keep":
        prompt = asked[0]
        for reply_text, behind in zip(replies, asked[1:], strict=True):
            assert behind.startswith(prompt + reply_text)
            prompt = behind
        assert asked[3].endswith(f"a fruit<|return|><|end|>{thanks}")
        assert talk.tree.rows().row_starts == []
    else:
        assert asked[3].endswith(f"<|channel|>final<|message|>a fruit<|end|>{thanks}")
        # The thoughts of the calls are dropped once the answer is there.
        assert "thought 1" in asked[2] and "thought" not in asked[3]
        assert end in talk.tree.turns[-1].prompt
