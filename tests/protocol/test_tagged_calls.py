"""Calls whose arguments stand between tags: the form is found by rendering, and read again."""

import random
from typing import Any

import pytest

from megatron_rl.protocol.call_forms import ToolCall
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.tool_calls import ToolCallParser
from tests.protocol.real_templates import open_model
from tests.protocol.test_tool_calls import TOOLS, chat_template, damage, text, tool, value, written

TAGGED = ("qwen3.5", "glm4.5")
"""Templates that write each argument between tags."""


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder = tmp_path_factory.mktemp("models")
    names = (*TAGGED, "deepseek_v3", "qwen3")
    return {name: open_model(folder / name, name) for name in names}


@pytest.fixture(scope="module")
def parsers(renderers: dict[str, Renderer]) -> dict[str, ToolCallParser]:
    return {name: ToolCallParser(renderer) for name, renderer in renderers.items()}


TYPED = [
    *TOOLS,
    tool("any.thing-2", {
        "n": {"type": "integer"}, "flag": {"type": "boolean"}, "x": {"anyOf": [{"type": "number"}]},
        "list": {"type": "array"}, "some": {"type": ["string", "null"]}, "free": {},
    }, []),
]  # fmt: skip


def tagged_calls(rng: random.Random, most: int) -> list[ToolCall]:
    """Calls whose arguments are texts and values of several types."""
    makers = {
        "n": lambda: rng.randrange(-(10**20), 10**20), "flag": lambda: rng.random() < 0.5,
        "x": lambda: rng.uniform(-1, 1) * 1e9, "list": lambda: [value(rng), text(rng)],
        "some": lambda: text(rng), "free": lambda: rng.choice([7, {"a": None}, True, None, "free"]),
    }  # fmt: skip
    calls = []
    for place in range(rng.randint(1, most)):
        word = {"word": f"{place}{text(rng)}</parameter> {text(rng)}", "deep": {"a": value(rng)}}
        chosen = rng.sample(sorted(makers), rng.randint(0, 6))
        made = ToolCall("look_up", word)
        if rng.random() < 0.6:
            made = ToolCall("any.thing-2", {"n": place} | {key: makers[key]() for key in chosen})
        calls.append(made)
    return calls


@pytest.mark.parametrize("name", TAGGED)
def test_arguments_between_tags_are_read_again(
    name: str, renderers: dict[str, Renderer], parsers: dict[str, ToolCallParser]
) -> None:
    renderer, rng = renderers[name], random.Random(7)
    for _ in range(300):
        calls = tagged_calls(rng, 3)
        reply = renderer.decode(renderer.encode(written(renderer, calls)))
        parsed = parsers[name].parse(reply, TYPED)
        assert parsed.faults == [] and parsed.content == "" and parsed.reasoning == ""
        assert [call[:2] for call in parsed.calls] == [call[:2] for call in calls]


@pytest.mark.parametrize("name", TAGGED)
def test_damaged_tags_are_calls_or_faults_and_never_nothing(
    name: str, renderers: dict[str, Renderer], parsers: dict[str, ToolCallParser]
) -> None:
    renderer, parser, rng = renderers[name], parsers[name], random.Random(11)
    faults = 0
    for _ in range(300):
        whole = renderer.decode(renderer.encode(written(renderer, tagged_calls(rng, 1))))
        begin = whole.index("<tool_call>") + len("<tool_call>")
        place = rng.randrange(begin, len(whole))
        parsed = parser.parse(damage(rng, whole, place, "</>=_ \n"), TYPED)
        assert parsed.calls or parsed.faults
        faults += bool(parsed.faults)
    assert faults > 50


QWEN_CALL = (
    "<tool_call>\n<function=any.thing-2>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "reply", "calls", "faults"),
    [
        ("qwen3.5", QWEN_CALL, [{"n": 7}], []),
        # Blanks between the tags are the model's own.
        ("qwen3.5", QWEN_CALL.replace("\n", ""), [{"n": 7}], []),
        ("qwen3.5", QWEN_CALL + "\n" + QWEN_CALL.replace("7", "8"), [{"n": 7}, {"n": 8}], []),
        ("qwen3.5", QWEN_CALL.replace("7", "seven"), [{"n": "seven"}], []),
        ("qwen3.5", QWEN_CALL.replace("</function>", ""), [], ["</parameter>"]),
        ("qwen3.5", QWEN_CALL.replace("any", "some"), [], ["there is no tool"]),
        ("qwen3.5", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [], ["<function="]),
        ("qwen3.5", "</tool_call> and then", [], ["is missing in a call"]),
        ("glm4.5", "<tool_call>now</tool_call>", [{}], []),
        ("glm4.5", "<tool_call>now now\n</tool_call>", [], ["</tool_call> is missing"]),
        ("glm4.5", "<tool_call>any.thing-2<arg_key>n</arg_key><arg_value>7</arg_value>"
         "<arg_key>n</arg_key><arg_value>8</arg_value></tool_call>", [], ["given twice"]),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
         "```json\n{}\n```<｜tool▁call▁end｜>", [], ["<｜tool▁call▁begin｜>function"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tags_is_told_to_the_model(
    parsers: dict[str, ToolCallParser], name: str, reply: str, calls: list[Any], faults: list[str]
) -> None:
    opened = "" if name == "glm4.5" else "</think>"
    parsed = parsers[name].parse(opened + reply, TYPED)
    assert [call.arguments for call in parsed.calls] == calls
    assert len(parsed.faults) == len(faults)
    assert all(expected in found for found, expected in zip(parsed.faults, faults, strict=True))


@pytest.mark.parametrize("name", [*TAGGED, "deepseek_v3", "qwen3"])
def test_of_many_calls_that_nothing_closes_the_first_are_read(
    parsers: dict[str, ToolCallParser], name: str
) -> None:
    openings = {
        "qwen3.5": "<tool_call>\n<function=now>\n<parameter=b>\n</parameter>  ",
        "glm4.5": "<tool_call>now<arg_key>a</arg_key><arg_value>",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now",
        "qwen3": "<tool_call>",
    }
    text = "</think>" * (name != "qwen3") + openings[name] * 10_000
    parsed = parsers[name].parse(text, TYPED)
    assert len(parsed.faults) == 65 and "over 64 calls" in parsed.faults[-1]


def test_several_calls_may_share_what_surrounds_them(tmp_path: Any) -> None:
    template = chat_template(
        "{% if loop.first %}{{ '<my:calls>\\n' }}{% endif %}"
        "{{ '<invoke name=\"' + c.function.name + '\">\\n' }}"
        "{% for k, v in c.function.arguments.items() %}{{ '<parameter name=\"' + k + '\">' }}"
        "{{ (v if v is string else v | tojson) + '</parameter>\\n' }}{% endfor %}"
        "{{ '</invoke>\\n' }}{% if loop.last %}{{ '</my:calls>' }}{% endif %}"
    )
    renderer = open_model(tmp_path / "model", "qwen3", template=template)
    parser, rng = ToolCallParser(renderer), random.Random(3)
    assert parser.note == ""
    for _ in range(50):
        calls = tagged_calls(rng, 3)
        parsed = parser.parse(written(renderer, calls), TYPED)
        assert [call[:2] for call in parsed.calls] == [call[:2] for call in calls]
        assert not parsed.faults
