"""Calls that published templates write are read again, and whatever cannot be read is said."""

import json
import random
import time
from typing import Any

import pytest

from megatron_rl.protocol.call_forms import ToolCall, find_call_form
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.tool_calls import ToolCallParser, describe_tools
from tests.protocol.real_templates import open_model

WRITERS = ("qwen2.5", "qwen3", "mistral_nemo", "ministral3", "llama3.2", "deepseek_v3", "gpt_oss",
           "kimi_k2")  # fmt: skip
"""Templates that write the arguments as JSON."""
TEXTS = (
    "", "a", '"', "\\", "\n", "\r\n", "\t", "日本語", "مرحبا", "🙂", "e\u0301", "\u2028", "{", "}]",
    "'", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]{}", "<think>", "</think>",
    "<b>&amp;",
    '{"name": "look_up"}', "\\u003c", "\x07",
)  # fmt: skip


def tool(name: str, properties: Any, required: list[str], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, **more}
    function = {"name": name, "description": name, "parameters": schema}
    return {"type": "function", "function": function}


CHANNEL = "<|channel|>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions."
KIMI_ARGUMENTS, KIMI_END = "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>"
TOOLS = [
    tool("look_up", {"word": {"type": "string"}, "deep": {"type": "object"}}, ["word"]),
    tool("now", {}, []),
    tool("any.thing-2", {}, [], additionalProperties=True),
]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder = tmp_path_factory.mktemp("models")
    return {name: open_model(folder / name, name) for name in (*WRITERS, "smollm2")}


@pytest.fixture(scope="module")
def parsers(renderers: dict[str, Renderer]) -> dict[str, ToolCallParser]:
    return {name: ToolCallParser(renderer) for name, renderer in renderers.items()}


def value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(3))}
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    scalars = (text(rng), rng.randrange(-(10**20), 10**20), rng.uniform(-1, 1) * 1e9, None, True)
    return scalars[kind]


def text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.randint(0, 5)))


def random_calls(rng: random.Random, most: int) -> list[ToolCall]:
    calls = []
    for place in range(rng.randint(1, most)):
        arguments = [
            {"word": f"{place}{text(rng)}", "deep": value(rng)},
            {f"{place}{text(rng)}": value(rng)},
        ]
        made = ToolCall("look_up", arguments[0])
        if rng.random() < 0.3:
            made = ToolCall("any.thing-2", arguments[1])
        calls.append(made._replace(id=f"{rng.randrange(10**9):09}"))
    return calls


def written(renderer: Renderer, calls: list[ToolCall]) -> str:
    """The text of the reply that makes these calls, as the template has it."""
    form = find_call_form(renderer.template)
    assert form is not None
    asked = {"role": "user", "content": "go"}
    prompt = renderer.template.render([asked], tools=TOOLS)
    whole = renderer.template.render([asked, form.turn(calls)], opens_answer=False, tools=TOOLS)
    if not whole.startswith(prompt):
        # DeepSeek's prompt opens thoughts, which its rendering of an answer leaves out.
        answer = whole.partition("<｜Assistant｜>")[2]
        assert answer and prompt.endswith("<｜Assistant｜><think>\n")
        return f"</think>{answer}"
    return whole[len(prompt) :].rstrip("\n")


def damage(rng: random.Random, whole: str, place: int, others: str) -> str:
    """The text, cut at a place, or with its character there left out, doubled or another one."""
    return rng.choice(
        (
            whole[:place],
            whole[:place] + whole[place + 1 :],
            whole[:place] + whole[place] + whole[place:],
            whole[:place] + rng.choice(others) + whole[place + 1 :],
        )
    )


