"""Means, standard errors and paired differences against numbers worked by hand."""

import math

import pytest

from megatron_rl.sweep.results import Estimate, estimate, paired_difference, sign_p


def test_standard_error_is_the_sample_deviation_over_the_root_of_n() -> None:
    # Deviations from 0.63 are -0.03, 0.03, 0: variance 0.0018 / 2, deviation 0.03.
    found = estimate([0.60, 0.66, 0.63])
    assert found is not None and found.n == 3
    assert found.mean == pytest.approx(0.63)
    assert found.standard_error == pytest.approx(0.03 / math.sqrt(3))


def test_one_seed_has_no_standard_error_and_none_no_mean() -> None:
    assert estimate([0.5]) == Estimate(0.5, None, 1)
    assert estimate([]) is None


def test_difference_is_taken_seed_by_seed() -> None:
    # 0.10, 0.08, 0.12: mean 0.10, deviation 0.02, t = 0.10 / (0.02 / sqrt(3)) = 5 sqrt(3).
    found = paired_difference({0: 0.60, 1: 0.66, 2: 0.63}, {2: 0.51, 1: 0.58, 0: 0.50})
    assert found is not None
    assert found.difference.mean == pytest.approx(0.10)
    assert found.difference.standard_error == pytest.approx(0.02 / math.sqrt(3))
    assert found.t == pytest.approx(5 * math.sqrt(3))
    assert (found.higher, found.lower, found.sign_p) == (3, 0, 0.25)


def test_only_seeds_that_both_have_are_paired() -> None:
    found = paired_difference({0: 1.0, 1: 5.0, 3: 2.0}, {0: 2.0, 2: 9.0, 3: 5.0})
    # -1 and -3: mean -2, deviation sqrt(2), error 1.
    assert found is not None and found.difference.n == 2
    assert found.difference.mean == -2.0
    assert found.difference.standard_error == pytest.approx(1.0)
    assert found.t == pytest.approx(-2.0) and (found.higher, found.lower) == (0, 2)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_pairing_removes_what_a_seed_does_to_both() -> None:
    values, baseline = {0: 0.1, 1: 0.5, 2: 0.9}, {0: 0.09, 1: 0.48, 2: 0.89}
    found = paired_difference(values, baseline)
    alone = estimate(list(values.values()))
    assert found is not None and alone is not None and alone.standard_error is not None
    assert found.difference.standard_error is not None
    assert found.difference.standard_error < alone.standard_error / 50


def test_equal_differences_have_no_t() -> None:
    # 0.6 - 0.5 and 0.7 - 0.6 differ in the last bit.
    found = paired_difference({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6})
    assert found is not None and found.t is None and found.higher == 2
    same = paired_difference({0: 0.6, 1: 0.7}, {0: 0.6, 1: 0.7})
    assert same is not None and same.t is None and same.sign_p is None
    alone = paired_difference({0: 0.6}, {0: 0.5})
    assert alone is not None and alone.t is None and alone.sign_p == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_run_is_not_left_out(value: float) -> None:
    found = paired_difference({0: value, 1: 0.5}, {0: 0.5, 1: 0.5})
    assert found is not None and found.difference.n == 2 and found.t is None
    assert not math.isfinite(found.difference.mean)
    both = estimate([value, -value])
    assert both is not None and math.isnan(both.mean)


@pytest.mark.parametrize(
    ("higher", "lower", "expected"),
    [
        (0, 0, None),
        (1, 0, 1.0),
        (4, 0, 0.125),
        (0, 6, 0.03125),
        (5, 1, 14 / 64),  # 2 (C(6, 5) + C(6, 6)) / 2**6
        (2, 2, 1.0),
        (2, 8, 112 / 1024),  # 2 (45 + 10 + 1) / 2**10
    ],
)
def test_sign_test_is_exact(higher: int, lower: int, expected: float | None) -> None:
    assert sign_p(higher, lower) == expected
