import ast
import inspect
import json
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from tests.verification.requests import RULES, boxed, make_request
from verification import gym_answer
from verification.draft import Draft
from verification.gym_answer import REFUSED_DATASETS, compare, is_plain_expression
from verification.score import score, screen
from verification.verdict import CORRECT, WRONG, GradingError

QUICK_TO_MAKE = ["chain_sum", "basic_arithmetic", "countdown", "gcd", "word_sorting", "maze",
                 "simple_integration",
                 "mini_sudoku", "base_conversion", "knights_knaves"]  # fmt: skip


def _entry(name: str) -> dict[str, Any]:
    return reasoning_gym.create_dataset(name, size=1, seed=5)[0]


@pytest.mark.parametrize("name", QUICK_TO_MAKE)
def test_reference_is_correct_and_nonsense_is_wrong_after_json(name: str) -> None:
    entry = _entry(name)
    text = json.dumps(entry)
    assert compare(entry["answer"], text) == CORRECT
    assert not compare("nonsense", text).is_correct
    assert not compare("", text).is_correct


def test_partial_score_of_the_library_is_wrong() -> None:
    entry = _entry("chain_sum")
    partial = entry["answer"] + " apples"
    scorer = reasoning_gym.get_score_answer_fn("chain_sum")
    assert 0 < scorer(partial, entry) < 1
    assert compare(partial, json.dumps(entry)) == WRONG


def test_any_full_score_counts_not_only_the_reference() -> None:
    entry = {"answer": "6*4", "metadata": {"source_dataset": "countdown", "target": 24,
             "numbers": [4, 6]}}  # fmt: skip
    assert compare("4*6", json.dumps(entry)) == CORRECT
    assert compare("4+6", json.dumps(entry)) == WRONG


def test_reference_itself_is_scored_without_the_library() -> None:
    entry = _entry("chain_sum")
    answer = entry["answer"]
    make = {"task": "reasoning_gym", "answer": answer, "entry": json.dumps(entry)}
    right = make_request(boxed(answer), **make)
    assert screen(right, RULES) == score(right, RULES)
    assert isinstance(screen(make_request(boxed(answer + "0"), **make), RULES), Draft)


def test_every_scorer_that_evaluates_the_answer_is_refused() -> None:
    for name, (dataset, _) in DATASETS.items():
        source = inspect.getsource(inspect.getmodule(dataset))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name == "score_answer":
                calls = [ast.unparse(c) for c in ast.walk(node) if isinstance(c, ast.Call)]
                evaluates = any(call.startswith("eval(answer") for call in calls)
                assert not evaluates or name in REFUSED_DATASETS, name


def test_every_scorer_that_parses_expressions_sees_plain_ones_only() -> None:
    for name, (dataset, _) in DATASETS.items():
        source = inspect.getsource(inspect.getmodule(dataset))
        if "parse_expr" in source and name not in REFUSED_DATASETS:
            assert name in gym_answer._SYMPY_DATASETS, name


@pytest.mark.parametrize("text", ["3*(4 + 5) - 6/2", "x**3/3 + sin(2*x) + C", "-1.5*exp(x)"])
def test_ordinary_expression_is_plain(text: str) -> None:
    assert is_plain_expression(text)


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('id')", "exec(x)", "open(x)", "x.real", "1 .real", "[1]", "'a'",
     "lambda x: x", "x; y", "f\"{x}\"", "eval", "ｅｖａｌ(x)"],
)  # fmt: skip
def test_expression_that_could_run_code_is_refused(text: str) -> None:
    assert not is_plain_expression(text)
    entry = {"answer": "1", "metadata": {"source_dataset": "puzzle24"}}
    assert compare(text, json.dumps(entry)).reason == "unsafe_answer"


@pytest.mark.parametrize(
    ("name", "spelling", "is_right"),
    [
        ("countdown", "{}.", True),
        ("countdown", "{}..", False),
        ("puzzle24", "{}.5", False),
        ("quantum_lock", "${}$", True),
        ("quantum_lock", "\\text{{{}}}", True),
        ("quantum_lock", "{} or C", False),
        ("sokoban", "{}.", True),
        ("sokoban", "\\text{{{}}}", True),
        ("sokoban", "up or {}", False),
    ],
)
def test_harmless_signs_around_an_answer_are_not_refused(
    name: str, spelling: str, is_right: bool
) -> None:
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=7)[0]))
    answer = spelling.format(entry["answer"])
    assert compare(answer, json.dumps(entry)).is_correct == is_right


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no json", "is no JSON"),
        ("[]", "holds no text under 'answer'"),
        ('{"answer": 7}', "holds no text under 'answer'"),
        ('{"answer": "7"}', "names no dataset"),
        ('{"answer": "7", "dataset": "no_such_set"}', "has no dataset 'no_such_set'"),
        ('{"answer": "7", "dataset": "n_queens"}', "is refused"),
    ],
)
def test_bad_entry_is_our_error_not_a_wrong_answer(entry: str, message: str) -> None:
    with pytest.raises(GradingError, match=message):
        compare("7", entry)


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [("mini_sudoku", "1 2", "fails on its reference"), ("countdown", "4+6", "its own reference")],
)
def test_scorer_that_rejects_its_own_reference_is_our_error(
    name: str, answer: str, message: str
) -> None:
    metadata = {"source_dataset": name}
    if name == "countdown":
        metadata |= {"target": 24, "numbers": [4, 6]}
    with pytest.raises(GradingError, match=message):
        compare("2", json.dumps({"answer": answer, "metadata": metadata}))
