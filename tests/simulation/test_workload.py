"""Lengths, correlation inside a prompt, and zero-variance groups, beside counts and formulas."""

import math
import random

import numpy as np
import pytest

from megatron_rl.simulation.workload import (
    Conversation,
    LogNormalLengths,
    PassRates,
    RecordedLengths,
    Workload,
)


@pytest.mark.parametrize("size", [2, 4, 16])
def test_zero_variance_share_is_that_of_drawn_groups(size: int) -> None:
    rates, draw = PassRates(0.8, 1.4), random.Random(0)
    flat = 0
    for _ in range(20_000):
        rate = draw.betavariate(rates.alpha, rates.beta)
        right = sum(draw.random() < rate for _ in range(size))
        flat += right in (0, size)
    assert rates.zero_variance_share(size) == pytest.approx(flat / 20_000, abs=0.01)


def test_zero_variance_share_of_even_chances_by_hand() -> None:
    # Beta(1, 1): E[p^3] + E[(1 - p)^3] = 1/4 + 1/4.
    assert PassRates(1.0, 1.0).zero_variance_share(3) == pytest.approx(0.5)


@pytest.mark.parametrize(("mean", "share"), [(0.5, 0.3), (0.1, 0.6), (0.9, 0.4)])
def test_pass_rates_are_found_by_mean_and_zero_variance_share(mean: float, share: float) -> None:
    rates = PassRates.of(mean, share, 16)
    assert rates.alpha / (rates.alpha + rates.beta) == pytest.approx(mean)
    assert rates.zero_variance_share(16) == pytest.approx(share, abs=1e-6)
    assert rates.zero_variance_share(4) > share > rates.zero_variance_share(64)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_lengths_of_a_prompt_have_the_stated_correlation(correlation: float) -> None:
    workload = Workload(LogNormalLengths(5000, 0.8, correlation), 10, PassRates(1, 1), seed=3)
    groups = [[workload.tokens(group, i, 10**9) for i in range(8)] for group in range(600)]
    logs = np.log(groups)
    assert np.exp(np.median(logs)) == pytest.approx(5000, rel=0.1)
    assert logs.std() == pytest.approx(0.8, rel=0.05)
    # One-way analysis of variance: mean squares between and within groups of 8.
    between, within = 8 * logs.mean(1).var(ddof=1), logs.var(axis=1, ddof=1).mean()
    found = (between - within) / (between + 7 * within)
    assert found == pytest.approx(correlation, abs=0.05)


def test_the_cap_cuts() -> None:
    workload = Workload(LogNormalLengths(5000, 0.8), 10, PassRates(1, 1))
    lengths = [workload.tokens(group, 0, 6000) for group in range(500)]
    share = sum(length == 6000 for length in lengths) / 500
    # P(exp(0.8 z) >= 1.2)
    expected = 0.5 * math.erfc(math.log(1.2) / 0.8 / math.sqrt(2))
    assert share == pytest.approx(expected, abs=0.05)


def test_recorded_lengths_keep_to_one_recorded_prompt() -> None:
    workload = Workload(RecordedLengths(((3, 4), (30, 40))), 10, PassRates(1, 1))
    for group in range(20):
        lengths = {workload.tokens(group, index, 35) for index in range(16)}
        assert lengths <= {3, 4} or lengths <= {30, 35}


def test_a_completion_is_the_same_whenever_it_is_drawn() -> None:
    workload = Workload(LogNormalLengths(100, 0.8), 10, PassRates(1, 1))
    first = [(workload.tokens(5, i, 999), workload.is_correct(5, i)) for i in range(8)]
    workload.tokens(1, 0, 999)
    assert [(workload.tokens(5, i, 999), workload.is_correct(5, i)) for i in range(8)] == first


def test_replies_cover_a_conversation_but_for_what_was_given() -> None:
    spoken = Conversation(replies=4, given_share=0.3, environment_s=2.0)
    workload = Workload(LogNormalLengths(100, 0.0), 10, PassRates(1, 1), conversation=spoken)
    replies = workload.replies(3, 1, 100)
    assert [(one.start, one.end) for one in replies] == [(0, 17), (27, 45), (55, 72), (82, 100)]
    assert [one.wait_s > 0 for one in replies] == [False, True, True, True]
    waits = [one.wait_s for n in range(500) for one in workload.replies(n, 0, 100)[1:]]
    assert sum(waits) / len(waits) == pytest.approx(2.0, rel=0.1)
    # A completion of few tokens has as many replies.
    assert [(one.start, one.end) for one in workload.replies(0, 0, 2)] == [(0, 1), (1, 2)]
