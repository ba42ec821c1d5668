"""Sums that a loss reports, and advantages that it reads, against numbers worked by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.objective import Objective, find_objective
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import AlgorithmConfig, ShapingConfig


def tokens_of(own: list[float], sampled: list[float], advantages: list[float], real: int) -> Tokens:
    """One sequence a token, of these probabilities; only the first `real` are not padding."""
    numbers = torch.arange(len(own))
    is_real = numbers < real
    return Tokens(
        logprobs=torch.tensor(own).log().requires_grad_(),
        generator_logprobs=torch.tensor(sampled).log(),
        advantages=torch.tensor(advantages),
        rewards=torch.ones(len(own)),
        weights=is_real / real,
        is_real=is_real,
        lags=numbers * 0,
        segments=Segments(numbers, numbers + 1, torch.where(is_real, 0, -1), numbers),
        is_gold=torch.zeros(len(own), dtype=torch.bool),
    )


def objective_of(**given: Any) -> Objective:
    return find_objective(AlgorithmConfig.model_validate(given))


def sums_of(objective: Objective, tokens: Tokens) -> dict[str, float]:
    found = objective.loss(tokens, tokens.advantages, torch.zeros(len(tokens.weights)))
    return {name: float(value) for name, value in found.sums.items()}


@pytest.mark.parametrize("name", ["clipped", "cispo"])
def test_sums_leave_padding_out(name: str) -> None:
    # Ratios 2 and 0.625; of the padding 0.5 and 5, which every rule would count.
    tokens = tokens_of([0.5] * 4, [0.25, 0.8, 1.0, 0.1], [1.0, -2.0, -3.0, 4.0], real=2)
    objective = objective_of(
        policy_loss={"name": name, "eps_low": 0.2, "eps_high": 0.2},
        correction={"name": "masked", "low": 0.7, "high": 1.5},
    )
    assert sums_of(objective, tokens) == pytest.approx(
        {
            "clip_fraction_low": 1,
            "clip_fraction_high": 1,
            "correction_changed": 2,
            "behaviour_ratio": 2.625,
            "behaviour_ratio_square": 4.390625,
            "advantage": -1,
            "advantage_square": 5,
        }
    )


def test_the_correction_compares_the_proximal_policy_with_the_generator() -> None:
    tokens = tokens_of([0.5], [0.2], [1.0], real=1)
    proximal = replace(tokens, proximal_logprobs=torch.tensor([0.4]).log())
    objective = objective_of(correction={"name": "truncated"})
    assert sums_of(objective, tokens)["behaviour_ratio"] == pytest.approx(2.5)
    assert sums_of(objective, proximal)["behaviour_ratio"] == pytest.approx(2.0)


def test_gold_sums_are_those_of_reference_answers_alone() -> None:
    tokens = tokens_of([0.5, 0.25, 0.125], [0.5, 0.25, 0.125], [0.0] * 3, real=3)
    tokens = replace(tokens, is_gold=torch.tensor([False, True, False]))
    objective = objective_of(preset="jepo", kl={"placement": "none"}, reference={"policy": "none"})
    sums = sums_of(objective, tokens)
    assert sums["gold_logprob"] == pytest.approx(math.log(0.25)) and sums["gold_tokens"] == 1


def own_logprobs(tokens: Tokens, cfg: ShapingConfig) -> Tensor:
    return tokens.logprobs


def test_advantages_of_a_shaping_are_constant() -> None:
    tokens = tokens_of([0.5, 0.25], [0.5, 0.25], [0.0] * 2, real=2)
    found = objective_of(shaping={"name": f"{__name__}:own_logprobs"}).advantages(tokens)
    assert not found.requires_grad
    assert found.exp().tolist() == pytest.approx([0.5, 0.25])
