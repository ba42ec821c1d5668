import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from megatron_rl.evaluation.figures import (
    Figure,
    clustered_figure,
    maj_at_k,
    maj_figures,
    mean_figure,
    pass_at_k,
    pass_figures,
    sizes,
)
from tests.evaluation.makers import make_problem


def test_pass_at_k_is_the_hand_worked_number() -> None:
    # 2 of 4 are right: of the 6 pairs only the one of both wrong ones has none.
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 2, 1) == 0.5 and pass_at_k(4, 2, 3) == 1.0
    assert pass_at_k(64, 0, 8) == 0.0 and pass_at_k(64, 64, 1) == 1.0


def test_pass_at_k_equals_the_share_of_all_subsets() -> None:
    for right, k in itertools.product(range(8), range(1, 8)):
        verdicts = [place < right for place in range(7)]
        share = np.mean([any(subset) for subset in itertools.combinations(verdicts, k)])
        assert pass_at_k(7, right, k) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_of_many_completions_loses_no_digit() -> None:
    # The product form, in exact fractions; 1 - product in floats would round the first to 0.
    for n, right, k in ((10**6, 1, 1), (5000, 3, 2500), (10_000, 9_000, 1)):
        wrong = Fraction(1)
        for place in range(k):
            wrong *= Fraction(n - right - place, n - place)
        assert pass_at_k(n, right, k) == float(1 - wrong)


@pytest.mark.parametrize(("n", "k"), [(4, 5), (4, 0)])
def test_k_beyond_the_completions_is_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} of n={n}"):
        pass_at_k(n, 1, k)
    with pytest.raises(ValueError, match=f"k={k} of n={n}"):
        maj_at_k(np.zeros(n, np.int64), np.ones(n, bool), k)


def vote(subset: tuple[int, ...]) -> Fraction:
    """Chance that the vote of these classes is right; 0 is right, -1 abstains."""
    counts = Counter(c for c in subset if c != -1)
    if not counts:
        return Fraction(0)
    leaders = [c for c, count in counts.items() if count == max(counts.values())]
    return Fraction(int(0 in leaders), len(leaders))


def test_maj_at_k_is_the_hand_worked_number() -> None:
    # Right, right, wrong 1, no answer. Pairs: RR 1; RW twice 1/2; R- twice 1; W- 0: 4 of 6.
    classes, verdicts = np.array([0, 0, 1, -1]), np.array([1, 1, 0, 0], bool)
    assert maj_at_k(classes, verdicts, 2) == pytest.approx(4 / 6)
    # All four: two right ones against one wrong.
    assert maj_at_k(classes, verdicts, 4) == 1.0
    assert maj_at_k(np.array([-1, -1]), np.zeros(2, bool), 2) == 0.0


def test_maj_at_k_equals_the_mean_over_all_subsets() -> None:
    chance = np.random.default_rng(0)
    for _ in range(40):
        n = int(chance.integers(1, 9))
        classes = chance.integers(-1, 4, n)
        for k in range(1, n + 1):
            votes = [vote(subset) for subset in itertools.combinations(classes.tolist(), k)]
            expected = float(sum(votes) / len(votes))
            assert maj_at_k(classes, classes == 0, k) == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_equals_a_simulation_of_votes() -> None:
    chance = np.random.default_rng(1)
    classes = np.array([0] * 11 + [1] * 12 + [2] * 5 + [3] * 3 + [-1] * 9)
    draws = 20_000
    won = sum(
        float(vote(tuple(chance.choice(classes, 8, replace=False).tolist()))) for _ in range(draws)
    )
    expected = maj_at_k(classes, classes == 0, 8)
    assert abs(won / draws - expected) < 4 * 0.5 / math.sqrt(draws)


def test_maj_of_one_completion_is_the_accuracy() -> None:
    classes = np.array([0, 0, 0, 1, 2, -1, -1, 4])
    assert maj_at_k(classes, classes == 0, 1) == pytest.approx(3 / 8)


