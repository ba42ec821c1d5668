"""Rows that share positions: spread out, and their gradients summed."""

import pytest
import torch

from megatron_rl.backend.cpu.folding import Folding

POSITIONS = [0, 1, 2, 0, 1, 3, 0, 1, 4, 5, 6]
FOLDING = Folding(torch.tensor(POSITIONS), torch.tensor([0, 1, 2, 5, 8, 9, 10]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_position_gets_the_sum_over_its_rows_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(7, 33).to(dtype).requires_grad_()
    rows = FOLDING.unfold(values)
    assert torch.equal(rows, values[POSITIONS])
    slopes = torch.randn(11, 33).to(dtype)
    (found,) = torch.autograd.grad(rows, values, slopes)
    expected = torch.zeros(7, 33, dtype=torch.float64)
    for row, position in enumerate(POSITIONS):
        expected[position] += slopes[row].double()
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6, atol=1e-6)


def test_one_row_stands_for_its_position() -> None:
    values = torch.randn(11, 5, requires_grad=True)
    folded = FOLDING.fold(values)
    assert torch.equal(folded, values[[0, 1, 2, 5, 8, 9, 10]])
    slopes = torch.randn(7, 5)
    (found,) = torch.autograd.grad(folded, values, slopes)
    assert torch.equal(found[FOLDING.rows], slopes)
    assert not found[[3, 4, 6, 7]].any()


def test_other_dimensions_stay_as_they_are() -> None:
    values = torch.randn(7, 1, 4, requires_grad=True)
    rows = FOLDING.unfold(values)
    assert rows.shape == (11, 1, 4) and FOLDING.fold(rows).shape == (7, 1, 4)
    (found,) = torch.autograd.grad(rows.sum(), values)
    assert found[:, 0, 0].tolist() == [3, 3, 1, 1, 1, 1, 1]
