"""Answers with logprobs of given tokens: a gap is an error, never a number to train on."""

import math

import pytest

from generation.engine import EngineError
from generation.scoring_engine import read_logprobs, without_foreign

IDS = [7, 8, 9, 5]


def answer(*entries: tuple[float | None, int]) -> dict:
    return {"meta_info": {"input_token_logprobs": [[value, ids, None] for value, ids in entries]}}


def test_the_last_entries_are_those_of_the_tokens_asked_for() -> None:
    given = answer((None, 8), (-0.25, 9), (-1.5, 5))
    assert read_logprobs(given, IDS, 2, last_id=99) == [-0.25, -1.5]


def test_the_last_id_of_all_may_be_named_zero_and_no_other() -> None:
    # SGLang 0.5.23 does so.
    assert read_logprobs(answer((-0.25, 0), (-1.5, 5)), IDS, 2, last_id=9) == [-0.25, -1.5]
    with pytest.raises(EngineError, match="not the 2 asked for"):
        read_logprobs(answer((-0.25, 0), (-1.5, 5)), IDS, 2, last_id=10)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(None, 8), (-0.25, 9)], "1 tokens|that are not the 2 asked for"),
        ([], "0 tokens that are not the 2 asked for"),
        ([(None, 8), (-0.25, 9), (-1.5, 6)], "not the 2 asked for"),
        ([(None, 9), (-1.5, 5)], "no finite numbers"),
        ([(-0.25, 9), (float("-inf"), 5)], "no finite numbers"),
        ([(-0.25, 9), (float("nan"), 5)], "no finite numbers"),
    ],
)
def test_an_answer_with_a_gap_is_refused(
    entries: list[tuple[float | None, int]], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        read_logprobs(answer(*entries), IDS, 2, last_id=99)
    with pytest.raises(EngineError, match="0 tokens"):
        read_logprobs({}, IDS, 2, last_id=99)


def test_foreign_ids_are_left_out_of_the_softmax() -> None:
    # Probabilities 0.5, 0.3 and, of foreign ids, 0.15 and 0.05; then one without any.
    rows = [None, [[math.log(0.15), 10, None], [math.log(0.05), 11, None]], [[-math.inf, 10, None]]]
    found = without_foreign([math.log(0.5), math.log(0.3)], rows)
    assert found == pytest.approx([math.log(0.5 / 0.8), math.log(0.3)])
    for wrong in (None, rows[:1], rows[1:2]):
        with pytest.raises(EngineError, match="token ids that the policy lacks"):
            without_foreign([-1.0, -2.0], wrong)
