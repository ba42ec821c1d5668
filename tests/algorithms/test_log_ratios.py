"""Ratios of sequences by hand. Log ratios of any size leave losses and gradients finite; within the
bound nothing changes."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.importance_ratio import (
    CORRECTIONS,
    behaviour_ratios,
    importance_ratios,
)
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.algorithms.policy_loss import POLICY_LOSSES
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import AlgorithmConfig, CorrectionConfig, PolicyLossConfig

EXTREME = [30.0, -30.0, 100.0, -100.0, 1e4, -1e4]
PARTS = sorted(itertools.product(POLICY_LOSSES, CORRECTIONS, ("token", "sequence")))
KLS = [("loss", "k2"), ("loss", "forward_kl"), ("reward", "k1")]


def tokens_at(log_ratios: list[float], sign: float) -> Tokens:
    """One sequence a token; the generator and the reference are both so far from the policy."""
    count = len(log_ratios)
    numbers, ones = torch.arange(count), torch.ones(count)
    logprobs = torch.full((count,), -1.5).requires_grad_()
    others = logprobs.detach() - torch.tensor(log_ratios)
    return Tokens(
        logprobs=logprobs,
        generator_logprobs=others,
        advantages=sign * ones,
        rewards=ones,
        weights=ones / count,
        is_real=ones.bool(),
        lags=numbers * 0,
        segments=Segments(numbers, numbers + 1, numbers, numbers * 0),
        is_gold=~ones.bool(),
        reference_logprobs=others,
    )


def loss_and_gradient(
    given: dict, log_ratios: list[float], sign: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tokens = tokens_at(log_ratios, sign)
    objective = find_objective(AlgorithmConfig.model_validate(given))
    found = objective.loss(tokens, tokens.advantages, torch.zeros(len(log_ratios)))
    found.loss.backward()
    gradient = tokens.logprobs.grad
    assert gradient is not None
    return found.loss.detach(), gradient, found.sums


@pytest.mark.parametrize(("policy_loss", "correction", "level"), PARTS)
def test_every_loss_has_finite_gradients_at_any_log_ratio(
    policy_loss: str, correction: str, level: str
) -> None:
    given = {
        "policy_loss": {"name": policy_loss, "level": level},
        "correction": {"name": correction, "level": level},
    }
    for sign in (1.0, -1.0):
        loss, gradient, sums = loss_and_gradient(given, EXTREME, sign)
        assert all(value.isfinite().all() for value in (loss, gradient, *sums.values()))
        # One sixth of the weight, and no ratio above e^20: no gradient of 1e13.
        assert gradient.abs().max() <= math.exp(20) / len(EXTREME) * (1 + 1e-6)


@pytest.mark.parametrize(("placement", "estimator"), KLS)
def test_every_kl_has_finite_gradients_at_any_log_ratio(placement: str, estimator: str) -> None:
    kl = {"placement": placement, "estimator": estimator, "horizon": "token"}
    given = {"kl": kl, "reference": {"policy": "start"}, "policy_loss": {"name": "reinforce"}}
    loss, gradient, sums = loss_and_gradient(given, EXTREME, 1.0)
    assert all(value.isfinite().all() for value in (loss, gradient, *sums.values()))


def test_a_token_beyond_the_bound_is_neither_pushed_nor_blown_up() -> None:
    # Unlikelier than at sampling and good, or likelier and bad: the cases that no clip bounds.
    for sign, log_ratio in ((1.0, -30.0), (-1.0, 30.0)):
        loss, gradient, _ = loss_and_gradient({}, [log_ratio], sign)
        assert gradient.item() == 0.0
        assert loss.item() == pytest.approx(-sign * math.exp(math.copysign(20, log_ratio)))
    wider = {"policy_loss": {"max_log_ratio": 32.0}}
    _, gradient, _ = loss_and_gradient(wider, [30.0], -1.0)
    assert gradient.item() == pytest.approx(math.exp(30), rel=1e-5)


WITHIN = torch.linspace(-19.9, 19.9, 97).tolist()


@pytest.mark.parametrize(("policy_loss", "correction", "level"), PARTS)
def test_a_bound_changes_nothing_within_it(policy_loss: str, correction: str, level: str) -> None:
    found = []
    for bound in (20.0, 40.0):
        given = {
            "policy_loss": {"name": policy_loss, "level": level, "max_log_ratio": bound},
            "correction": {"name": correction, "level": level},
        }
        found.append([loss_and_gradient(given, WITHIN, sign)[:2] for sign in (1.0, -1.0)])
    for narrow, wide in zip(*found, strict=True):
        assert all(map(torch.equal, narrow, wide))


def test_within_the_bound_losses_are_those_without_one_bit_for_bit() -> None:
    for sign in (1.0, -1.0):
        loss, gradient, _ = loss_and_gradient({}, WITHIN, sign)
        tokens = tokens_at(WITHIN, sign)
        ratio = (tokens.logprobs - tokens.generator_logprobs).exp()
        clipped = (ratio * sign).minimum(ratio.clamp(0.8, 1.28) * sign)
        obvious = -(tokens.weights * clipped).sum()
        obvious.backward()
        assert torch.equal(loss, obvious.detach())
        assert torch.equal(gradient, tokens.logprobs.grad)


# --- ratios of sequences -----------------------------------------------------------------------


def one_sequence(log_ratios: list[float], advantages: list[float], gold: list[bool]) -> Tokens:
    """All tokens in one sequence."""
    count = len(log_ratios)
    one = torch.zeros(1, dtype=torch.int64)
    segments = Segments(torch.zeros(count, dtype=torch.int64), one + count, one, one)
    found = replace(tokens_at(log_ratios, 1.0), segments=segments, is_gold=torch.tensor(gold))
    return replace(found, advantages=torch.tensor(advantages))


NO_GOLD = [False] * 4
SEQUENCES = {"policy_loss": {"level": "sequence", "eps_low": 0.2, "eps_high": 0.2}}


@pytest.mark.parametrize(
    ("mean", "advantages", "kept"),
    [
        # Replies that earned 3 and -1, and thoughts of -2 before a reference answer of 0.5.
        (0.1, [3.0, 3.0, -1.0, -1.0], [3.0, 3.0, -1.0, -1.0]),
        (-0.1, [-2.0, -2.0, 0.5, 0.5], [-2.0, -2.0, 0.5, 0.5]),
        # Beyond the clip each token's own sign decides.
        (0.3, [3.0, 3.0, -1.0, -1.0], [0.0, 0.0, -1.0, -1.0]),
        (-0.3, [-2.0, -2.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.5]),
        (0.3, [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_a_token_learns_its_own_advantage_by_the_ratio_of_its_sequence(
    mean: float, advantages: list[float], kept: list[float]
) -> None:
    log_ratios = [mean + gap for gap in (0.6, -0.2, -0.5, 0.1)]
    tokens = one_sequence(log_ratios, advantages, NO_GOLD)
    objective = find_objective(AlgorithmConfig.model_validate(SEQUENCES))
    objective.loss(tokens, tokens.advantages, torch.zeros(4)).loss.backward()
    # Each token weighs a quarter.
    expected = -math.exp(mean) / 4 * torch.tensor(kept)
    torch.testing.assert_close(tokens.logprobs.grad, expected)


def test_equal_advantages_have_the_gradient_of_the_ratio_of_the_sequence() -> None:
    tokens = one_sequence([0.3, -0.4, 0.2, 0.1], [2.0] * 4, NO_GOLD)
    objective = find_objective(AlgorithmConfig.model_validate(SEQUENCES))
    (found,) = torch.autograd.grad(
        objective.loss(tokens, tokens.advantages, torch.zeros(4)).loss, tokens.logprobs
    )
    ratio = (tokens.logprobs - tokens.generator_logprobs).mean().exp()
    (expected,) = torch.autograd.grad(-2.0 * ratio, tokens.logprobs)
    torch.testing.assert_close(found, expected)


def test_a_reference_answer_has_the_ratio_1_and_is_in_no_mean_of_its_sequence() -> None:
    # The trainer's own logprobs are the old ones of the answer. Mean of the thoughts: 0.3.
    tokens = one_sequence([0.5, 0.1, 0.0, 0.0], [1.0] * 4, [False, False, True, True])
    expected = torch.tensor([math.exp(0.3)] * 2 + [1.0] * 2)
    policy = importance_ratios(tokens, PolicyLossConfig(level="sequence"))
    torch.testing.assert_close(policy.detach(), expected)
    behaviour = behaviour_ratios(tokens, CorrectionConfig(level="sequence"), 20.0)
    torch.testing.assert_close(behaviour, expected)
    (slopes,) = torch.autograd.grad(policy.sum(), tokens.logprobs)
    torch.testing.assert_close(slopes, expected)
    alone = one_sequence([0.0, 0.0], [1.0] * 2, [True, True])
    assert importance_ratios(alone, PolicyLossConfig(level="sequence")).tolist() == [1.0, 1.0]
