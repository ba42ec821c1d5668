"""What outcomes of environments become: scores that the queue can read, or failures by name."""

import pytest

from generation.outcomes import earned_by
from verification.environments.outcome_check import BadOutcome, check_end
from verification.environments.policy import Outcome
from verification.environments.settings import EnvironmentFailed


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, {"environment": 1.0}),
        ({"form": 0.25}, {"form": 0.25, "environment": 0.75}),
        ({"form": 1.0}, {"form": 1.0}),
        ({"n_turns": 7.0}, {"n_turns": 7.0, "environment": -6.0}),
        # In floats the sum is 0.9999999999999999.
        ({"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 0.7, "b": 0.2, "c": 0.1}),
    ],
)
def test_parts_sum_to_the_reward(parts: dict[str, float], expected: dict[str, float]) -> None:
    score, returns = earned_by(Outcome(1.0, "x", parts), [], [])
    assert score.parts == expected and score.reward == 1.0
    assert sum(score.parts.values()) == pytest.approx(1.0, abs=1e-9)
    assert returns == []


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (Outcome(1.0, "x", {"a" * 201: 0.0}), "length <= 200"),
        (Outcome(1.0, "x", {str(number): 0.0 for number in range(100)}), "length <= 100"),
        (Outcome(1.0, "x", {"\ud83d": 0.0}), "surrogates not allowed"),
    ],
)
def test_an_outcome_that_no_message_holds_is_the_environments_failure(
    outcome: Outcome, says: str
) -> None:
    assert check_end(outcome) == outcome
    with pytest.raises(EnvironmentFailed, match=says) as found:
        earned_by(outcome, [], [])
    assert found.value.kind == "bad_outcome"


def test_a_number_of_an_absurd_size_is_refused() -> None:
    with pytest.raises(BadOutcome, match="reward is 1000"):
        check_end(Outcome(10**400, "x"))
    with pytest.raises(BadOutcome, match=r"a is 9e\+29, expected a number from -1e\+24 to 1e\+24"):
        check_end(Outcome(1.0, "x", {"a": 9e29, "b": 9e29}))
    # So a hundred parts and their rest fit in a message.
    assert earned_by(Outcome(1e24, "x", {"a": -1e24}), [], [])[0].parts["environment"] == 2e24
