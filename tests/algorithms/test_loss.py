"""Policy losses against numbers worked by hand and an obvious per-token version."""

import math

import pytest
import torch

from megatron_rl.algorithms.loss import (
    LOSSES,
    LossInputs,
    clipped_loss,
    reinforce_loss,
    supervised_loss,
)
from megatron_rl.config.tree import LossConfig

CFG = LossConfig(eps_low=0.2, eps_high=0.3)


def make_inputs(
    trainer: list[float], generator: list[float], advantages: list[float], weights: list[float]
) -> LossInputs:
    return LossInputs(
        torch.tensor(trainer, requires_grad=True),
        torch.tensor(generator),
        torch.tensor(advantages),
        torch.tensor(weights),
    )


def test_clipped_loss_matches_hand_worked_numbers() -> None:
    # Ratios 1, 2, 0.5, 2, 0.5 with advantages +1, +1, +1, -1, -1:
    # min(1, 1) = 1; min(2, 1.3) = 1.3; min(0.5, 0.8) = 0.5; min(-2, -1.3) = -2;
    # min(-0.5, -0.8) = -0.8
    log2 = math.log(2.0)
    inputs = make_inputs(
        [-1, -1 + log2, -1 - log2, -1 + log2, -1 - log2],
        [-1] * 5,
        [1, 1, 1, -1, -1],
        [0.1, 0.2, 0.3, 0.2, 0.2],
    )
    result = clipped_loss(inputs, CFG)
    expected = -(0.1 * 1 + 0.2 * 1.3 + 0.3 * 0.5 + 0.2 * -2 + 0.2 * -0.8)
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert result.clipped_tokens.item() == 2


def test_clipped_tokens_have_no_gradient_and_free_ones_have_ratio_times_advantage() -> None:
    log2 = math.log(2.0)
    inputs = make_inputs([-1 + log2, -1 - log2], [-1, -1], [1, 1], [0.5, 0.5])
    clipped_loss(inputs, CFG).loss.backward()
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([0.0, -0.5 * 0.5])


def test_on_policy_gradient_of_clipped_loss_is_reinforce() -> None:
    generator = torch.randn(64, generator=torch.Generator().manual_seed(0)).tolist()
    advantages = torch.randn(64, generator=torch.Generator().manual_seed(1)).tolist()
    gradients = []
    for function in (clipped_loss, reinforce_loss):
        inputs = make_inputs(generator, generator, advantages, [1 / 64] * 64)
        function(inputs, CFG).loss.backward()
        gradients.append(inputs.trainer_logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_clipped_loss_equals_obvious_version_on_random_tokens() -> None:
    rng = torch.Generator().manual_seed(3)
    trainer, generator, advantages, weights = (
        torch.randn(200, generator=rng, dtype=torch.float32) for _ in range(4)
    )
    inputs = LossInputs(trainer, generator, advantages, weights.abs())
    expected = 0.0
    for new, old, advantage, weight in zip(
        trainer.tolist(),
        generator.tolist(),
        advantages.tolist(),
        weights.abs().tolist(),
        strict=True,
    ):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 0.8), 1.3)
        expected -= weight * min(ratio * advantage, bounded * advantage)
    assert clipped_loss(inputs, CFG).loss.item() == pytest.approx(expected, rel=1e-4)


def test_loss_does_not_depend_on_the_split_into_microbatches() -> None:
    rng = torch.Generator().manual_seed(4)
    columns = [torch.randn(90, generator=rng) for _ in range(4)]
    whole = clipped_loss(LossInputs(*columns), CFG).loss
    for cuts in ([30, 30, 30], [1, 89], [90]):
        parts = zip(*[column.split(cuts) for column in columns], strict=True)
        total = sum(clipped_loss(LossInputs(*part), CFG).loss for part in parts)
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_supervised_loss_is_weighted_negative_logprob() -> None:
    inputs = make_inputs([-1.0, -3.0], [0, 0], [0, 0], [0.25, 0.75])
    assert supervised_loss(inputs, CFG).loss.item() == pytest.approx(0.25 + 2.25)


def test_table_names_every_loss() -> None:
    assert set(LOSSES) == {"clipped", "reinforce", "supervised"}
