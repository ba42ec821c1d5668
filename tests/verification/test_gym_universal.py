"""No answer that can be given without reading the question pays on any dataset of reasoning_gym."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from verification.gym_answer import (
    _SCREENS,
    REFUSED_DATASETS,
    compare,
    compare_quickly,
    screen,
)
from verification.verdict import CORRECT

NAMES = sorted(set(DATASETS) - set(REFUSED_DATASETS))
UNIVERSAL = [
    "nan", "NaN", "-nan", "nan+nanj", "nanj", "nan + nani", "(nan, nan)", "nan, nan", "[nan]",
    "inf", "-inf", "Infinity", "-Infinity", "1e999", "1e999+1e999j", "-1e999", "1e-999", "oo",
    "", " ", "\n", "_", "x", "X", "C", "i", "j", "?", "*", "-", "...", "''", '""', "\x00", "\\",
    "None", "none", "null", "NULL", "undefined", "N/A", "unknown", "I don't know", "no solution",
    "0", "1", "-1", "2", "0.0", "1.0", "-0", "10", "100", "٣", "０", "²", "0 or 1", "0, 1", "0/1",
    "0/0", "1/0", "True", "False", "true", "false", "Yes", "No", "yes", "no", "Yes or No", "yes no",
    "True False", "[]", "{}", "()", "[[]]", "[0]", "[1]", "[null]", "[0, 0, 0]", "{'a': 1}", "[{}]",
    "A", "B", "A B C", "A → B → C", "UDLR", "up", "up down left right", "infeasible", "impossible",
    "the answer", "the question itself", "all of the above", ".*", "%s", "answer", "*" * 5000,
    "1 2 3 4 5 6 7 8 9", "0123456789" * 300, "abcdefghijklmnopqrstuvwxyz", "6*4*1*1", "24", "8*3",
    "(5+1)*4*1", "24*1*1*1", "UDLR" * 900, "1 " * 900, "x" * 900, "0\n" * 9, "pi", "E", "e", "I",
]  # fmt: skip
_PIECE = re.compile(r"[-+*/^()\[\]\d.xyzi ×÷=<>&|~]{3,}")
_SEPARATORS = (":", "?", "=", " is ", " of ", ". ")
MAX_PIECES = 40


def _copied(question: str) -> Iterator[str]:
    """The question, its lines and expressions, and all its numbers in several spellings."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", question)
    yield from (
        question,
        ", ".join(numbers),
        " ".join(numbers),
        "+".join(numbers),
        "".join(numbers),
    )
    yield from ("*".join(numbers), f"[{', '.join(numbers)}]", str(numbers), f"[{'NaN, ' * 5}NaN]")
    pieces = [piece.strip() for piece in _PIECE.findall(question)]
    for line in question.splitlines():
        pieces += [line, *(part for mark in _SEPARATORS for part in line.split(mark)[1:])]
    for piece in [piece.strip(" .?") for piece in pieces][:MAX_PIECES]:
        yield from (piece, piece.rstrip("= "), f"({piece})")


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?", text)]


