"""RMSNorm, SwiGLU and AdamW in loops against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.backend.cpu import adam, pointwise
from megatron_rl.backend.cpu.adam import ForeachAdam
from megatron_rl.backend.cpu.pointwise import RMSNorm, swiglu

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def assert_near(found: Tensor, wanted: Tensor, limit: float) -> None:
    assert (found.double() - wanted).abs().max() <= limit * max(1, wanted.abs().max())


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("width", [5, 64])
def test_norm_is_that_of_torch(dtype: torch.dtype, limit: float, width: int) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=width, num_attention_heads=1, params_dtype=dtype
    )
    norm = RMSNorm(config, width, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(width))
    x = torch.randn(7, 3, width).to(dtype).requires_grad_()
    slopes = torch.randn(7, 3, width).to(dtype)
    found = norm(x)
    gradients = torch.autograd.grad(found, [x, norm.weight], slopes)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight)]
    wanted = F.rms_norm(exact[0], (width,), exact[1], 1e-3)
    expected = torch.autograd.grad(wanted, exact, slopes.double())
    for mine, theirs in zip((found, *gradients), (wanted, *expected), strict=True):
        assert mine.dtype is dtype
        assert_near(mine, theirs, limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_gated_unit_is_that_of_torch(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    both = (30 * torch.randn(9, 2, 46)).to(dtype).requires_grad_()
    slopes = torch.randn(9, 2, 23).to(dtype)
    found = swiglu(both)
    (gradient,) = torch.autograd.grad(found, both, slopes)
    exact = both.detach().double().requires_grad_()
    gate, linear = exact.chunk(2, dim=-1)
    wanted = F.silu(gate) * linear
    (expected,) = torch.autograd.grad(wanted, exact, slopes.double())
    assert_near(found, wanted, limit)
    assert_near(gradient, expected, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    for value in (torch.nan, torch.inf):
        both = torch.ones(1, 64, dtype=dtype, requires_grad=True)
        with torch.no_grad():
            both[0, 40] = value
        found = swiglu(both)
        assert found.isfinite().sum() == 31
        (gradient,) = torch.autograd.grad(found, both, torch.full_like(found, torch.nan))
        assert gradient.isnan().all()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_loop_updates_as_the_foreach_kernels(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(70), torch.randn(1)]
    grads = [[torch.randn_like(tensor) for tensor in start] for _ in range(4)]
    results = []
    for has_loop in (True, False):
        if not has_loop:
            monkeypatch.setattr(adam, "_can_loop", lambda *arrays: False)
        params = [tensor.clone().requires_grad_() for tensor in start]
        optimizer = ForeachAdam(params, lr=0.03, betas=(0.8, 0.95), weight_decay=decay)
        for each in grads:
            for param, grad in zip(params, each, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        states = [optimizer.state[param] for param in params]
        results.append([*params, *(state[name] for state in states for name in sorted(state))])
    for looped, foreach in zip(*results, strict=True):
        torch.testing.assert_close(looped, foreach, rtol=1e-6, atol=1e-6)


def test_plain_torch_is_left_for_other_dtypes() -> None:
    assert pointwise.library_for(pointwise.SOURCE, torch.zeros(1, dtype=torch.float64)) is None
    assert pointwise.library_for(pointwise.SOURCE, torch.zeros(1)) is not None
