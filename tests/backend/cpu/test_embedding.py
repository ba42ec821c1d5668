"""The gradient of an embedding is added where it is kept."""

import pytest
import torch

from megatron_rl.backend.cpu.patches import embed

IDS = torch.tensor([[3, 0, 3, 5, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_in_float32_and_nothing_is_handed_on_that_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(7, 4).to(dtype))
    weight.main_grad = torch.ones(7, 4)
    weight.zero_out_wgrad = True
    slopes = torch.randn(1, 5, 4).to(dtype)
    found = embed(IDS, weight)
    assert torch.equal(found, weight[IDS])
    found.backward(slopes)
    expected = torch.ones(7, 4, dtype=torch.float64)
    for token, slope in zip(IDS[0].tolist(), slopes[0].double(), strict=True):
        expected[token] += slope
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-6, atol=1e-6)
    # What Megatron's hook asks: whether to add the gradient that is handed on.
    assert weight.grad_added_to_main_grad and not weight.zero_out_wgrad


def test_without_a_place_for_it_the_gradient_is_handed_on() -> None:
    weight = torch.nn.Parameter(torch.randn(7, 4))
    embed(IDS, weight).sum().backward()
    assert weight.grad[:, 0].tolist() == [1, 0, 0, 3, 0, 1, 0]
