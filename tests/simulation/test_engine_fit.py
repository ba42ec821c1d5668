"""Load over time and the fit of an engine's costs, beside brute force and made-up truth."""

import numpy as np
import pytest

from megatron_rl.simulation.engine_fit import LoadCurve, fit_not_negative


def test_mean_load_is_that_of_a_fine_grid() -> None:
    draw = np.random.default_rng(0)
    starts = draw.uniform(0, 10, 40)
    ends = starts + draw.uniform(0.5, 4, 40)
    prompts, tokens = draw.integers(1, 50, 40), draw.integers(1, 100, 40)
    curve = LoadCurve(starts, ends, prompts, tokens)
    grid = np.linspace(3.0, 7.0, 40_001)[:, None]
    running = (starts <= grid) & (grid < ends)
    kv = running * (prompts + tokens * (grid - starts) / (ends - starts))
    begin, end = np.array([3.0]), np.array([7.0])
    found = np.concatenate(curve.means(begin, end))
    expected = [running.sum(1).mean(), kv.sum(1).mean()]
    assert found == pytest.approx(expected, rel=1e-3)


def test_the_fit_finds_what_made_the_values() -> None:
    draw = np.random.default_rng(1)
    columns = np.stack([np.ones(50), draw.uniform(1, 64, 50), draw.uniform(1, 9e4, 50)], axis=1)
    truth = np.array([0.01, 2e-4, 3e-7])
    assert fit_not_negative(columns, columns @ truth) == pytest.approx(truth)


def test_no_cost_is_below_zero() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = np.array([3.0, 2.0, 1.0])
    # The best constant alone.
    assert fit_not_negative(columns, falling) == pytest.approx([2.0, 0.0])
