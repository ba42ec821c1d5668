import math

import numpy as np
import pytest

from megatron_rl.algorithms.advantage import (
    group_mean_advantages,
    normalize_over_minibatch,
    token_weight,
)  # fmt: skip
from megatron_rl.rollout_queue.batches import minibatch_sequences
from tests.rollout_queue.makers import make_group


def test_group_mean_is_subtracted_and_nothing_divided() -> None:
    advantages = group_mean_advantages(np.array([1.0, 0.1, 0.1, 0.0]))
    # mean 0.3
    np.testing.assert_allclose(advantages, [0.7, -0.2, -0.2, -0.3], atol=1e-12)


def test_minibatch_normalization_matches_hand_worked_numbers() -> None:
    # Two groups: rewards 1 0 0 0 -> 3/4 -1/4 -1/4 -1/4; rewards 1 1 0 0 -> 1/2 1/2 -1/2 -1/2.
    # Mean 0; variance ((9 + 1 + 1 + 1) / 16 + 4 / 4) / 8 = (3/4 + 1) / 8 = 7/32.
    groups = [make_group(0, [1, 0, 0, 0]), make_group(1, [1, 1, 0, 0])]
    std = math.sqrt(7 / 32)
    sequences = minibatch_sequences(groups, group_mean_advantages)
    expected = [v / std for v in (0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5)]
    assert [s.advantage for s in sequences] == pytest.approx(expected)


def test_equal_advantages_become_zero_instead_of_nan() -> None:
    assert normalize_over_minibatch(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_token_weight_is_one_over_groups_times_group_tokens() -> None:
    assert token_weight(2, 10) == 0.05


def test_weights_of_a_minibatch_sum_to_one_over_its_tokens() -> None:
    groups = [make_group(0, [1, 0], tokens=[3, 7]), make_group(1, [1, 0], tokens=[20, 1])]
    sequences = minibatch_sequences(groups, group_mean_advantages)
    assert [s.weight for s in sequences] == pytest.approx([1 / 20, 1 / 20, 1 / 42, 1 / 42])
    tokens = [len(s.token_ids) - s.prompt_length for s in sequences]
    assert sum(n * s.weight for n, s in zip(tokens, sequences, strict=True)) == pytest.approx(1.0)
