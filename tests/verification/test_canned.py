"""Made-up completions: the form that a text asks for, and programs that look their answers up."""

import json
from collections.abc import Iterator

import pytest

from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.types import ChatMessage, Prompt, Score
from verification.canned import Form, find_form, make_canned
from verification.library import Grading, Sample

THINK_BOX = Form(has_thoughts=True, has_box=True, has_fence=False)
THINK_CODE = Form(has_thoughts=True, has_box=False, has_fence=True)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("What is 2+2?", Form(False, False, False)),
        ("Put it in \\boxed{}.", Form(False, True, False)),
        ("Use \\boxed for the answer.", Form(False, True, False)),
        ("<think>a</think>\\boxed{1}", THINK_BOX),
        ("Think in <think></think>, then\n```python\n...\n```", THINK_CODE),
    ],
)
def test_the_form_is_that_of_the_marks_in_the_text(text: str, form: Form) -> None:
    assert find_form(text) == form


def prompt(task: str, answer: str = "", entry: dict | None = None) -> Prompt:
    messages = [ChatMessage(role="user", content="Quelle est la somme de deux et trois ?")]
    return Prompt("p", task, messages, answer, entry=json.dumps(entry) if entry else "")


def test_completions_are_written_out_in_the_form() -> None:
    question = "Quelle est la somme de deux et trois ?"
    canned = make_canned(prompt("math", "5"), "math", THINK_BOX, tail="", count=20)
    assert canned.right == f"<think>\n{question}\n</think>\n{question}\n\\boxed{{5}}"
    # A template that opens the thoughts leaves only their rest to the model.
    opened = make_canned(prompt("math", "5"), "math", THINK_BOX, tail="a<think>\n", count=20)
    assert opened.right == f"\n{question}\n</think>\n{question}\n\\boxed{{5}}"
    plain = make_canned(prompt("x", "5"), "exact", Form(False, False, False), tail="", count=20)
    assert plain == ("5", "not 5")


CASES = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": '7 "\\?', "stdout": "\u00e9t\u00e9 \\n\n"}]
CALLS = [{"stdin": "[1, 2]\n3", "stdout": "6"}, {"stdin": "[]\n0", "stdout": "0"}]
ENTRIES = {
    "standard input": {"cases": CASES},
    "C++": {"cases": CASES, "language": "cpp"},
    "function": {"cases": CALLS, "entry_point": "f"},
    "method": {"cases": CALLS, "entry_point": "Solution().f"},
    "long integers": {
        "cases": [{"stdin": "9" * 5000, "stdout": "[1]"}],
        "entry_point": "f",
        "may_be_wrapped": True,
    },
    "fewer of many cases": {
        "time_s": 16.0,
        "cases": [{"stdin": str(number), "stdout": str(number + 1)} for number in range(40)],
    },
}


@pytest.fixture(scope="module")
def grading() -> Iterator[Grading]:
    with Grading(RewardConfig()) as opened:
        yield opened


@pytest.mark.parametrize("name", ENTRIES)
def test_programs_that_look_answers_up_pass_their_tests(name: str, grading: Grading) -> None:
    asked = prompt("code", entry=ENTRIES[name])
    canned = make_canned(asked, "code", THINK_CODE, tail="", count=20)
    samples = [Sample(text=text, task="code", entry=asked.entry) for text in canned]
    right, wrong = grading.score(samples)
    assert isinstance(right, Score) and right.reason == "correct" and right.reward == 1.0
    assert isinstance(wrong, Score) and wrong.parts["correct"] == 0.0 and wrong.reward == 0.1


def test_unit_tests_have_no_answer_to_look_up() -> None:
    asked = prompt("code", entry={"unit_tests": "assert f(1) == 2", "entry_point": "f"})
    assert make_canned(asked, "code", THINK_CODE, tail="", count=20) is None
