"""Unit tests of data sets that need several names of a program, or come as text of another kind."""

from pathlib import Path

import pytest

from tests.data.tables.test_forms_of_tests import PYTEST, TOTAL, Form, read, reason

PAIRS = (
    "class Pair(object):\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n\n"
    "def count(xs): return len(xs)"
)
FORMS = [
    Form("kodcode, info as Python text",
         {"question": "Sum a list.", "test": PYTEST, "test_info": "[{'function_name': 'total'}]"},
         [TOTAL], ["def total(xs): return 3"]),
    Form("mbpp, a class of the program",
         {"task_id": 601, "text": "Write a function for pairs.", "code": PAIRS,
          "test_list": ["assert count([Pair(5, 24)]) == 1\r\n", " assert count(pairs) == 2"],
          "test_setup_code": "pairs = [Pair(1, 2)]\npairs.append(Pair(2, 3))",
          "challenge_test_list": []},
         [PAIRS], [PAIRS.replace("len(xs)", "1"), "def count(xs): return len(xs)"],
         asks="The tests call `count` and `Pair`, as in `assert count([Pair(5, 24)]) == 1`."),
    Form("acecode, two functions",
         {"id": "oss_2", "question": "Write enc and its inverse.", "inferences": [],
          "test_cases": ["assert enc('a') == 'b'", "assert dec(enc('z')) == 'z'",
                         "assert dec('b') == 'a'"]},
         ["def enc(x): return chr(ord(x) + 1)\ndef dec(x): return chr(ord(x) - 1)"],
         ["def enc(x): return x\ndef dec(x): return x", "def enc(x): return chr(ord(x) + 1)"],
         asks="The tests call `dec`, as in `assert enc('a') == 'b'`."),
    Form("kodcode, a list of lines",
         {"question": "Sum a list.", "test": PYTEST.split("\n"), "test_info": []},
         [TOTAL], ["def total(xs): return 3"], asks="The tests call `total`"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_programs_are_graded_by_unit_tests(tmp_path: Path, form: Form) -> None:
    for suffix in form.suffixes:
        [prompt] = read(tmp_path / f"rows.{suffix}", [form.row]).prompts
        assert prompt.task == "code" and not prompt.is_program
        assert form.asks in prompt.question
    assert [reason(prompt, program) for program in form.right] == ["correct"] * len(form.right)
    assert "correct" not in [reason(prompt, program) for program in form.wrong]
