"""Log ratios of any size leave losses and gradients finite; within the bound nothing changes."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.importance_ratio import CORRECTIONS
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.algorithms.policy_loss import POLICY_LOSSES
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import AlgorithmConfig

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
