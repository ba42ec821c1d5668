"""megatron-rl audit --model: how far apart two measurements of one model may be."""

import pytest

from megatron_rl.launcher.audit_model import tolerance


def test_two_sampled_accuracies_may_differ_by_three_errors_of_their_difference() -> None:
    # One error is sqrt(0.8 * 0.2 / 400) = 0.02, that of the difference 0.0283.
    assert tolerance(0.8, 400, is_sampled=True) == pytest.approx(0.0849, abs=1e-4)


def test_greedy_accuracies_differ_by_rounding_alone() -> None:
    assert tolerance(0.8, 400, is_sampled=False) == pytest.approx(0.04)
    # All right or all wrong leaves room for an answer that rounding turns.
    assert tolerance(1.0, 400, is_sampled=False) == pytest.approx(0.001)
