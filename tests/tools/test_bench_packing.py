"""The figures of the packing benchmark on lengths worked by hand."""

import pytest

from tools.bench.packing import (
    LONGEST,
    MAX_COMPLETION,
    combine,
    figures,
    in_order_of_arrival,
    magistral_like,
    padded_tokens,
)


def test_arrival_order_closes_a_microbatch_that_is_full() -> None:
    lengths = [6, 5, 4, 9, 1, 2]
    assert in_order_of_arrival(lengths, 10) == [[0], [1, 2], [3, 4], [5]]
    # Rows of 6 and 5 would take 12; 5 and 4 take 10; 9 and 1 would take 18; 1 and 2 take 4.
    assert in_order_of_arrival(lengths, 10, is_padded=True) == [[0], [1, 2], [3], [4, 5]]
    assert padded_tokens([1, 2], lengths) == 10


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    assert in_order_of_arrival([30, 4, 4], 10) == [[0], [1, 2]]


def test_figures_of_six_sequences() -> None:
    found = figures([6, 5, 4, 9, 1, 5], 10)
    # 30 tokens fill three microbatches of 10: 9 + 1, 6 + 4, 5 + 5.
    assert found["fill"] == found["microbatches_over_lower_bound"] == 1.0
    # In order of arrival: 6, 5 + 4, 9 + 1, 5.
    assert found["padding_arrival"] == pytest.approx(1 - 30 / 40)
    # Six rows in eight microbatches of one rank each, two of them empty.
    assert found["microbatches_over_lower_bound_dp8"] == 1.0


def test_the_worst_draw_counts() -> None:
    good = {"fill": 1.0, "imbalance_dp8": 1.0, "ms": 1.0, "padding_arrival": 0.1}
    bad = {"fill": 0.9, "imbalance_dp8": 1.2, "ms": 3.0, "padding_arrival": 0.3}
    assert combine([good, bad]) == {
        "fill": 0.9, "imbalance_dp8": 1.2, "ms": 2.0, "padding_arrival": 0.2
    }  # fmt: skip


def test_lengths_are_those_that_are_stated() -> None:
    sequences = magistral_like(4000, seed=1)
    completions = sorted(s.completion for s in sequences)
    assert completions[2000] == pytest.approx(7000, rel=0.05)
    assert completions[-1] == MAX_COMPLETION and max(s.total for s in sequences) <= LONGEST
    scaled = magistral_like(4000, seed=1, scale=1 / 32)
    assert sum(s.total for s in scaled) == pytest.approx(
        sum(s.total for s in sequences) / 32, rel=0.01
    )
