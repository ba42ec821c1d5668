"""Advantage estimators, normalizations and aggregations against numbers worked by hand."""

from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest

from megatron_rl.algorithms import aggregation, normalization
from megatron_rl.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS, GroupView
from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.algorithm import (
    AdvantageEstimatorConfig,
    AggregationConfig,
    AlgorithmConfig,
    NormalizationConfig,
)
from megatron_rl.config.errors import InputError

ONE, MANY = NormalizationConfig(), AggregationConfig()
LENGTHS = [np.array([3, 7]), np.array([20, 1, 9])]


def view(rewards: list[float]) -> GroupView:
    values = np.array(rewards, float)
    return GroupView("p", values, values > 0.5, values > 0.05, np.full(len(values), 3))


def advantage_estimator(name: str, rewards: list[float], **given: float) -> np.ndarray:
    return ADVANTAGE_ESTIMATORS[name](
        view(rewards), AdvantageEstimatorConfig.model_validate({"name": name, **given})
    )


def test_the_group_mean_is_subtracted_and_nothing_divided() -> None:
    # Mean 0.3.
    found = advantage_estimator("group_mean", [1.0, 0.1, 0.1, 0.0])
    np.testing.assert_allclose(found, [0.7, -0.2, -0.2, -0.3], atol=1e-12)


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    found = advantage_estimator("leave_one_out", [1.0, 0.1, 0.1, 0.0])
    expected = [1 - 0.2 / 3, 0.1 - 1.1 / 3, 0.1 - 1.1 / 3, -1.2 / 3]
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
@pytest.mark.parametrize("is_right", [False, True])
def test_a_completion_alone_in_its_group_has_a_finite_advantage_estimator(
    name: str, is_right: bool
) -> None:
    group = GroupView(
        "p",
        rewards=np.array([float(is_right)]),
        is_correct=np.array([is_right]),
        is_well_formed=np.array([True]),
        lengths=np.array([3]),
        classes=np.array([0 if is_right else -1]),
    )
    found = ADVANTAGE_ESTIMATORS[name](group, AdvantageEstimatorConfig())
    # What compares with others has nothing to say.
    expected = float(is_right) if name in ("reward", "pass_at_k", "majority") else 0.0
    assert found == pytest.approx([expected], abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 1, 0], [0.3, 1.0, 0.3, 0.7, 0.0]])
def test_pass_at_k_is_what_a_completion_adds_to_the_best_of_all_subsets(
    rewards: list[float], k: int
) -> None:
    expected = np.zeros(5)
    for places in combinations(range(5), k):
        for i in places:
            others = [rewards[j] for j in places if j != i]
            expected[i] += (max(rewards[j] for j in places) - max(others)) / comb(5, k)
    np.testing.assert_allclose(advantage_estimator("pass_at_k", rewards, k=k), expected, atol=1e-12)


def test_pass_at_k_of_right_and_wrong_has_a_closed_form() -> None:
    # 2 of 6 right, k = 3: (4 choose 2) / (6 choose 3).
    found = advantage_estimator("pass_at_k", [1, 0, 0, 1, 0, 0], k=3)
    np.testing.assert_allclose(found, np.array([1, 0, 0, 1, 0, 0]) * 6 / 20, atol=1e-12)
    assert not advantage_estimator("pass_at_k", [1, 1, 1], k=2).any()


def test_a_soft_value_lies_between_mean_and_best_and_survives_a_small_temperature() -> None:
    found = advantage_estimator("soft_value", [1.0, 0.0], temperature=0.5)
    value = 0.5 * np.log((np.exp(2.0) + 1) / 2)
    np.testing.assert_allclose(found, [1 - value, -value], atol=1e-12)
    sharp = advantage_estimator("soft_value", [1.0, 0.0], temperature=1e-4)
    np.testing.assert_allclose(sharp, [0.0, -1.0], atol=1e-4)


