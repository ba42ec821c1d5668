import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from megatron_rl.evaluation import paired_test as module
from megatron_rl.evaluation.paired_test import paired_test
from megatron_rl.sweep.results import sign_p


def brute_force_p(differences: list[Fraction]) -> float:
    seen = abs(sum(differences))
    signs = list(itertools.product((-1, 1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(row, differences, strict=True))) for row in signs]
    return sum(value >= seen for value in sums) / len(signs)


def test_p_is_the_hand_worked_number() -> None:
    # Sums of (1/2, 1/4) with signs: 3/4, 1/4, -1/4, -3/4: two of four as far as 3/4.
    found = paired_test([Fraction(1, 2), Fraction(1, 4)])
    assert found.p == 0.5 and found.difference == 0.375
    assert found.se == pytest.approx(math.sqrt(2) * 0.125 / math.sqrt(2))
    assert (found.higher, found.lower, found.problems, found.is_exact) == (2, 0, 2, True)


def test_p_equals_the_count_of_all_signs() -> None:
    chance = np.random.default_rng(0)
    for _ in range(30):
        n = int(chance.integers(1, 11))
        differences = [
            Fraction(int(chance.integers(-4, 5)), int(chance.integers(1, 5))) for _ in range(n)
        ]
        assert paired_test(differences).p == pytest.approx(brute_force_p(differences), abs=1e-12)


def test_equal_results_have_p_1() -> None:
    found = paired_test([Fraction(0)] * 5)
    assert (found.p, found.difference, found.se, found.higher) == (1.0, 0.0, 0.0, 0)
    assert paired_test([Fraction(1)]).se is None and paired_test([Fraction(1)]).p == 1.0


def test_single_completions_give_mcnemars_exact_test() -> None:
    differences = [Fraction(1)] * 14 + [Fraction(-1)] * 5 + [Fraction(0)] * 40
    assert paired_test(differences).p == pytest.approx(sign_p(14, 5))


def test_drawn_signs_agree_with_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(3)
    differences = [Fraction(int(chance.integers(-8, 10)), 8) for _ in range(60)]
    exact = paired_test(differences)
    monkeypatch.setattr(module, "_MOST_STATES", 0)
    drawn = paired_test(differences)
    assert exact.is_exact and not drawn.is_exact and drawn.difference == exact.difference
    assert 0.01 < exact.p < 0.99
    assert abs(drawn.p - exact.p) < 4 * math.sqrt(exact.p * (1 - exact.p) / 100_000)


def simulate(gain: float, runs: int, problems: int = 60, samples: int = 4) -> float:
    """Share of runs with p below 0.05; the models differ by `gain` where there is room."""
    chance = np.random.default_rng(4)
    found = 0
    for _ in range(runs):
        abilities = chance.beta(0.6, 0.6, problems)
        first = chance.binomial(samples, abilities)
        second = chance.binomial(samples, np.minimum(1.0, abilities + gain))
        differences = [Fraction(int(b - a), samples) for a, b in zip(first, second, strict=True)]
        found += paired_test(differences).p <= 0.05
    return found / runs


def test_equal_models_are_told_apart_no_more_often_than_the_level_says() -> None:
    runs = 2000
    noise = math.sqrt(0.05 * 0.95 / runs)
    rate = simulate(0.0, runs)
    assert rate < 0.05 + 3 * noise
    # Not by refusing to find anything.
    assert rate > 0.05 - 5 * noise


def test_equal_models_on_very_few_problems_stay_within_the_level() -> None:
    assert simulate(0.0, 1000, problems=6, samples=2) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_a_planted_difference_is_found() -> None:
    assert simulate(0.15, 300) > 0.8
