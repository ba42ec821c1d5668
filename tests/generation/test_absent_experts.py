"""Experts that a rank does not hold add nothing to a token."""

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from generation import sglang_cpu


class Choice(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


@pytest.fixture
def native() -> ModuleType:
    """A stand-in for SGLang's module, changed: expert e multiplies a token by e + 1."""
    path = sglang_cpu.SITE_DIR / "absent_experts.py"
    spec = importlib.util.spec_from_file_location("absent_experts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def forward(layer: Any, x: torch.Tensor, chosen: Choice, config: Any) -> torch.Tensor:
        assert len(x) and bool((chosen.topk_ids >= 0).all())
        return x * (chosen.topk_weights * (chosen.topk_ids + 1)).sum(1, keepdim=True)

    native = SimpleNamespace(moe_forward_native=forward)
    module.install(native)
    return native


def test_absent_experts_add_nothing(native: ModuleType) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    experts = torch.tensor([[-1, 1], [0, 1], [-1, -1]])
    output = native.moe_forward_native(None, x, Choice(weights, experts), None)
    assert output.tolist() == [[0.5, 1.0], [4.5, 6.0], [0.0, 0.0]]


@pytest.mark.parametrize("expert", [0, -1])
def test_a_rank_may_hold_all_or_none(native: ModuleType, expert: int) -> None:
    choice = Choice(torch.ones(2, 1), torch.full((2, 1), expert))
    output = native.moe_forward_native(None, torch.ones(2, 3), choice, None)
    assert output.sum() == (6.0 if expert == 0 else 0.0)