def test_minibatch_normalization_matches_hand_worked_numbers() -> None:
    # Mean 0; variance ((9 + 1 + 1 + 1) / 16 + 4 / 4) / 8 = 7/32.
    advantage_estimators = [np.array([0.75, -0.25, -0.25, -0.25]), np.array([0.5, 0.5, -0.5, -0.5])]
    found = normalization.minibatch(advantage_estimators, ONE)
    for one, other in zip(found, advantage_estimators, strict=True):
        np.testing.assert_allclose(one, other / sqrt(7 / 32))


def test_group_normalization_gives_each_group_a_deviation_of_one() -> None:
    advantage_estimators = [np.array([0.75, -0.25, -0.25, -0.25]), np.array([0.2, 0.0])]
    first, second = normalization.group(advantage_estimators, ONE)
    np.testing.assert_allclose(first, np.array([3, -1, -1, -1]) / sqrt(3))
    np.testing.assert_allclose(second, [1.0, -1.0])


@pytest.mark.parametrize("name", ["minibatch", "group"])
def test_equal_advantages_become_zero_instead_of_nan(name: str) -> None:
    (found,) = normalization.NORMALIZATIONS[name]([np.array([2.0, 2.0])], ONE)
    assert found.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_tokens", [[1 / 20, 1 / 20], [1 / 60, 1 / 60, 1 / 60]]),
        ("batch_tokens", [[1 / 40, 1 / 40], [1 / 40, 1 / 40, 1 / 40]]),
        ("sequence_mean", [[1 / 15, 1 / 35], [1 / 100, 1 / 5, 1 / 45]]),
        ("sequence_sum", [[1 / 5, 1 / 5], [1 / 5, 1 / 5, 1 / 5]]),
    ],
)
def test_weights_are_those_worked_by_hand(name: str, expected: list[list[float]]) -> None:
    found = aggregation.AGGREGATIONS[name](LENGTHS, MANY)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other)
    if name != "sequence_sum":
        total = sum(float(n @ w) for n, w in zip(LENGTHS, found, strict=True))
        assert total == pytest.approx(1.0)


def nan_where_all_fail(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    return np.where(group.rewards.max() > 0, group.rewards, np.nan)


def beyond_float32(advantages: list[np.ndarray], cfg: NormalizationConfig) -> list[np.ndarray]:
    return [mine * 1e39 for mine in advantages]


def over_other_tokens(lengths: list[np.ndarray], cfg: AggregationConfig) -> list[np.ndarray]:
    with np.errstate(divide="ignore"):
        return [1 / (mine - 3) for mine in lengths]


def test_advantages_and_weights_that_are_not_finite_are_refused_by_function_and_group() -> None:
    here = f"{__name__}:"
    groups = [view([1.0, 0.0]), view([-0.1, 0.0])]
    nan = find_advantage_functions(
        AlgorithmConfig.model_validate(
            {
                "advantage_estimator": {"name": f"{here}nan_where_all_fail"},
                "aggregation": {"name": f"{here}over_other_tokens"},
            }
        )
    )
    assert len(nan.advantages(groups[:1])) == 1
    said = r"nan_where_all_fail' gives nan for completion 0 of the prompt 'p', .*\[-0.1, 0.0\]"
    with pytest.raises(InputError, match=said):
        nan.advantages(groups)
    with pytest.raises(
        InputError, match=r"over_other_tokens' gives inf .* lengths are \[3.0, 3.0\]"
    ):
        nan.weights(groups)
    # Finite float64, yet infinite as the float32 that the trainer reads.
    normalization = {"name": f"{here}beyond_float32"}
    large = find_advantage_functions(
        AlgorithmConfig.model_validate({"normalization": normalization})
    )
    said = r"beyond_float32' gives 5e\+38 for completion 0 of .* advantages are \[0.5, -0.5\]"
    with pytest.raises(InputError, match=said):
        large.advantages(groups)
