"""The majority's advantage estimator against subsets that are listed one by one, and its gradient
against the exact one, by listing all outcomes."""

import random
import time
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS, GroupView
from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.algorithm import AdvantageEstimatorConfig, AlgorithmConfig
from megatron_rl.config.errors import InputError
from tests.algorithms.tabular import BANDIT, PAIRS, Table, expected_gradient, gradient

RIGHT, SILENT = 0, -1


def chance_of_right(classes: tuple[int, ...]) -> Fraction:
    """That the majority is right, of completions of which class 0 is right."""
    votes = Counter(c for c in classes if c != SILENT)
    if not votes:
        return Fraction(0)
    most = max(votes.values())
    return Fraction(int(votes[RIGHT] == most), list(votes.values()).count(most))


def listed(classes: tuple[int, ...], k: int) -> list[float]:
    """The advantage estimator, subset by subset."""
    n = len(classes)
    advantages = [Fraction(0)] * n
    for places in combinations(range(n), k):
        chosen = tuple(classes[j] for j in places)
        for position, i in enumerate(places):
            others = chosen[:position] + chosen[position + 1 :]
            advantages[i] += chance_of_right(chosen) - chance_of_right(others)
    return [float(c / comb(n, k)) for c in advantages]


def found(classes: tuple[int, ...], k: int) -> np.ndarray:
    labels = np.array(classes)
    n = len(labels)
    view = GroupView("p", np.zeros(n), labels == RIGHT, labels >= 0, np.ones(n, int), labels)
    return ADVANTAGE_ESTIMATORS["majority"](view, AdvantageEstimatorConfig(name="majority", k=k))


def test_advantage_estimator_is_what_a_completion_adds_to_the_vote_of_all_subsets() -> None:
    rng = random.Random(0)
    groups = {
        tuple(rng.randint(SILENT, 3) for _ in range(n)) for n in range(1, 8) for _ in range(60)
    }
    assert len(groups) > 250
    for classes in sorted(groups):
        for k in range(1, len(classes) + 1):
            np.testing.assert_allclose(
                found(classes, k), listed(classes, k), atol=1e-12, err_msg=f"{classes} {k}"
            )


def test_hand_worked_votes() -> None:
    # Two right, one wrong, all three vote: without a right one there is a tie.
    np.testing.assert_allclose(found((0, 0, 1), 3), [0.5, 0.5, 0.0], atol=1e-12)
    # One right, one wrong: the right one turns 0 into 1/2, the wrong one 1 into 1/2.
    np.testing.assert_allclose(found((0, 1), 2), [0.5, -0.5], atol=1e-12)
    # A completion without an answer casts no vote.
    np.testing.assert_allclose(found((0, SILENT), 2), [1.0, 0.0], atol=1e-12)
    # A vote of one is REINFORCE without a baseline.
    np.testing.assert_allclose(found((0, 1, 0, SILENT), 1), [0.25, 0, 0.25, 0], atol=1e-12)


@pytest.mark.parametrize("classes", [(1, 2, 1, SILENT, 3), (0,) * 9, (SILENT,) * 4, (2,) * 5])
def test_flat_verdicts_leave_no_advantage_estimator_where_more_than_one_votes(
    classes: tuple[int, ...],
) -> None:
    assert not found(classes, 2).any() and not found(classes, 4).any()


def test_sum_over_large_groups_is_that_of_two_values_of_the_vote() -> None:
    # sum_i A_i = k (E f of k - E f of k - 1), each over subsets of the group; sampled here.
    rng = np.random.default_rng(0)
    classes = rng.choice([SILENT, 0, 0, 0, 1, 1, 2, 3, 4, 5], 64)
    k, draws = 7, 20_000

    def mean(size: int) -> tuple[float, float]:
        values = [
            float(chance_of_right(tuple(rng.choice(classes, size, replace=False).tolist())))
            for _ in range(draws)
        ]
        return float(np.mean(values)), float(np.var(values) / draws)

    (one, one_var), (less, less_var) = mean(k), mean(k - 1)
    error = k * (one_var + less_var) ** 0.5
    assert abs(found(tuple(classes.tolist()), k).sum() - k * (one - less)) < 4.5 * error


def test_the_largest_groups_are_quick_and_exact() -> None:
    rng = np.random.default_rng(1)
    groups = [tuple(rng.integers(-1, top, 64).tolist()) for top in (2, 4, 10, 60)]
    # Classes of 10, 9, ... 1: as many different sizes as there can be.
    groups.append(tuple(c for c in range(10) for _ in range(c + 1)) + (SILENT,) * 9)
    begin = time.process_time()
    for classes in groups:
        for k in (1, 2, 32, 63, 64):
            advantage_estimator = found(classes, k)
            assert (
                np.isfinite(advantage_estimator).all()
                and np.abs(advantage_estimator).max() <= k / 64 + 1e-9
            )
            if k >= 63:
                np.testing.assert_allclose(advantage_estimator, listed(classes, k), atol=1e-11)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("name", ["majority", "pass_at_k"])
def test_a_group_smaller_than_k_is_judged_as_a_whole(name: str) -> None:
    labels = np.array([0, 1, 1])
    view = GroupView("p", np.array([1.0, 0, 0]), labels == 0, labels >= 0, np.ones(3, int), labels)
    advantage_estimators = [
        ADVANTAGE_ESTIMATORS[name](view, AdvantageEstimatorConfig(name=name, k=k)) for k in (3, 8)
    ]
    np.testing.assert_array_equal(*advantage_estimators)
    assert advantage_estimators[0].any()


def test_a_advantage_estimator_says_what_it_needs() -> None:
    for preset, needs, zero_variance_on in (
        ("majority", True, "verdict"),
        ("magistral", False, "reward"),
    ):
        advantage_functions = find_advantage_functions(
            AlgorithmConfig.model_validate({"preset": preset})
        )
        assert (advantage_functions.needs_classes, advantage_functions.zero_variance_on) == (
            needs,
            zero_variance_on,
        )


def odd(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """An advantage estimator of a user's with a mistake in what it says."""
    return group.rewards


odd.zero_variance_on = "answers"


def test_a_advantage_estimator_that_is_flat_on_nothing_known_is_refused() -> None:
    given = {"advantage_estimator": {"name": f"{__name__}:odd"}}
    with pytest.raises(InputError, match="zero_variance_on is 'answers', expected one of"):
        find_advantage_functions(AlgorithmConfig.model_validate(given))


@pytest.mark.parametrize(
    ("table", "n", "k"),
    [(BANDIT, 3, 3), (BANDIT, 4, 4), (BANDIT, 4, 3), (BANDIT, 4, 2), (BANDIT, 3, 1), (PAIRS, 3, 2)],
)
def test_advantage_estimator_follows_the_chance_that_the_mode_of_k_answers_is_right(
    table: Table, n: int, k: int
) -> None:
    logits = table.logits(1)
    right = {place for place, reward in enumerate(table.rewards) if reward == 1.0}

    def objective(leaf: Tensor) -> Tensor:
        chances = table.probabilities(leaf)
        total = torch.zeros((), dtype=torch.float64)
        for places in product(range(len(chances)), repeat=k):
            answers = tuple(RIGHT if place in right else 1 + place for place in places)
            total = total + chances[list(places)].prod() * float(chance_of_right(answers))
        return total

    given = {"preset": "majority", "advantage_estimator": {"k": k}}
    found = expected_gradient(table, given, logits, group_size=n)
    # The mean over the sequences of a group, where the sum over them is the estimator.
    exact = gradient(objective, logits) / n
    assert exact.norm() > 1e-3
    torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-6)
