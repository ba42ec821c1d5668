"""Votes on labels: worked by hand, and the probabilities that `difficulty.py` states."""

import itertools
import math

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.curation.difficulty import (
    DifficultyOptions,
    Vote,
    count_votes,
    judge,
    may_be_doubted,
)
from megatron_rl.protocol.types import NO_ANSWER

SAMPLES = 16
DROP = DifficultyOptions(labels="drop")


def probability_of_doubt(right: float, rivals: list[float]) -> float:
    """That a label with probability `right` is doubted, by a sum over all outcomes.

    rivals: probabilities of other answers; the rest of the samples gives none.
    """
    shares = [right, *rivals, 1 - right - sum(rivals)]
    total = 0.0
    for counts in itertools.product(range(SAMPLES + 1), repeat=len(shares) - 1):
        rest = SAMPLES - sum(counts)
        if rest < 0:
            continue
        vote = Vote(produced=counts[0], majority=max(counts[1:]), answer="")
        if judge(vote, samples=SAMPLES, rules=DROP) == "drop":
            ways = math.factorial(SAMPLES)
            for count in (*counts, rest):
                ways //= math.factorial(count)
            total += ways * math.prod(s**c for s, c in zip(shares, (*counts, rest), strict=True))
    return total


def test_wrong_labels_of_solved_problems_are_doubted_as_often_as_stated() -> None:
    assert probability_of_doubt(0.0, [0.8]) == pytest.approx(0.9733, abs=1e-4)
    assert probability_of_doubt(0.01, [0.8]) >= 0.96
    assert probability_of_doubt(0.027, [0.8]) >= 0.90
    assert probability_of_doubt(0.2, [0.8]) < 0.15
    assert probability_of_doubt(0.0, [0.9]) > 0.999


def test_right_labels_are_doubted_as_seldom_as_stated() -> None:
    assert probability_of_doubt(0.36, [0.64]) < 0.008
    assert probability_of_doubt(0.0, [0.25]) < 0.002
    assert probability_of_doubt(0.05, [0.25, 0.25]) < 2 * 0.002
    # The same mistake in most samples: nothing tells it from a wrong label.
    assert probability_of_doubt(0.05, [0.8]) > 0.7


@pytest.mark.parametrize(
    ("produced", "majority", "action"),
    [(1, 10, "drop"), (1, 9, "keep"), (2, 14, "keep"), (1, 13, "relabel"), (0, 12, "drop")],
)
def test_shares_decide_at_their_edges(produced: int, majority: int, action: str) -> None:
    # Of 16: 0.6 is 9.6, so 10; 0.1 is 1.6, so 1; 0.8 is 12.8, so 13.
    vote = Vote(produced, majority, "7")
    rules = DifficultyOptions(labels="relabel", up_to=1)
    assert judge(vote, samples=SAMPLES, rules=rules) == action


def test_a_wrong_answer_that_is_the_label_counts_for_it() -> None:
    # The label; then 8*3 (the label, not worked out), 25 three times, one without an answer.
    answers = ["8*3", "25", " 25", "25.0", None]
    vote = count_votes(answers, [0, 0, 1, 1, 1, NO_ANSWER], correct=2)
    assert vote == Vote(produced=3, majority=3, answer="25")


def test_an_empty_label_is_no_class() -> None:
    vote = count_votes([None, "3"], [NO_ANSWER, NO_ANSWER, 0], correct=0)
    assert vote == Vote(produced=0, majority=1, answer="3")


def test_only_problems_that_a_vote_could_change_are_compared() -> None:
    assert may_be_doubted(["3"] * 10 + [None] * 5, correct=1, rules=DROP)
    assert not may_be_doubted(["3"] * 9 + [None] * 6, correct=1, rules=DROP)
    assert not may_be_doubted(["3"] * 14, correct=2, rules=DROP)
    assert not may_be_doubted([], correct=0, rules=DROP)


@pytest.mark.parametrize(
    "values",
    [
        {"label_share": 1.2},
        {"max_label_share": 0.6},
        {"relabel_share": float("nan")},
        # With the other defaults each relabelled problem would be too easy.
        {"labels": "relabel"},
    ],
)
def test_impossible_shares_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        DifficultyOptions(**values)
