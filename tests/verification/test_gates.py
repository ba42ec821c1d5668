"""Gates of responses whose thoughts the prompt opened, and what our system prompts ask for."""

import msgspec
import pytest

from megatron_rl.config.prompts import Demonstrations, SystemPrompts
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.types import ScoreRequest
from tests.verification.requests import RULES, boxed, make_request
from verification.gates import GATES
from verification.score import score

# How DeepSeek-R1's and QwQ's chat templates end.
OPENED = ["<｜User｜>2+5?<｜Assistant｜><think>\n", "<|im_start|>assistant\n<think>\n", "<think>"]
# Qwen3's without thinking, a plain template, and a question about the tag.
NOT_OPENED = ["<think>\n\n</think>\n\n", "<|im_start|>assistant\n", "", "what is <think>?\n"]
REST = "I add.\n</think>\n\nIt is \\boxed{7}."
PROGRAM = "I add.\n</think>\n```python\nprint(7)\n```"


def ask(text: str, prompt_tail: str, **more: object) -> ScoreRequest:
    return msgspec.structs.replace(make_request(text, **more), prompt_tail=prompt_tail)


@pytest.mark.parametrize("tail", OPENED)
def test_thoughts_that_the_prompt_opened_need_no_second_opening(tail: str) -> None:
    assert score(ask(REST, tail), RULES).reason == "correct"
    gated = GATES["think_box"](REST, tail)
    assert (gated.thoughts, gated.answer) == ("I add.\n", "7")
    gated = GATES["think_code"](PROGRAM, tail)
    assert (gated.refusal, gated.answer, gated.thoughts) == ("", "print(7)\n", "I add.\n")
    assert score(ask(boxed("7"), tail), RULES).reason == "several_think_tags"
    assert score(ask("\\boxed{7}", tail), RULES).reason == "no_think_end"
    assert score(ask("I add", tail, is_finished=False), RULES).reason == "unfinished"


@pytest.mark.parametrize("tail", NOT_OPENED)
def test_a_prompt_that_opens_nothing_leaves_the_opening_to_the_model(tail: str) -> None:
    assert score(ask(REST, tail), RULES).reason == "no_think_start"
    assert GATES["think_code"](PROGRAM, tail).refusal == "no_think_start"
    assert score(ask(boxed("7"), tail), RULES).reason == "correct"


def test_gates_without_thoughts_take_the_text_as_it_is() -> None:
    assert GATES["none"]("7", OPENED[0]).answer == "7"
    assert GATES["box"]("\\boxed{7}", OPENED[0]).final == "\\boxed{7}"


@pytest.mark.parametrize("gate", ["think_box", "think_code"])
def test_the_form_that_a_system_prompt_shows_passes_its_gate(gate: str) -> None:
    text = RenderConfig().system_prompt_of(gate)
    _, form = text.split("must look like this:\n")
    assert GATES[gate](form, "").refusal == ""


@pytest.mark.parametrize("gate", ["think_box", "think_code"])
def test_the_demonstration_of_a_gate_passes_it(gate: str) -> None:
    exchange = RenderConfig(demonstrate=True).demonstration_of(gate)
    assert exchange is not None and GATES[gate](exchange.reply, "").refusal == ""
    assert RenderConfig(demonstrate=False).demonstration_of(gate) is None
    assert RenderConfig(system_prompt="mine", demonstrate=True).demonstration_of(gate) is None


def test_every_gate_has_a_system_prompt_and_one_may_replace_them_all() -> None:
    assert set(SystemPrompts.model_fields) == set(GATES) == set(Demonstrations.model_fields)
    for gate in GATES:
        assert RenderConfig(system_prompt="").system_prompt_of(gate) == ""
        assert RenderConfig(system_prompt="mine").system_prompt_of(gate) == "mine"
        asked = RenderConfig().system_prompt_of(gate)
        assert ("\\boxed{}" in asked) == (gate in ("box", "think_box"))
        assert ("<think>" in asked) == gate.startswith("think")
    changed = RenderConfig(system_prompts={"box": "a box"})
    assert changed.system_prompt_of("box") == "a box"
    assert changed.system_prompt_of("code") == RenderConfig().system_prompt_of("code") != ""
