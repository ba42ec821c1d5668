import math

import msgspec
import pytest

from tests.verification.requests import RULES, boxed, make_request
from verification.score import (
    length_penalty,
    load_task,
    score_exact,
    score_math,
    score_quickly,
    score_unverified,
)  # fmt: skip
from verification.verdict import GradingError


@pytest.mark.parametrize(
    ("n_tokens", "penalty"),
    # Limit 100, margin 40: free up to 60, then 0.1 / 40 = 0.0025 a token.
    [(0, 0.0), (60, 0.0), (61, -0.0025), (70, -0.025), (80, -0.05), (100, -0.1), (500, -0.1)],
)
def test_length_penalty_follows_the_paper(n_tokens: int, penalty: float) -> None:
    assert math.isclose(length_penalty(n_tokens, 100, 40), penalty, abs_tol=1e-12)


def test_length_penalty_without_margin_is_nothing() -> None:
    assert length_penalty(100, 100, 0) == 0.0
    assert length_penalty(101, 100, 0) == 0.0


def test_right_answer_gets_both_rewards() -> None:
    score = score_math(make_request(boxed("\\frac{14}{2}")), RULES)
    assert score.parts == {"format": 0.1, "correct": 0.9, "length": 0.0}
    assert math.isclose(score.reward, 1.0)
    assert score.is_correct
    assert score.is_well_formed


def test_wrong_answer_keeps_the_format_reward() -> None:
    score = score_math(make_request(boxed("8")), RULES)
    assert score.parts == {"format": 0.1, "correct": 0.0, "length": 0.0}
    assert score.reward == 0.1
    assert score.reason == "wrong_answer"
    assert not score.is_correct


def test_refused_format_gets_nothing_and_is_not_graded() -> None:
    rules = msgspec.structs.replace(RULES, margin_tokens=50)
    score = score_math(make_request("The answer is \\boxed{7}", completion_tokens=100), rules)
    assert score.reward == 0.0
    assert score.parts == {"format": 0.0, "correct": 0.0, "length": 0.0}
    assert score.reason == "no_think_start"
    assert not score.is_well_formed


def test_length_is_taken_from_right_and_wrong_answers() -> None:
    rules = msgspec.structs.replace(RULES, margin_tokens=40)
    right = score_math(make_request(boxed("7"), completion_tokens=80), rules)
    wrong = score_math(make_request(boxed("8"), completion_tokens=100), rules)
    assert math.isclose(right.reward, 0.95)
    assert math.isclose(wrong.reward, 0.0, abs_tol=1e-12)
    assert wrong.is_well_formed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<think>still thinking", "unfinished"),
        ("<think>a</think>The answer", "unfinished"),
        ("<think>a</think>\\boxed{\\frac{1", "unfinished"),
        ("<think>\\boxed{7}</think>so", "unfinished"),
        ("Hello", "no_think_start"),
        ("<think><think>", "several_think_tags"),
    ],
)
def test_completion_cut_at_the_limit_is_unfinished(text: str, reason: str) -> None:
    assert score_math(make_request(text, is_finished=False), RULES).reason == reason


def test_answer_before_the_cut_counts() -> None:
    assert score_math(make_request(boxed("7") + " And", is_finished=False), RULES).is_correct


@pytest.mark.parametrize(
    ("box", "answer", "is_correct"),
    [("cat", "cat", True), (" cat ", "cat\n", True), ("Cat", "cat", False), ("7.0", "7", False)],
)
def test_exact_compares_characters(box: str, answer: str, is_correct: bool) -> None:
    request = make_request(boxed(box), task="exact", answer=answer)
    assert score_exact(request, RULES).is_correct is is_correct
    assert score_quickly(request, RULES) == score_exact(request, RULES)


def test_quick_score_leaves_open_what_needs_a_library() -> None:
    assert score_quickly(make_request(boxed("7")), RULES) == score_math(
        make_request(boxed("7")), RULES
    )
    assert score_quickly(make_request(boxed("14/2")), RULES) is None
    assert score_quickly(make_request("anything", task="some.module:function"), RULES) is None


def test_unverified_answer_keeps_the_format_reward() -> None:
    score = score_unverified(make_request(boxed("7")), RULES, "grading_timeout")
    assert (score.reward, score.reason) == (0.1, "grading_timeout")
    refused = score_unverified(make_request("7"), RULES, "grading_timeout")
    assert (refused.reward, refused.reason) == (0.0, "no_think_start")


@pytest.mark.parametrize("name", ["maths", "", ":f", "module:"])
def test_unknown_task_names_the_known_ones(name: str) -> None:
    with pytest.raises(GradingError, match="known are math, exact, reasoning_gym"):
        score_quickly(make_request("", task=name), RULES)
    with pytest.raises(GradingError, match="known are"):
        load_task(name)


@pytest.mark.parametrize("name", ["no.such.module:f", "math:no_such_function"])
def test_task_that_cannot_be_loaded_is_an_error(name: str) -> None:
    with pytest.raises(GradingError, match="cannot load task"):
        load_task(name)