def _is_reference(answer: str, reference: str) -> bool:
    """Whether an answer is the reference but for case, spaces, quotes and spelling of numbers."""
    bare, wanted = (re.sub(r"[\s()\[\]$'\".,°]", "", text.lower()) for text in (answer, reference))
    if bare == wanted:
        return True
    is_list = re.fullmatch(r"[-+\s\d.,e()\[\]'\"]*", answer) and _numbers(answer)
    return bool(is_list) and _numbers(answer) == _numbers(reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
def test_universal_answers_and_copied_questions_pay_on_no_dataset(seed: int) -> None:
    paid = []
    for name in NAMES:
        entry = reasoning_gym.create_dataset(name, size=1, seed=seed)[0]
        text = json.dumps(entry)
        assert compare_quickly(entry["answer"], entry["answer"]) == CORRECT
        for answer in {*UNIVERSAL, *_copied(entry["question"])}:
            if compare(answer, text).is_correct and not _is_reference(answer, entry["answer"]):
                paid.append((name, answer[:80], entry["answer"], entry["question"][-200:]))
    assert paid == []


def _entry(name: str, answer: str, **metadata: Any) -> str:
    return json.dumps({"answer": answer, "metadata": {"source_dataset": name, **metadata}})


@pytest.mark.parametrize(
    ("name", "reference", "metadata", "right", "wrong"),
    [
        ("complex_arithmetic", "48.0 + 36.0i", {"result": [48, 36]}, ["48+36i", "48.0 + 36.0i"],
         ["nan", "nanj", "nan+nanj", "(nan)", "-nan", "48+nanj", "nan+36i", "inf", "1e999"]),
        ("puzzle24", "4*8 - 6 - 2", {"numbers": [4, 8, 6, 2]}, ["(4*8)-(6+2)", "8*4-2-6"],
         ["6*4*1*1", "8*3*1*1", "4*8-6-1", "(4*8-6-2)*1", "24", "4*8*6/8", "48/2", "8*6/2+4/4",
          "(8*6+4)/2"]),
        ("countdown", "6*4", {"numbers": [4, 6], "target": 24}, ["4*6", "(4)*(6)"],
         ["24", "6*4*1", "4+6", "4*6+0", "46-22"]),
        ("polynomial_equations", "", {}, ["", '""', "none", "No real solutions"],
         ["x", "nothing to see", "b^2 = -1", "0", "nan", "1, x"]),
        ("polynomial_equations", "-2.0, 3.0", {}, ["-2, 3", "3.0, -2.0"],
         ["-2, 3, x", "-2, 3, or 5", "nan", "2, 3", "-2", "-2, 3, 4"]),
        ("gsm_symbolic", "24", {}, ["24", "24.0", "$24", "24 apples", "The total is 24."],
         ["24 25 26", "4+20", "24, 8", "-24", "24/2", "48/2", "2.4", "twenty", "24*1", "24 or 25"]),
        ("gsm_symbolic", "5485", {}, ["5,485", "5485", "$5,485.00"], ["5", "5 485", "5,486"]),
        ("number_sorting", "['-8.0', '3.0', '81.8']", {"direction": "ascending"},
         ["['-8', '3', '81.8']", "[-8, 3, 81.8]"],
         ["[NaN, NaN, NaN]", "['nan', 'nan', 'nan']", "[Infinity, NaN, NaN]", "[3, -8, 81.8]",
          "[NaN, 3, 81.8]", "[-8, NaN, 81.8]", "[1e999, 1e999, 1e999]"]),
        ("time_intervals", "76 days", {"task_type": "date"}, ["76 days", "76"],
         ["76 days or 77 days", "76 77 78", "76 and a bit", "76.5", "75"]),
        ("time_intervals", "03:22:03", {"task_type": "time_seconds"}, ["3:22:03", "03:22:03"],
         ["03:22:03:99", "03:22", "3:22:04", "03:22:03 or 04:22:03"]),
        ("time_intervals", "67 days, 01:04:00", {"task_type": "datetime"}, ["67 days, 01:04"],
         ["67 days, 01:04:00, 68 days, 02:00:00", "67 days", "67 days, 01:04:00:7",
          "66 days, 01:04"]),
        ("advanced_geometry", "(7.765, 7.882)",
         {"task_type": "orthocenter", "ortho": ["7.765", "7.882"]}, ["7.765,7.882"],
         ["(7.765, 7.882), (1, 2)", "(nan, nan)", "7.765, 7.882, 5", "(7.882, 7.765)"]),
        ("polynomial_multiplication", "2*x + 6", {}, ["6 + 2*x", "2*x+6"],
         ["2*(x + 3)", "(x + 3)*2", "x + x + 6", "2*x + 2*3", "2*x+5+1", "(2*x) + 6"]),
        ("polynomial_multiplication", "12*x**3", {}, ["12*x**3"],
         ["3*x*4*x**2", "(3*x)*(4*x**2)", "12*x*x*x", "12*x*x**2", "3*4*x**3", "24*x**3/2"]),
        ("polynomial_multiplication", "6*x*y - 4*x", {}, ["6*x*y-4*x", "-4*x+6*x*y", "6*y*x - 4*x"],
         ["2*x*(3*y - 2)", "x*6*y - 2*2*x"]),
    ],
)  # fmt: skip
def test_answer_that_a_scorer_would_take_by_accident_earns_nothing(
    name: str, reference: str, metadata: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    entry = _entry(name, reference, **metadata)
    assert [answer for answer in right if not compare(answer, entry).is_correct] == []
    assert [answer for answer in wrong if compare(answer, entry).is_correct] == []


def test_reason_tells_what_was_wrong_with_an_answer() -> None:
    entry = _entry("complex_arithmetic", "3.0", result=[3, 0])
    assert compare("nan", entry).reason == "non_finite_answer"
    entry = _entry("polynomial_multiplication", "2*x + 6")
    assert compare("2*(x + 3)", entry).reason == "unevaluated"
    assert compare("4 8 8", _entry("gsm_symbolic", "4")).reason == "several_answers"


@pytest.mark.parametrize(
    "text", ["0x7e999", "NAN, BAN, BAT", "nan bread", "Infinity stones", "1e5", "2e", "e"]
)
def test_words_and_finite_numbers_are_not_refused_as_infinite(text: str) -> None:
    assert screen("word_ladder", text, {"answer": "x", "metadata": {}}) is None


def test_every_screen_belongs_to_a_dataset_that_is_not_refused() -> None:
    assert set(_SCREENS) <= set(NAMES)