def chat_template(calls: str, opens: str = "") -> str:
    """A template; calls: what it writes for m.tool_calls; opens: begin of each answer."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
        f"{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        f"{{{{ '<|im_start|>assistant\\n{opens}' }}}}{{% endif %}}"
    )


@pytest.mark.parametrize("name", WRITERS)
def test_calls_that_a_template_writes_are_read_again(
    name: str, renderers: dict[str, Renderer], parsers: dict[str, ToolCallParser]
) -> None:
    renderer, rng = renderers[name], random.Random(7)
    for _ in range(300):
        calls = random_calls(rng, 1 if name in ("llama3.2", "gpt_oss") else 3)
        # What an engine samples: tokens, the last of which ends the reply.
        reply = renderer.decode(renderer.encode(written(renderer, calls)))
        parsed = parsers[name].parse(reply, TOOLS)
        assert parsed.faults == [] and parsed.content == "" and parsed.reasoning == ""
        assert [call[:2] for call in parsed.calls] == [call[:2] for call in calls]
        if name == "mistral_nemo":  # it repeats the ids at the results
            assert [call.id for call in parsed.calls] == [call.id for call in calls]


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_calls_are_calls_or_faults_and_never_nothing(
    name: str, renderers: dict[str, Renderer], parsers: dict[str, ToolCallParser]
) -> None:
    """Characters behind the opening are cut off, left out, doubled or changed."""
    renderer, parser, rng = renderers[name], parsers[name], random.Random(11)
    faults = 0
    for _ in range(300):
        calls = random_calls(rng, 1)
        whole = renderer.decode(renderer.encode(written(renderer, calls)))
        start = parser.form.starts.search(whole)
        assert start is not None
        # Llama's form is known by the key that comes first.
        place = rng.randrange(start.end() + len('{"name": ') * (name == "llama3.2"), len(whole))
        parsed = parser.parse(damage(rng, whole, place, '"{}[],:\\x<'), TOOLS)
        assert parsed.calls or parsed.faults
        faults += bool(parsed.faults)
        for call in parsed.calls:
            assert call.name in ("look_up", "now", "any.thing-2")
    assert faults > 100


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


GOOD = '{"name": "look_up", "arguments": {"word": "a"}}'
NOW = '{"name": "now", "arguments": {}}'
HM = "<think>hm</think>"


@pytest.mark.parametrize(
    ("reply", "calls", "faults"),
    [
        (hermes(GOOD), 1, []),
        (hermes('{"name": "look_up", "arguments": {"word": "a\nb"}}'), 1, []),
        (hermes(GOOD, GOOD), 1, ["look_up: the same call is made twice"]),
        (hermes("{bad}", GOOD), 1, ["the call is no JSON: Expecting property name"]),
        (hermes(GOOD + GOOD), 0, ["the JSON of a call must be followed by </tool_call>"]),
        (hermes(f"[{GOOD}]"), 0, ["<tool_call> takes a JSON object"]),
        (hermes(GOOD)[:-1], 0, ["must be followed by </tool_call>"]),
        ("<tool_call>", 0, ["no JSON"]),
        ("so</tool_call>", 0, ["no JSON"]),
        ("<tool_call><tool_call>" + hermes(GOOD), 1, ["no JSON", "no JSON"]),
        (hermes('{"name": "look", "arguments": {}}'), 0,
         ['there is no tool "look"; the tools are: look_up, now, any.thing-2']),
        (hermes('{"name": ["look_up"], "arguments": {}}'), 0, ['no tool ["look_up"]']),
        (hermes('{"name": "look_up", "arguments": {}}'), 0,
         ["look_up: the argument word is missing"]),
        (hermes('{"name": "now", "arguments": {"a": 1}}'), 0,
         ['now: there is no argument "a"; the arguments are: none']),
        (hermes('{"name": "any.thing-2", "arguments": {"a": 1}}'), 1, []),
        (hermes('{"name": "now", "arguments": "{}"}'), 0, ['arguments "{}" are no JSON object']),
        (hermes('{"name": "now", "arguments": null}'), 0, ["arguments null are no JSON object"]),
        (hermes('{"name": "now"}'), 0, ['a call is {"name": …, "arguments": {…}}']),
        (hermes('{"name": "now", "arguments": {}, "x": 1}'), 0, ["a call is"]),
        (hermes('{"name": "now", "name": "now", "arguments": {}}'), 0, ["key is given twice"]),
        (hermes('{"name": "look_up", "arguments": {"word": NaN}}'), 0, ["NaN is no JSON"]),
        (hermes('{"name": "now", "arguments": {}, "id": 3}'), 0, ["the id 3 is no text"]),
        (hermes('{"name": "look_up", "arguments": {"word": "\\ud83d"}}'), 0,
         ["half of a surrogate pair"]),
        (hermes('{"name": "look_up", "arguments": {"word": "\\ud83d\\ude42"}}'), 1, []),
        (hermes('{"name": "\\ud83d", "arguments": {}}'), 0, ["half of a surrogate"]),
        (hermes('{"\\ud83d": 1, "\\ud83d": 2}'), 0, ["twice in \\ud83d, "]),
        (hermes('{"name": "now", "arguments": ' + "[" * 100_000), 0, ["no JSON"]),
        (hermes('{"name": "look_up", "arguments": {"word": ' + "9" * 5000 + "}}"), 0, ["no JSON"]),
        (hermes('{"name": "any.thing-2", "arguments": {"a": ' + "[" * 63 + "]" * 63 + "}}"), 1, []),
        (hermes('{"name": "any.thing-2", "arguments": {"a": ' + "[" * 64 + "]" * 64 + "}}"), 0,
         ["nested over 64 levels"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_told_to_the_model(
    parsers: dict[str, ToolCallParser], reply: str, calls: int, faults: list[str]
) -> None:
    for name in ("qwen2.5", "smollm2"):
        parsed = parsers[name].parse(f"I do. {reply} Done.", TOOLS)
        assert len(parsed.calls) == calls and len(parsed.faults) == len(faults)
        for found, expected in zip(parsed.faults, faults, strict=True):
            assert expected in found and len(found) < 400
        assert parsed.content.startswith(("I do.", "I do. so"))


@pytest.mark.parametrize(
    ("name", "reply", "calls", "faults"),
    [
        ("mistral_nemo", f"[TOOL_CALLS][{GOOD}, {GOOD}]", 1, ["made twice"]),
        ("mistral_nemo", f"[TOOL_CALLS][{', '.join([NOW] * 99)}]{HM}[TOOL_CALLS][{NOW}]", 1,
         ["made twice"] * 63 + ["over 64 calls"]),
        ("kimi_k2", f"{KIMI}now:0{KIMI_ARGUMENTS}{{}}<|tool_call_end|>"
         + f"<|tool_call_begin|>functions.now:1{KIMI_ARGUMENTS}{{}}<|tool_call_end|>" * 99
         + KIMI_END, 1, ["made twice"] * 63 + ["over 64 calls"]),
        ("mistral_nemo", "[TOOL_CALLS][]", 0, ["[TOOL_CALLS] takes a JSON list"]),
        ("mistral_nemo", f"[TOOL_CALLS]{GOOD}", 0, ["[TOOL_CALLS] takes a JSON list"]),
        ("mistral_nemo", f"[TOOL_CALLS][{GOOD}", 0, ["no JSON"]),
        ("ministral3", '[TOOL_CALLS]look_up[ARGS]{"word": "a"}[TOOL_CALLS]now[ARGS]{}', 2, []),
        ("ministral3", '[TOOL_CALLS]look_up[ARGS][TOOL_CALLS]now[ARGS]{}', 1, ["no JSON"]),
        ("ministral3", '[TOOL_CALLS]look_up[CALL_ID]a1[ARGS]{"word": "a"}', 1, []),
        ("ministral3", "[TOOL_CALLS]look up[ARGS]{}", 0, ["name[ARGS]{…} must follow"]),
        ("llama3.2", '<|python_tag|>{"name": "now", "parameters": {}}', 1, []),
        ("llama3.2", '{"name": "now", "parameters": {}} then', 0, ["followed by nothing"]),
        ("llama3.2", '{"name": "now"}', 0, ['a call is {"name": …, "parameters": {…}}']),
        ("llama3.2", '{"answer": 12}', 0, []),
        ("gpt_oss", f"{CHANNEL}commentary to=functions.now <|constrain|>json<|message|>{{}}", 1,
         []),
        ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>{}", 1, []),
        ("gpt_oss", f"{CHANNEL}commentary to=now<|message|>{{}}", 1, []),
        ("gpt_oss", f"{CHANNEL}commentary to=functions.now", 0, ["no JSON"]),
        ("gpt_oss", f"{CHANNEL}commentary to=python code<|message|>1 + 1", 0, ["followed by"]),
        ("gpt_oss", f"{CHANNEL}commentary to=python<|message|>{{}}", 0, ["there is no tool"]),
        ("kimi_k2", f"{KIMI}now:0{KIMI_ARGUMENTS}{{}}<|tool_call_end|>{KIMI_END}", 1, []),
        ("kimi_k2", f"{KIMI}now{KIMI_ARGUMENTS}{{}}", 0, ["functions.NAME:NUMBER must follow"]),
        ("gpt_oss", f"{CHANNEL}final<|message|>write to=functions.now", 0, []),
    ],
)  # fmt: skip
def test_other_forms_have_the_same_faults(
    parsers: dict[str, ToolCallParser], name: str, reply: str, calls: int, faults: list[str]
) -> None:
    parsed = parsers[name].parse(reply, TOOLS)
    assert len(parsed.calls) == calls and len(parsed.faults) == len(faults)
    assert all(expected in found for found, expected in zip(parsed.faults, faults, strict=True))


def test_messages_in_channels_are_thoughts_answers_or_calls(
    parsers: dict[str, ToolCallParser],
) -> None:
    parse = parsers["gpt_oss"].parse
    thought = f"{CHANNEL}analysis<|message|>to=functions.now{{}}<|end|><|start|>assistant"
    call = f"{CHANNEL}commentary to=functions.now <|constrain|>json<|message|>{{}}"
    thoughts = "to=functions.now{}"
    assert parse(f"{thought}{CHANNEL}final<|message|>No.", TOOLS) == (thoughts, "No.", [], [], ())
    assert parse(thought[: -len("<|end|><|start|>assistant")], TOOLS)[:2] == (thoughts, "")
    said = f"{CHANNEL}commentary<|message|>I look.<|end|><|start|>assistant"
    found = parse(f"{thought}{said}{call}", TOOLS)
    assert found[:3] == (thoughts, "I look.", [("now", {}, "")]) and not found.faults
    # Without tools a call is content; a text without channels is one as well.
    assert parse(call, [])[1:3] == ("{}", []) and parse("No.", TOOLS).content == "No."
    unknown = parse(call.replace("now", "then"), TOOLS)
    assert unknown.attempted == (("then", {}, ""),) and "no tool" in unknown.faults[0]
    many = parse("<|start|>assistant".join([call] * 100), TOOLS)
    assert len(many.calls) == 1 and len(many.faults) == 64 and "over 64 calls" in many.faults[-1]


def test_calls_are_read_only_outside_of_thoughts(parsers: dict[str, ToolCallParser]) -> None:
    parse = parsers["qwen3"].parse
    call = hermes(GOOD)
    whole = parse(f"<think>\nmaybe {call}\n</think>\n\nNo.", TOOLS)
    assert whole == (f"maybe {call}", "No.", [], [], ())
    unclosed = parse(f"<think>\nmaybe {call}", TOOLS)
    assert unclosed == (f"maybe {call}", "", [], [], ())
    again = parse(f"<think>a</think>b{call}c<think>d{call}", TOOLS)
    assert (again.reasoning, again.content, len(again.calls)) == (f"a\nd{call}", "bc", 1)
    # A thought within an argument is text.
    inner = hermes(json.dumps({"name": "look_up", "arguments": {"word": f"<think>{call}"}}))
    parsed = parse(inner, TOOLS)
    assert parsed.calls == [("look_up", {"word": f"<think>{call}"}, "")] and not parsed.reasoning


@pytest.mark.parametrize("name", ["qwen3", "llama3.2"])
def test_thoughts_take_linear_time(parsers: dict[str, ToolCallParser], name: str) -> None:
    # Seconds; four minutes where each thought searches the rest of the reply for a call.
    started = time.monotonic()
    call = hermes(GOOD) if name == "qwen3" else GOOD.replace("arguments", "parameters")
    parsed = parsers[name].parse(f"{'<think>a</think> ' * 20_000}{call}", TOOLS)
    assert time.monotonic() - started < 30.0
    assert parsed == ("a\n" * 19_999 + "a", "", [("look_up", {"word": "a"}, "")], [], ())


def test_thoughts_may_stand_before_a_call_that_is_the_whole_reply(
    parsers: dict[str, ToolCallParser],
) -> None:
    parse, call = parsers["llama3.2"].parse, '{"name": "look_up", "parameters": {"word": "a"}}'
    for before in ("", "<think>hm</think>", "\n<think>hm</think>\n\n"):
        parsed = parse(before + call, TOOLS)
        assert parsed.calls == [("look_up", {"word": "a"}, "")] and parsed.content == ""
    for text in (f"a {call}", f"a <think>hm</think>{call}", f"<think>hm</think>a {call}"):
        assert parse(text, TOOLS).calls == []
        assert parse(text, TOOLS).content == text.replace("<think>hm</think>", "")


def test_a_prompt_may_open_the_thought(tmp_path: Any) -> None:
    template = chat_template("{{ '<tool_call>' + c.function | tojson }}</tool_call>", "<think>\\n")
    parser = ToolCallParser(open_model(tmp_path / "model", "qwen3", template=template))
    call = hermes(GOOD)
    assert parser.parse(f"hm {call}", TOOLS) == (f"hm {call}", "", [], [], ())
    parsed = parser.parse(f"hm {call}\n</think>\n\n{call}", TOOLS)
    assert parsed.reasoning == f"hm {call}" and len(parsed.calls) == 1 and not parsed.faults


def test_described_tools_show_the_form_that_is_read(parsers: dict[str, ToolCallParser]) -> None:
    told = describe_tools([*TOOLS, tool("NAME", {"ARGUMENT": {"type": "string"}}, ["ARGUMENT"])])
    offered = told.splitlines()[1:5]
    assert [json.loads(line)["name"] for line in offered[:3]] == ["look_up", "now", "any.thing-2"]
    shown = parsers["smollm2"].parse(told, [tool("NAME", {"ARGUMENT": {}}, ["ARGUMENT"])])
    assert shown.calls == [("NAME", {"ARGUMENT": "VALUE"}, "")] and not shown.faults


def test_a_template_without_calls_has_an_assumed_form_and_an_unknown_form_is_refused(
    tmp_path: Any, parsers: dict[str, ToolCallParser]
) -> None:
    assert "writes no tool calls, so they are read as <tool_call>" in parsers["smollm2"].note
    assert [parsers[name].note for name in WRITERS] == [""] * len(WRITERS)
    # A form without the name, as of models whose ids tell it.
    template = chat_template("{{ '<call id=' + c.id + '>' }}{{ c.function.arguments | tojson }}")
    parser = ToolCallParser(open_model(tmp_path / "unknown", "qwen3", template=template))
    assert "<call id=probe0123>" in parser.refusal and parser.refusal in parser.note
    assert parser.parse("<tool_call>x", []) == ("", "<tool_call>x", [], [], ())
    with pytest.raises(RenderError, match="no form is found"):
        parser.parse("x", TOOLS)
