"""Sums and gradients of softmax by the loops, and by plain torch, against float64."""

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.backend import softmax
from megatron_rl.backend.softmax import Bonus, softmax_gradient, softmax_sums

ROWS, IDS = 9, 1003


@pytest.fixture(params=["loops", "plain"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways to compute."""
    if request.param == "plain":
        monkeypatch.setattr(softmax, "library_for", lambda name, tensor: None)
    else:
        assert softmax.library_for(softmax.SOURCE, torch.zeros(1)) is not None
    yield


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = (8 * torch.randn(ROWS, IDS)).to(dtype)
    logits[3] -= 200  # far from 0: only the maximum keeps exp within its range
    logits[4, 1:] = -torch.inf
    return logits, torch.randint(0, IDS, (ROWS,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_float64(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = inputs(dtype)
    targets[4] = 0
    found = softmax_sums(logits.clone(), targets, temperature)
    exact = logits.double() / temperature
    below = exact - exact.amax(-1, keepdim=True)
    exps = below.exp()
    chosen = below.gather(1, targets[:, None])[:, 0]
    weighted = torch.where(exps > 0, exps * below, 0).sum(-1)
    limits = {"rtol": 3e-5, "atol": 1e-5, "check_dtype": False}
    is_finite = torch.arange(ROWS) != 4
    torch.testing.assert_close(found.maxima, exact.amax(-1), **limits)
    torch.testing.assert_close(found.exps, exps.sum(-1), **limits)
    torch.testing.assert_close(found.chosen, chosen, **limits)
    torch.testing.assert_close(found.weighted[is_finite], weighted[is_finite], **limits)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_the_gradient_is_that_of_float64(dtype: torch.dtype, limit: float) -> None:
    logits, targets = inputs(dtype)
    slopes, is_here = torch.randn(ROWS), torch.arange(ROWS) % 2 == 0
    exact = logits.double().requires_grad_()
    log_z = (exact / 0.7).logsumexp(-1)
    chosen = (exact / 0.7).gather(1, targets[:, None])[:, 0]
    # Each row's logprob, divided by what the chain rule of the temperature would add.
    (expected,) = torch.autograd.grad(0.7 * (slopes * (chosen * is_here - log_z)).sum(), exact)
    found = softmax_gradient(
        logits,
        targets,
        0.7,
        log_z=log_z.detach().float(),
        slopes=slopes,
        target_slopes=slopes * is_here,
    )
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_the_gradient_with_an_entropy_bonus_is_that_of_float64(
    dtype: torch.dtype, limit: float
) -> None:
    logits, targets = inputs(dtype)
    logits[4] = logits[3]  # the row of which one logit stands out by far has no entropy
    slopes, bonuses = torch.randn(ROWS), torch.randn(ROWS)
    exact = logits.double().requires_grad_()
    logprobs = (exact / 0.7).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad(0.7 * (slopes * chosen + bonuses * entropy).sum(), exact)
    found = softmax_gradient(
        logits,
        targets,
        0.7,
        log_z=(exact / 0.7).logsumexp(-1).detach().float(),
        slopes=slopes,
        target_slopes=slopes,
        bonus=Bonus(bonuses, entropy.detach().float()),
    )
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)


def test_a_logit_that_is_not_a_number_is_never_lost() -> None:
    logits, targets = inputs(torch.float32)
    logits[2, 77] = torch.nan
    found = softmax_sums(logits, targets, 1.0)
    assert found.exps.isnan().tolist() == [row == 2 for row in range(ROWS)]