def test_maj_of_a_thousand_completions_is_finite() -> None:
    classes = np.array([0] * 520 + [1] * 504)
    assert maj_at_k(classes, classes == 0, 1024) == 1.0
    assert 0.5 < maj_at_k(classes, classes == 0, 512) < 1.0


def test_error_is_over_problems_not_over_completions() -> None:
    # Shares 1 and 1/4: mean 5/8, deviation 3/8 each; variance 2 * (3/8)^2 / (2 - 1), over 2.
    figure = mean_figure([1.0, 0.25])
    assert (figure.value, figure.problems) == (0.625, 2)
    assert figure.se == pytest.approx(3 / 8)
    # A copy of each completion tells nothing new.
    clusters = np.repeat([0, 1], 8)
    twice = clustered_figure(np.array([1.0] * 8 + [1.0] * 2 + [0.0] * 6), clusters)
    assert (twice.value, twice.se) == (figure.value, pytest.approx(figure.se))


def test_clustered_error_of_unequal_parts_is_the_hand_worked_number() -> None:
    # Mean 3/4; sums of deviations 3 * 1/4 - 3/4 of the first problem, 1/4 * 0 of none other.
    figure = clustered_figure(np.array([1.0, 1.0, 0.0, 1.0]), np.array([7, 7, 7, 9]))
    # Problem 7: 1/4 + 1/4 - 3/4 = -1/4; problem 9: 1/4. Two problems: times 2 / (2 - 1).
    assert figure.value == 0.75 and figure.problems == 2
    assert figure.se == pytest.approx(math.sqrt(2 * 2 / 16) / 4)


def test_one_problem_has_no_error() -> None:
    assert mean_figure([0.25]) == Figure(0.25, None, 1)
    alone = clustered_figure(np.array([1.0, 0.0, 0.0, 0.0]), np.array([3, 3, 3, 3]))
    assert alone == Figure(0.25, None, 1)


def test_error_squared_is_on_average_the_variance_of_the_mean() -> None:
    """All 2^6 outcomes of six problems that are right with chance 1/2: 1/4 / 6."""
    outcomes = [mean_figure(list(map(float, o))) for o in itertools.product((0, 1), repeat=6)]
    squares = [figure.se**2 for figure in outcomes if figure.se is not None]
    assert sum(squares) / 2**6 == pytest.approx(1 / 24)


def test_error_covers_the_truth_in_simulation() -> None:
    """Of problems with one underlying ability each: 95 % intervals hold the true mean."""
    chance = np.random.default_rng(2)
    hits, runs = 0, 2000
    for _ in range(runs):
        abilities = chance.beta(0.5, 0.5, 200)
        figure = mean_figure(chance.binomial(8, abilities) / 8)
        hits += abs(figure.value - 0.5) < 1.96 * figure.se
    # 4 deviations of a binomial share of 2000 draws at 0.95 are 0.02.
    assert abs(hits / runs - 0.95) < 0.02


def test_figures_by_k_leave_out_problems_of_too_few_completions() -> None:
    whole = make_problem([1, 0, 0, 0], classes=[0, 1, 1, 2])
    short = make_problem([1, 1, 0], classes=[0, 0, 1])
    unknown = make_problem([0, 0, 0, 1])
    passes = pass_figures([whole, short, unknown])
    assert list(passes) == sizes(4) == [2, 4]
    assert passes[2].value == pytest.approx((3 / 6 + 1 + 3 / 6) / 3)
    assert (passes[4].value, passes[4].problems) == (1.0, 2)
    majorities = maj_figures([whole, short, unknown])
    # Pairs of the first: 01 01 02 with the right one tie to 1/2, so 3/2 of 6; of the second: 1 and
    # twice 1/2, so 2 of 3.
    assert majorities[2].value == pytest.approx((1 / 4 + 2 / 3) / 2)
    assert (majorities[4].value, majorities[4].problems) == (0.0, 1)
    assert maj_figures([unknown]) == {} and sizes(1) == []
    assert sizes(6) == [2, 4, 6]
